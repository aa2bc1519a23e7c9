"""Host integers saturate on their way to the targets, with and without jax_enable_x64."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_attention.jax
from calls import every_call, flatten, plain_calls
from xla_attention.jax import dot_product_attention, flash_attn_varlen, kv_cache_update, ragged_paged_attention

PAST = 2**33  # truncated to 0 in 32 bits
SMALLEST, LARGEST = -(2**31), 2**31 - 1


def call_of(name):
    """A call as a function of its integers, and these, all of which affect its results."""
    call = every_call()[name]
    integers = {name: x for name, x in call.arguments.items() if getattr(x, "dtype", None) == np.int32}
    # Finite, because NaN is not equal to itself; lengths that are too large may attend to any row.
    arguments = {name: np.nan_to_num(x) if isinstance(x, np.ndarray) else x for name, x in call.arguments.items()}
    integers = {name: arguments.pop(name) % 5 if name == "positions" else arguments.pop(name) for name in integers}
    integers |= {"num_seqs": np.int32([2])} if "num_seqs" in integers else {}
    return functools.partial(getattr(xla_attention.jax, call.function), **arguments), integers


def ragged():
    attend, integers = call_of("paged_attention: plain")
    operands = attend.keywords["query"], attend.keywords["kv_cache"]
    return lambda **integers: ragged_paged_attention(*operands, *integers.values()), integers


def dense():
    q, k = (np.random.default_rng(seed).standard_normal((2, 4, seed, 8), np.float32) for seed in (2, 1))
    lengths = {"query_seq_lengths": np.int32([2, 1]), "key_value_seq_lengths": np.int32([2, 3])}
    return functools.partial(dot_product_attention, q, k, k), lengths


NAMES = [name for name in plain_calls() if not name.startswith(("simple_add", "merge"))] + [
    "flash_attn_varlen: leftpad_k",
    "flash_attn_varlen: causal+q_offset",
    "flash_attn_varlen: k_start+k_end",
    "paged_attention: k_start+k_end",
]
CALLS = {name: call_of(name) for name in NAMES}
CALLS |= {"ragged_paged_attention": ragged(), "dot_product_attention": dense()}
each_operand = pytest.mark.parametrize(
    ("name", "operand"), [(name, operand) for name, (_, integers) in CALLS.items() for operand in integers]
)


def results(call, integers):
    return [np.asarray(x) for x in flatten(call(**integers))]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def saturated(operand, valid, past):
    """The operand with every number saturated."""
    return np.full_like(valid, -1 if operand == "slot_mapping" else LARGEST if past > 0 else SMALLEST)


@pytest.mark.parametrize("past", [PAST, -PAST], ids=["above", "below"])
@each_operand
def test_host_integers_saturate(past, name, operand):
    call, valid = CALLS[name]
    nearest = saturated(operand, valid[operand], past)
    wrong = valid[operand].astype(np.int64) + past
    forms = [wrong, wrong.tolist(), (wrong.astype(object) * 2**40).tolist(), [jnp.asarray(nearest[0]), *wrong[1:]]]
    forms += [int(wrong[0])] if operand == "num_seqs" else []
    for setting in (contextlib.nullcontext, functools.partial(jax.enable_x64, True)):
        with setting():
            expected = results(call, valid | {operand: nearest})
            assert not equal(expected, results(call, valid)), "the test cannot detect truncation"
            for form in forms:
                assert equal(results(call, valid | {operand: form}), expected), form


@each_operand
def test_wider_device_arrays_saturate_also_inside_jit(name, operand):
    call, valid = CALLS[name]
    expected = results(call, valid | {operand: saturated(operand, valid[operand], PAST)})
    for dtype in ("uint32", "int64", "uint64"):
        with contextlib.nullcontext() if dtype == "uint32" else jax.enable_x64(True):
            past = 2**31 if dtype == "uint32" else PAST
            wide = jnp.asarray(np.maximum(valid[operand], 0).astype(dtype) + np.asarray(past, dtype))
            assert wide.dtype == dtype
            assert equal(results(call, valid | {operand: wide}), expected)
            if dtype == "int64":  # every dtype is converted by the same code
                jitted = jax.jit(lambda wide: call(**valid | {operand: wide}))
                assert equal([np.asarray(x) for x in flatten(jitted(wide))], expected)


def test_a_64_bit_array_is_not_truncated_without_x64():
    call, valid = CALLS["kv_cache_update: float32 interleaved plain"]
    with jax.enable_x64(True):
        slots = jnp.asarray(valid["slot_mapping"], jnp.int64) + PAST
    np.testing.assert_array_equal(call(slot_mapping=slots), call.keywords["kv_cache"])


@pytest.mark.parametrize("value", [[0.5, 1, 2], np.ones(3), [], [True, False, True], ["a"], None], ids=repr)
def test_values_that_are_not_integers_are_an_error_that_names_them(value):
    rows = np.ones((3, 1, 8), np.float32)
    with pytest.raises(TypeError, match="^slot_mapping has dtype .*, expected integers$"):
        kv_cache_update(np.ones((3, 4, 2, 8), np.float32), rows, rows, value)


def test_the_largest_max_seqlen_does_not_overflow():
    rows, starts = np.ones((3, 1, 8), np.float32), np.array([0, 3])
    hinted = flash_attn_varlen(rows, rows, rows, starts, max_seqlen_q=2**63 - 1)
    np.testing.assert_allclose(hinted, flash_attn_varlen(rows, rows, rows, starts), rtol=1e-6)
