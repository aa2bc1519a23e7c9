"""rope_kv_cache_update through JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_attention.jax import rope_kv_cache_update


def table(max_pos, rot):
    """Cosines, then sines, of the usual angles."""
    angles = np.arange(max_pos)[:, None] * 10000.0 ** (-np.arange(0, rot, 2) / rot)
    return jnp.asarray(np.concatenate([np.cos(angles), np.sin(angles)], axis=1), jnp.float32)


def operands(tokens, q_heads=4, kv_heads=2, d=64, dtype="float32", cache="float32", pages=8, page_size=4, seed=0):
    rng = np.random.default_rng(seed)
    kv_cache = jnp.asarray(rng.standard_normal((pages, page_size, 2 * kv_heads, d)), dtype).astype(cache)
    rows = [jnp.asarray(rng.standard_normal((tokens, heads, d)), dtype) for heads in (q_heads, kv_heads, kv_heads)]
    return kv_cache, *rows


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
