"""Operators without a gradient refuse to be asked for one, and stand in the way of no other gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_attention.jax import (
    dot_product_attention,
    flash_attn_varlen,
    kv_cache_update,
    merge_attention_states,
    paged_attention,
    paged_attention_update,
    ragged_paged_attention,
    rope_kv_cache_update,
)

ROWS = jnp.ones((3, 1, 8))
SLOTS = jnp.array([0, 5, -1])
CACHE = jnp.ones((2, 4, 2, 8))
SEQUENCES = (jnp.array([3]), jnp.array([[1]]), jnp.array([0, 3]), jnp.array([1]))
EVEN = jnp.zeros((1, 3))

# What each function makes of rows that a gradient could be asked of; the first result first.
CALLS = {
    "paged_attention": lambda x: (paged_attention(x, CACHE, *SEQUENCES, scale=1.0),),
    "paged_attention with lse": lambda x: paged_attention(x, CACHE, *SEQUENCES, scale=1.0, return_lse=True),
    "ragged_paged_attention": lambda x: (ragged_paged_attention(x, CACHE, *SEQUENCES),),
    "paged_attention_update": lambda x: paged_attention_update(x, CACHE, *SEQUENCES, x, x, SLOTS, scale=1.0),
    "kv_cache_update": lambda x: (kv_cache_update(CACHE, x, x, SLOTS),),
    "kv_cache_update of two": lambda x: kv_cache_update((CACHE[:, :, :1], CACHE[:, :, 1:]), x, x, SLOTS),
    "rope_kv_cache_update": lambda x: rope_kv_cache_update(CACHE, x, x, x, SLOTS, SLOTS, jnp.ones((3, 8))),
    "merge_attention_states": lambda x: merge_attention_states(x, EVEN, x, EVEN),
}
WAYS_OUT = {
    "paged_attention": "flash_attn_varlen over packed keys",
    "ragged_paged_attention": "flash_attn_varlen over packed keys",
    "paged_attention_update": "flash_attn_varlen over packed keys",
    "kv_cache_update": "kv_cache.at[page, offset].set(rows)",
    "rope_kv_cache_update": "rotate the queries and keys by jax.numpy",
    "merge_attention_states": "its formula in jax.numpy",
}
each_call = pytest.mark.parametrize("name", CALLS)


def total(results):
    return sum(jnp.sum(x) for x in results)


def refused(name, differentiate):
    with pytest.raises(NotImplementedError, match="there is no gradient; ") as caught:
        differentiate()
    function = name.split()[0].replace("ragged_", "")
    assert str(caught.value).startswith(f"{function}: ")
    assert WAYS_OUT[function] in str(caught.value) and "jax.lax.stop_gradient" in str(caught.value)


@each_call
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"])
def test_a_gradient_is_refused_by_name_with_the_way_out(name, wrap):
    refused(name, lambda: wrap(jax.grad(lambda x: total(CALLS[name](x))))(ROWS))


@each_call
def test_each_result_alone_is_refused(name):
    for index in range(len(CALLS[name](ROWS))):
        refused(name, lambda index=index: jax.grad(lambda x: CALLS[name](x)[index].sum())(ROWS))


@each_call
def test_constant_operands_stand_beside_a_gradient(name):
    wanted = total(CALLS[name](ROWS))
    found = jax.jit(jax.grad(lambda x: (x * total(CALLS[name](jax.lax.stop_gradient(x)))).sum()))(ROWS)
    np.testing.assert_allclose(found, jnp.full_like(ROWS, wanted), rtol=1e-6)
    found = jax.grad(lambda w: (w * total(CALLS[name](ROWS))).sum())(ROWS)
    np.testing.assert_allclose(found, jnp.full_like(ROWS, wanted), rtol=1e-6)


@each_call
def test_results_that_the_gradient_does_not_need_are_computed(name):
    """Such as an updated cache beside a loss, though its rows depend on what is differentiated."""

    def loss(x):
        return (x * x).sum(), CALLS[name](x)

    for differentiated in (jax.grad(loss, has_aux=True), jax.jit(jax.grad(loss, has_aux=True))):
        found, results = differentiated(ROWS)
        np.testing.assert_array_equal(found, 2 * ROWS)
        for result, wanted in zip(results, CALLS[name](ROWS), strict=True):
            np.testing.assert_array_equal(np.asarray(result), np.asarray(wanted))
    stopped = jax.grad(lambda x: (x * jax.lax.stop_gradient(total(CALLS[name](x)))).sum())(ROWS)
    np.testing.assert_allclose(stopped, jnp.full_like(ROWS, total(CALLS[name](ROWS))), rtol=1e-6)


def test_a_scan_may_hand_caches_out_beside_a_loss():
    def layers(x):
        def layer(x, cache):
            return 2 * x, kv_cache_update(cache, x, x, SLOTS)

        x, caches = jax.lax.scan(layer, x, jnp.stack([CACHE] * 3))
        return x.sum(), caches

    found, caches = jax.grad(layers, has_aux=True)(ROWS)
    assert (found == 8).all() and [cache[0, 0, 0, 0] for cache in caches] == [1, 2, 4]


@pytest.mark.parametrize("attend", [flash_attn_varlen, dot_product_attention])
def test_a_second_derivative_is_refused(attend):
    operands = (jnp.array([0, 3]),) if attend is flash_attn_varlen else ()
    sum_of = functools.partial(lambda q, k, v: attend(q, k, v, *operands).sum(), k=ROWS, v=ROWS)
    assert jax.grad(sum_of)(ROWS).shape == ROWS.shape
    with pytest.raises(NotImplementedError, match="^the gradients of flash_attn_varlen and dot_prod"):
        jax.grad(lambda q: jax.grad(sum_of)(q).sum())(ROWS)
