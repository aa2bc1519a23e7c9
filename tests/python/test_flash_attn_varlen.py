"""flash_attn_varlen through JAX against the oracle, and what it promises beside numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batches import varlen
from oracle import assert_flash_attn_varlen
from xla_attention.jax import flash_attn_varlen

MIXED = [(33, 33), (1, 100), (5, 70), (0, 9), (3, 0), (9, 4)]


def check(operands, options, **more):
    """Output and lse against the oracle, within twice the error of the naive computation."""
    options = {**options, **more}
    out, lse = flash_attn_varlen(*operands, return_lse=True, **options)
    meant = {name: x for name, x in options.items() if not name.startswith("max_seqlen")}
    as_numpy = {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in meant.items()}
    assert_flash_attn_varlen(out, lse, *(None if x is None else np.asarray(x) for x in operands), **as_numpy)
    return out


@pytest.mark.parametrize("out_dtype", [None, "bfloat16", "float16"])
def test_queries_may_be_8_bit(platform, out_dtype):
    operands, options = varlen(MIXED, dtype="float8_e4m3fn")
    options |= {"q_scale": 0.25, "k_scale": 2.0, "v_scale": jnp.array([1.0, 3.0]), "causal": True}
    out = functools.partial(flash_attn_varlen, out_dtype=out_dtype)(*operands, **options)
    assert out.dtype == jnp.dtype(out_dtype or "bfloat16")
    numbers = (None if x is None else np.asarray(x) for x in operands)
    as_numpy = {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in options.items()}
    assert_flash_attn_varlen(out, None, *numbers, **as_numpy)


def test_without_starts_of_keys_they_are_packed_like_the_queries(platform):
    (q, k, v, starts, _), options = varlen([(5, 5), (9, 9)])
    check((q, k, v, starts, None), options, causal=True)


def test_starts_of_keys_tell_the_lengths_of_paged_ones(platform):
    (q, k, v, starts, _), options = varlen([(5, 9), (2, 30)], pages=8)
    del options["seqused_k"]
    check((q, k, v, starts, jnp.array([100, 109, 139])), options, causal=True)


def test_it_runs_under_jit_scan_and_vmap(platform):
    (q, *rest), options = varlen([(7, 7), (2, 30)])
    attend = functools.partial(flash_attn_varlen, causal=True, **options)
    wanted = np.asarray(attend(q, *rest))
    np.testing.assert_array_equal(jax.jit(attend)(q, *rest), wanted)
    queries = jnp.stack([q, 2 * q])
    _, scanned = jax.lax.scan(lambda _, q: (None, attend(q, *rest)), None, queries)
    np.testing.assert_array_equal(scanned[0], wanted)
    np.testing.assert_array_equal(jax.vmap(lambda q: attend(q, *rest))(queries)[0], wanted)


def test_sizes_may_be_symbolic_in_an_exported_program(platform):
    rows, slots = jax.export.symbolic_shape("t, b")
    shapes = [((rows, 4, 32), jnp.float32)] * 3 + [((slots,), jnp.int32)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("xla_gpu_flash_attn_varlen")]
    attend = jax.jit(functools.partial(flash_attn_varlen, causal=True))
    exported = jax.export.export(attend, platforms=["cpu", "cuda"], disabled_checks=unchecked)(*arguments)
    q, k, v = (jax.random.normal(jax.random.key(i), (5, 4, 32)) for i in range(3))
    starts = jnp.array([0, 2, 5])
    np.testing.assert_array_equal(exported.call(q, k, v, starts), flash_attn_varlen(q, k, v, starts, causal=True))


BAD = {
    "a window of one side": ({"window": 4}, ValueError, "window is 4, expected (left, right), two integers"),
    "a window of three": ({"window": (1, 2, 3)}, ValueError, "window is (1, 2, 3), expected (left, right)"),
    "dropout": ({"dropout_p": 0.1}, NotImplementedError, "there is no dropout; dropout_p is 0.1, expected 0"),
    "a window of -2": ({"window": (-2, 0)}, ValueError, "window_left is -2, expected >= 0, or -1 for unlimited"),
    "lengths of another batch": (
        {"seqused_k": jnp.ones(3, jnp.int32)},
        ValueError,
        "seqused_k has shape [3]",
    ),
    "an unknown layout": ({"kv_layout": "tiled"}, ValueError, "kv_layout is 'tiled', expected 'interleaved'"),
    "one buffer and values": ({"kv_layout": "stacked"}, ValueError, "v is an array, expected None"),
    "a traced-like hint": ({"max_seqlen_q": 2.5}, TypeError, "max_seqlen_q is 2.5, expected an integer"),
    "a negative hint": ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k is -1, expected >= 0"),
    "a flag that is a number": ({"causal": 1}, TypeError, "causal is 1, expected True or False"),
    "an output of another dtype": (
        {"out_dtype": "bfloat16"},
        NotImplementedError,
        "k is f32 and out is bf16",
    ),
}


@pytest.mark.parametrize(("options", "kind", "message"), BAD.values(), ids=BAD.keys())
def test_mistakes_are_found_at_trace_time(options, kind, message):
    operands, _ = varlen([(5, 5), (9, 9)])
    with pytest.raises(kind) as caught:
        flash_attn_varlen(*operands, **options)
    assert message in str(caught.value)


def test_dtypes_outside_the_table_are_not_supported():
    (q, k, v, *starts), _ = varlen([(5, 5)])
    for q_dtype, kv_dtype in (("float32", "bfloat16"), ("float32", "float8_e5m2"), ("float8_e5m2", "float8_e5m2")):
        with pytest.raises(NotImplementedError, match="there is f32 queries over f32"):
            flash_attn_varlen(q.astype(q_dtype), k.astype(kv_dtype), v.astype(kv_dtype), *starts)
