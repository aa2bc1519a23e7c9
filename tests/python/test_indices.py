"""Integers of the host do not wrap on their way to the targets, in JAX's 32 bits as in its 64."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_attention.jax import (
    dot_product_attention,
    flash_attn_varlen,
    kv_cache_update,
    paged_attention,
    paged_attention_update,
    ragged_paged_attention,
    rope_kv_cache_update,
)

PAST = 2**33  # what 32 bits drop
SMALLEST, LARGEST = -(2**31), 2**31 - 1
settings = pytest.mark.parametrize(
    "setting", [contextlib.nullcontext, functools.partial(jax.enable_x64, True)], ids=["32 bits", "64 bits"]
)


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


QUERY, ROWS, CACHE, TABLE = random(0, 3, 2, 8), random(1, 3, 1, 8), random(2, 3, 4, 2, 8), random(3, 4, 8)
KEYS = random(6, 6, 1, 8)
DENSE = [x[None].repeat(2, 0) for x in (QUERY, random(4, 4, 1, 8), random(5, 4, 1, 8))]
# Each function of its integers alone, and integers of which neither the smallest nor the largest does the same.
METADATA = {"context_lens": [3, 2], "block_tables": [[1], [1]], "query_start_loc": [0, 2, 3], "num_seqs": [1]}
SLOTS = [1, 2, 7]


def paged(function, **options):
    def call(context_lens, block_tables, query_start_loc, num_seqs, **more):
        new = (ROWS, ROWS, more["slot_mapping"]) if more else ()
        return function(QUERY, CACHE, context_lens, block_tables, query_start_loc, num_seqs, *new, **options)

    return call


CALLS = {
    "paged_attention": (paged(paged_attention, scale=0.3), METADATA),
    "ragged_paged_attention": (paged(ragged_paged_attention), METADATA),
    "paged_attention_update": (paged(paged_attention_update, scale=0.3), METADATA | {"slot_mapping": SLOTS}),
    "kv_cache_update": (functools.partial(kv_cache_update, CACHE, ROWS, ROWS), {"slot_mapping": SLOTS}),
    "kv_cache_update of two": (
        functools.partial(kv_cache_update, (CACHE[:, :, :1], CACHE[:, :, 1:]), ROWS, ROWS),
        {"slot_mapping": SLOTS},
    ),
    "rope_kv_cache_update": (
        functools.partial(rope_kv_cache_update, CACHE, QUERY, ROWS, ROWS, cos_sin=TABLE),
        {"slot_mapping": SLOTS, "positions": [1, 2, 1]},
    ),
    "flash_attn_varlen": (
        functools.partial(flash_attn_varlen, QUERY, KEYS, KEYS, causal=True),
        {
            "cu_seqlens_q": [0, 1, 3],
            "cu_seqlens_k": [0, 3, 6],
            "seqused_q": [1, 1],
            "seqused_k": [2, 2],
            "leftpad_k": [1, 0],
        },
    ),
    "flash_attn_varlen over pages": (
        functools.partial(flash_attn_varlen, QUERY, CACHE, None, kv_layout="interleaved"),
        {"cu_seqlens_q": [0, 1, 3], "seqused_k": [3, 2], "block_table": [[1], [1]]},
    ),
    "dot_product_attention": (
        functools.partial(dot_product_attention, *DENSE),
        {"query_seq_lengths": [2, 1], "key_value_seq_lengths": [2, 3]},
    ),
}
each_operand = pytest.mark.parametrize(
    ("name", "operand"),
    [
        pytest.param(name, operand, id=f"{name} {operand}")
        for name, (_, integers) in CALLS.items()
        for operand in integers
    ],
)


def results(call, integers):
    return [np.asarray(x) for x in jax.tree.leaves(call(**integers))]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@settings
@pytest.mark.parametrize("past", [PAST, -PAST], ids=["above", "below"])
@each_operand
def test_no_operand_wraps(setting, past, name, operand):
    call, right = CALLS[name]
    right = {other: np.asarray(values, np.int32) for other, values in right.items()}
    nearest = LARGEST if past > 0 else SMALLEST
    saturated = np.full_like(right[operand], -1 if operand == "slot_mapping" else nearest)
    wrong = right[operand].astype(np.int64) + past
    forms = [wrong, wrong.tolist(), (wrong.astype(object) * 2**40).tolist(), [jnp.asarray(saturated[0]), *wrong[1:]]]
    with setting():
        wanted = results(call, right | {operand: saturated})
        assert not equal(wanted, results(call, right)), "a value that wraps would not be noticed"
        for form in forms:
            assert equal(results(call, right | {operand: form}), wanted), form
    if operand == "num_seqs":
        assert equal(results(call, right | {operand: int(wrong[0])}), wanted)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64"])
@each_operand
def test_wider_arrays_of_the_device_saturate_inside_jit_too(dtype, name, operand):
    call, right = CALLS[name]
    right = {other: np.asarray(values, np.int32) for other, values in right.items()}
    saturated = np.full_like(right[operand], -1 if operand == "slot_mapping" else LARGEST)
    wanted = results(call, right | {operand: saturated})
    with contextlib.nullcontext() if dtype == "uint32" else jax.enable_x64(True):
        past = 2**31 if dtype == "uint32" else PAST
        wide = jnp.asarray(right[operand].astype(dtype) + np.asarray(past, dtype))
        assert wide.dtype == dtype
        assert equal(results(call, right | {operand: wide}), wanted)
        jitted = jax.jit(lambda wide: call(**right | {operand: wide}))
        assert equal([np.asarray(x) for x in jax.tree.leaves(jitted(wide))], wanted)


def test_an_array_made_with_64_bits_is_not_cut_without_them():
    with jax.enable_x64(True):
        slots = jnp.asarray(SLOTS, jnp.int64) + PAST
    np.testing.assert_array_equal(kv_cache_update(CACHE, ROWS, ROWS, slots), CACHE)


@pytest.mark.parametrize("value", [[0.5, 1, 2], np.ones(3), [], [True, False, True], ["a"], None], ids=repr)
def test_what_is_no_integer_is_refused_by_name(value):
    with pytest.raises(TypeError, match="^slot_mapping has dtype .*, expected integers$"):
        kv_cache_update(CACHE, ROWS, ROWS, value)


def test_static_integers_do_not_wrap_either():
    operands = (QUERY, CACHE, *METADATA.values())
    with pytest.raises(ValueError, match=r"^sliding_window is 18446744073709551615, which 64 bits do not hold"):
        paged_attention(*operands, scale=1.0, sliding_window=np.uint64(2**64 - 1))
    starts = np.array([0, 3])
    hinted = flash_attn_varlen(QUERY, ROWS, ROWS, starts, max_seqlen_q=2**63 - 1)
    np.testing.assert_allclose(hinted, flash_attn_varlen(QUERY, ROWS, ROWS, starts), rtol=1e-6)
