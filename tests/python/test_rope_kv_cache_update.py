"""rope_kv_cache_update through JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle import kv_cache_update_reference, rotated
from xla_attention.jax import kv_cache_update, rope_kv_cache_update

FP8 = ["float8_e4m3fn", "float8_e5m2"]
# Half the distance of neighbouring numbers, relatively, and what rounding in f32 adds.
TOLERANCE = {"float16": 6e-4, "bfloat16": 5e-3, "float32": 1e-6}


def table(max_pos, rot):
    """Cosines, then sines, of the usual angles."""
    angles = np.arange(max_pos)[:, None] * 10000.0 ** (-np.arange(0, rot, 2) / rot)
    return jnp.asarray(np.concatenate([np.cos(angles), np.sin(angles)], axis=1), jnp.float32)


def operands(tokens, q_heads=4, kv_heads=2, d=64, dtype="float32", cache="float32", pages=8, page_size=4, seed=0):
    rng = np.random.default_rng(seed)
    kv_cache = jnp.asarray(rng.standard_normal((pages, page_size, 2 * kv_heads, d)), dtype).astype(cache)
    rows = [jnp.asarray(rng.standard_normal((tokens, heads, d)), dtype) for heads in (q_heads, kv_heads, kv_heads)]
    return kv_cache, *rows


def assert_turned(query, kv_cache, given, slots, positions, cos_sin, *, interleaved=False):
    """Within rounding of the reference; V, and all slots but the tokens', bit by bit."""
    cache, q, key, value = given
    tolerance = TOLERANCE[str(q.dtype)] * 8
    assert (query.dtype, kv_cache.dtype) == (q.dtype, cache.dtype)
    np.testing.assert_allclose(
        np.asarray(query, np.float64), rotated(q, positions, cos_sin, interleaved), rtol=0, atol=tolerance
    )
    turned = rotated(key, positions, cos_sin, interleaved)
    wanted = kv_cache_update_reference(np.asarray(cache), turned.astype(cache.dtype), np.asarray(value), slots)
    np.testing.assert_array_equal(kv_cache[:, :, 1::2], wanted[:, :, 1::2])
    np.testing.assert_allclose(np.asarray(kv_cache, np.float64), np.asarray(wanted, np.float64), rtol=0, atol=tolerance)
    untouched = np.setdiff1d(np.arange(cache.shape[0] * cache.shape[1]), slots)
    flat = [np.asarray(x).reshape(-1, *x.shape[2:])[untouched] for x in (kv_cache, cache)]
    np.testing.assert_array_equal(*flat)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("d", "rot"), [(64, 64), (128, 128), (64, 32), (40, 20), (8, 2), (16, 0)])
def test_queries_and_keys_turn_by_their_positions(platform, dtype, interleaved, d, rot):
    slots, positions = [5, 0, -1, 30, 31, 32], [7, 0, 3, 19, 2, 11]
    given, cos_sin = operands(6, d=d, dtype=dtype, cache=dtype), table(20, rot)
    out = rope_kv_cache_update(*given, jnp.array(slots), jnp.array(positions), cos_sin, interleaved=interleaved)
    assert_turned(*out, given, slots, positions, cos_sin, interleaved=interleaved)


@given(st.integers(0, 9), st.integers(1, 4), st.integers(0, 12), st.booleans(), st.integers(0, 20))
def test_any_shape(tokens, heads, pairs, interleaved, max_pos):
    rng = np.random.default_rng(tokens + 10 * pairs)
    slots, positions = rng.permutation(40)[:tokens] - 4, rng.integers(-5, 25, tokens)
    given, cos_sin = operands(tokens, q_heads=2 * heads, kv_heads=heads, d=24), table(max_pos, 2 * pairs)
    out = rope_kv_cache_update(*given, jnp.asarray(slots), jnp.asarray(positions), cos_sin, interleaved=interleaved)
    assert_turned(*out, given, slots, positions, cos_sin, interleaved=interleaved)


def test_positions_are_clamped_and_an_empty_table_turns_nothing(platform):
    given, slots = operands(5), [3, 9, -1, 12, 31]
    positions = [-1, 20, -(2**31), 2**31 - 1, 7]
    out = rope_kv_cache_update(*given, jnp.array(slots), jnp.array(positions), table(20, 64))
    assert_turned(*out, given, slots, np.clip(positions, 0, 19), table(20, 64))
    query, cache = rope_kv_cache_update(*given, jnp.array(slots), jnp.array(positions), jnp.zeros((0, 64)))
    np.testing.assert_array_equal(query, given[1])
    np.testing.assert_array_equal(cache, kv_cache_update(given[0], *given[2:], jnp.array(slots)))


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_fp8_cache_holds_the_turned_keys_rounded_once(platform, fp8, dtype):
    slots, positions, cos_sin = [5, 0, -1, 30], [7, 0, 3, 19], table(20, 64)
    given = operands(4, dtype=dtype, cache=fp8)
    scales = {"k_scale": [0.11, 3.0], "v_scale": 0.25}
    query, cache = rope_kv_cache_update(*given, jnp.array(slots), jnp.array(positions), cos_sin, **scales)
    np.testing.assert_allclose(
        np.asarray(query, np.float64), rotated(given[1], positions, cos_sin), rtol=0, atol=TOLERANCE[dtype] * 8
    )
    turned = rotated(given[2], positions, cos_sin).astype(np.float32)
    wanted = kv_cache_update_reference(given[0], turned, np.asarray(given[3]), slots, **scales)
    # The reference turns in float64: where that is nearly halfway between two codes, the neighbour is right too.
    codes = [np.asarray(x).view(np.uint8).astype(int) for x in (cache, wanted)]
    assert np.abs(codes[0] - codes[1]).max() <= 1
    assert (codes[0] != codes[1]).mean() < 1e-3


@pytest.mark.parametrize(("name", "shape"), [("stacked", (2, 5, 4, 2, 16)), ("per_page", (5, 2, 4, 2, 16))])
def test_other_layouts_hold_the_same_rows(platform, name, shape):
    slots, positions, cos_sin = jnp.array([7, -1, 19, 20, 0]), jnp.array([1, 2, 3, 4, 5]), table(9, 16)
    _, *rows = operands(5, d=16)
    query, cache = rope_kv_cache_update(jnp.zeros((5, 4, 4, 16)), *rows, slots, positions, cos_sin, interleaved=True)
    found, other = rope_kv_cache_update(
        jnp.zeros(shape), *rows, slots, positions, cos_sin, interleaved=True, kv_layout=name
    )
    k, v = (other[0], other[1]) if name == "stacked" else (other[:, 0], other[:, 1])
    np.testing.assert_array_equal(found, query)
    np.testing.assert_array_equal(k, cache[:, :, 0::2])
    np.testing.assert_array_equal(v, cache[:, :, 1::2])


def test_a_donated_cache_is_updated_in_place(platform):
    cache, *rows = operands(2)
    update = jax.jit(functools.partial(rope_kv_cache_update, interleaved=True), donate_argnums=0)
    address = cache.unsafe_buffer_pointer()
    for step in range(3):
        _, cache = update(cache, *rows, jnp.array([3, 9]), jnp.array([step, 4]), table(8, 64))
        assert cache.unsafe_buffer_pointer() == address


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": jnp.zeros((3, 4, 64))}, ValueError, "query has shape [3, 4, 64], expected [T=2, Hq, D=64]"),
        ({"query": jnp.zeros((2, 4, 64), "bfloat16")}, ValueError, "query has dtype bf16, expected f32"),
        ({"positions": jnp.zeros(3, int)}, ValueError, "positions has shape [3], expected [T=2]"),
        ({"positions": jnp.zeros(2)}, TypeError, "positions has dtype float32, expected integers"),
        ({"cos_sin": jnp.zeros((9, 7))}, ValueError, "expected [max_pos, rot] with rot even and at most D=64"),
        ({"cos_sin": jnp.zeros((9, 8), "bfloat16")}, ValueError, "cos_sin has dtype bf16, expected f32"),
        ({"interleaved": 1}, TypeError, "interleaved is 1, expected True or False"),
        ({"kv_layout": "split"}, ValueError, "kv_layout is 'split', expected 'interleaved', 'stacked' or 'per_page'"),
    ],
)
def test_what_does_not_fit_is_an_error(change, error, message):
    cache, query, key, value = operands(2)
    right = {"kv_cache": cache, "query": query, "key": key, "value": value, "slot_mapping": jnp.array([0, 1])}
    call = {**right, "positions": jnp.array([0, 1]), "cos_sin": table(9, 64), **change}
    with pytest.raises(error) as caught:
        rope_kv_cache_update(**call)
    assert message in str(caught.value)
