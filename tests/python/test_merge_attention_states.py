"""merge_attention_states through JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle import Score, attend, positions, visible
from oracle import merge_attention_states_reference as reference
from xla_attention.jax import merge_attention_states, paged_attention

# Half the distance of neighbouring numbers, relatively, and what rounding in f32 adds.
TOLERANCE = {"float16": 6e-4, "bfloat16": 5e-3, "float32": 2e-6}


def states(n, h, d, dtype="float32", seed=0, empty=0.0):
    """Two states of normal numbers; a share of `empty` of their rows saw no key and holds NaN."""
    rng = np.random.default_rng(seed)
    for _ in range(2):
        lse = rng.normal(0, 5, (h, n)).astype(np.float32)
        gone = rng.random((h, n)) < empty
        lse[gone] = rng.choice([-np.inf, np.inf, np.nan], gone.sum())
        out = rng.standard_normal((n, h, d))
        out[gone.T] = np.nan
        yield jnp.asarray(out, dtype)
        yield jnp.asarray(lse)


def assert_merged(found, operands):
    out, lse = reference(*operands)
    assert found[0].dtype == operands[0].dtype
    np.testing.assert_allclose(np.asarray(found[0], np.float64), out, rtol=0, atol=TOLERANCE[str(found[0].dtype)] * 4)
    np.testing.assert_allclose(found[1], lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("d", [1, 7, 64, 128, 192])
@pytest.mark.parametrize("empty", [0, 0.3])
def test_two_states_become_one(platform, dtype, d, empty):
    operands = tuple(states(9, 4, d, dtype, empty=empty))
    assert_merged(merge_attention_states(*operands), operands)


@given(st.integers(0, 9), st.integers(0, 4), st.integers(1, 40), st.sampled_from(list(TOLERANCE)))
def test_any_shape(n, h, d, dtype):
    operands = tuple(states(n, h, d, dtype, seed=n * h * d, empty=0.2))
    assert_merged(merge_attention_states(*operands), operands)


def test_nothing_and_nothing_is_nothing(platform):
    nan, never = jnp.full((3, 2, 8), jnp.nan), jnp.full((2, 3), -jnp.inf)
    out, lse = merge_attention_states(nan, never, nan, never)
    assert (out == 0).all()
    assert jnp.isneginf(lse).all()


def test_parts_of_the_keys_give_the_whole(platform):
    """Three parts that the reference has computed, merged in both orders, are attention over all keys."""
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((4, 32)), rng.standard_normal((20, 32)), rng.standard_normal((20, 32))

    def part(first, last):
        seen, position = visible(4, last - first), positions(4, last - first)
        out, lse = attend(q, k[first:last], v[first:last], seen, Score(0.5), position)
        return jnp.asarray(out, jnp.float32)[:, None], jnp.asarray(lse, jnp.float32)[None]

    whole = part(0, 20)
    parts = [part(0, 3), part(3, 3), part(3, 17), part(17, 20)]
    for order in (parts, parts[::-1]):
        found = order[0]
        for state in order[1:]:
            found = merge_attention_states(*found, *state)
        for a, b in zip(found, whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


def test_a_context_in_two_tables_gives_the_whole(platform):
    """Decode over a prefix and the rest, each with its own pages, is decode over both."""
    rng = np.random.default_rng(3)
    query = jnp.asarray(rng.standard_normal((2, 4, 64)), jnp.float32)
    cache = jnp.asarray(rng.standard_normal((8, 4, 4, 64)), jnp.float32)
    starts, n = jnp.array([0, 1, 2]), jnp.array([2])

    def attention(lens, tables):
        return paged_attention(
            query, cache, jnp.array(lens), jnp.array(tables), starts, n, scale=0.125, return_lse=True
        )

    whole = attention([11, 5], [[6, 1, 3], [6, 2, 0]])
    parts = attention([4, 4], [[6], [6]]), attention([7, 1], [[1, 3], [2, 0]])
    for a, b in zip(merge_attention_states(*parts[0], *parts[1]), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_it_works_under_the_transformations(platform):
    operands = [jnp.stack(x) for x in zip(states(3, 2, 16, seed=1), states(3, 2, 16, seed=2), strict=True)]
    out, lse = jax.vmap(jax.jit(merge_attention_states))(*operands)
    for i in range(2):
        assert_merged((out[i], lse[i]), [x[i] for x in operands])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_b": jnp.zeros((3, 2, 16))}, "out_b has shape [3, 2, 16], expected [n=3, h=2, d=8]"),
        ({"lse_a": jnp.zeros((3, 2))}, "lse_a has shape [3, 2], expected [h=2, n=3]"),
        ({"lse_b": jnp.zeros((2, 3), jnp.bfloat16)}, "lse_b has dtype bf16, expected f32"),
        ({"out_b": jnp.zeros((3, 2, 8), jnp.bfloat16)}, "out_b has dtype bf16, expected f32"),
        ({"out_a": jnp.zeros((3, 2, 8), jnp.int8)}, "out_a has dtype i8, expected f16 or bf16 or f32"),
    ],
    ids=["sizes", "transposed", "lse in 16 bits", "dtypes", "integers"],
)
def test_what_does_not_fit_is_a_value_error(change, message):
    out, lse = jnp.zeros((3, 2, 8)), jnp.zeros((2, 3))
    operands = {"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse, **change}
    with pytest.raises(ValueError, match="^xla_gpu_merge_attention_states: ") as caught:
        merge_attention_states(**operands)
    assert message in str(caught.value)
