"""flash_attn_varlen through JAX against the oracle, and what it promises beside numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batches import varlen
from oracle import assert_flash_attn_varlen
from xla_attention.jax import flash_attn_varlen

MIXED = [(33, 33), (1, 100), (5, 70), (0, 9), (3, 0), (9, 4)]
SIXTEEN_BIT = ["bfloat16", "float16"]


def check(operands, options, **more):
    """Output and lse against the oracle, within twice the error of the naive computation."""
    options = {**options, **more}
    out, lse = flash_attn_varlen(*operands, return_lse=True, **options)
    meant = {name: x for name, x in options.items() if not name.startswith("max_seqlen")}
    as_numpy = {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in meant.items()}
    assert_flash_attn_varlen(out, lse, *(None if x is None else np.asarray(x) for x in operands), **as_numpy)
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 1), (9, 3), (4, 4)])
def test_packed_keys_equal_the_oracle(platform, dtype, causal, heads):
    check(*varlen(MIXED, heads=heads, dtype=dtype), causal=causal)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_layout", [None, "interleaved", "stacked", "per_page"])
@pytest.mark.parametrize("pages", [1, 7, 16, 64])
def test_pages_in_every_layout_equal_the_oracle(platform, dtype, kv_layout, pages):
    check(*varlen(MIXED, dtype=dtype, pages=pages, kv_layout=kv_layout), causal=True)


@pytest.mark.parametrize(("d", "dv"), [(8, 8), (40, 24), (64, 128), (96, 96), (192, 128), (128, 256), (256, 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pages", [None, 16])
def test_head_dimensions_of_keys_and_values_may_differ(platform, d, dv, dtype, pages):
    out = check(*varlen([(20, 45), (1, 80)], d=d, dv=dv, dtype=dtype, pages=pages), causal=True)
    assert out.shape[-1] == dv


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("d", "pages"), [(64, None), (128, 16), (40, 5)])
def test_keys_and_values_may_be_8_bit(platform, dtype, kv_dtype, d, pages):
    scales = {"k_scale": jnp.array([0.5, 2.0]), "v_scale": 1.5}
    check(*varlen(MIXED, d=d, dtype=dtype, kv_dtype=kv_dtype, pages=pages), causal=True, **scales)


@pytest.mark.parametrize("out_dtype", [None, *SIXTEEN_BIT])
@pytest.mark.parametrize("pages", [None, 16])
def test_queries_may_be_8_bit(platform, out_dtype, pages):
    operands, options = varlen(MIXED, dtype="float8_e4m3fn", pages=pages)
    options |= {"q_scale": 0.25, "k_scale": 2.0, "v_scale": jnp.array([1.0, 3.0]), "causal": True}
    out = functools.partial(flash_attn_varlen, out_dtype=out_dtype)(*operands, **options)
    assert out.dtype == jnp.dtype(out_dtype or "bfloat16")
    numbers = (None if x is None else np.asarray(x) for x in operands)
    as_numpy = {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in options.items()}
    assert_flash_attn_varlen(out, None, *numbers, **as_numpy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [(0, 0), (5, 3), (-1, 2), (40, -1), (10**9, 10**9)])
@pytest.mark.parametrize("top_left", [False, True])
def test_windows_on_both_sides(platform, dtype, window, top_left):
    check(*varlen(MIXED, dtype=dtype), window=window, top_left=top_left)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pages", [None, 16])
@pytest.mark.parametrize(
    "option",
    [
        {"softcap": 3.0},
        {"alibi_slopes": jnp.linspace(0.01, 0.5, 8)},
        {"alibi_slopes": jnp.linspace(0.0, 0.5, 6 * 8).reshape(6, 8)},
        {"sinks": jnp.linspace(-2.0, 3.0, 8)},
        {"leftpad_k": jnp.array([0, 30, 70, 3, 0, 4])},
        {"softmax_scale": 0.3, "top_left": True},
        {"softcap": 2.0, "alibi_slopes": jnp.ones(8), "sinks": jnp.zeros(8), "q_scale": 0.5, "v_scale": 2.0},
    ],
    ids=lambda option: "+".join(option),
)
def test_options_equal_the_oracle(platform, dtype, pages, option):
    check(*varlen(MIXED, dtype=dtype, pages=pages), causal=True, **option)


@pytest.mark.parametrize("pages", [None, 16])
def test_rows_out_of_use_may_hold_anything(platform, pages):
    out = check(*varlen(MIXED, unused=(3, 2), pages=pages), causal=True)
    assert (out[33:36] == 0).all()


def test_without_starts_of_keys_they_are_packed_like_the_queries(platform):
    (q, k, v, starts, _), options = varlen([(5, 5), (9, 9)])
    check((q, k, v, starts, None), options, causal=True)


def test_starts_of_keys_tell_the_lengths_of_paged_ones(platform):
    (q, k, v, starts, _), options = varlen([(5, 9), (2, 30)], pages=8)
    del options["seqused_k"]
    check((q, k, v, starts, jnp.array([100, 109, 139])), options, causal=True)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 90)), max_size=5),
    st.sampled_from([(1, 1), (6, 2), (5, 1)]),
    st.sampled_from([(8, 8), (24, 40), (64, 64)]),
    st.sampled_from([(None, None), (5, None), (16, "interleaved"), (3, "stacked"), (4, "per_page")]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.tuples(st.integers(-1, 30), st.integers(-1, 30)),
    st.booleans(),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_any_ragged_batch_equals_the_oracle(sequences, heads, dims, storage, dtype, window, top_left, unused):
    pages, kv_layout = storage
    d, dv = dims if kv_layout is None else (dims[0], None)
    batch = varlen(
        sequences, heads=heads, d=d, dv=dv, dtype=dtype, pages=pages, kv_layout=kv_layout, unused=unused, seed=1
    )
    check(*batch, window=window, top_left=top_left)


def test_two_runs_give_the_same_bits(platform):
    operands, options = varlen(MIXED, dtype="bfloat16")
    runs = [np.asarray(flash_attn_varlen(*operands, causal=True, **options).view(jnp.uint16)) for _ in range(2)]
    np.testing.assert_array_equal(*runs)


@pytest.mark.parametrize("hints", [{"max_seqlen_q": 1}, {"max_seqlen_q": 5000, "max_seqlen_k": 3}])
def test_a_wrong_hint_changes_nothing(platform, hints):
    check(*varlen(MIXED, dtype="bfloat16"), **hints)


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
    "a soft cap below 0": ({"softcap": -1.0}, ValueError, "softcap is -1, expected finite and >= 0"),
    "a scale of 0": ({"softmax_scale": 0.0}, ValueError, "softmax_scale is 0, expected finite and > 0"),
    "slopes of another length": (
        {"alibi_slopes": jnp.ones(3)},
        ValueError,
        "alibi_slopes has shape [3], expected [Hq=8] or [B=2, Hq=8]",
    ),
    "sinks of another length": ({"sinks": jnp.ones(2)}, ValueError, "sinks has shape [2], expected [Hq=8]"),
    "a scale a query head": ({"k_scale": jnp.ones(8)}, ValueError, "k_scale has shape [8], expected [1] or [Hkv=2]"),
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
