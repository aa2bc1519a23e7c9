"""kv_cache_update through JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracle import kv_cache_update_reference as reference
from xla_attention.jax import kv_cache_update


def operands(pages, page_size, heads, d, slots, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    cache = jnp.asarray(rng.standard_normal((pages, page_size, 2 * heads, d)), dtype)
    key, value = (jnp.asarray(rng.standard_normal((len(slots), heads, d)), dtype) for _ in range(2))
    return cache, key, value


def test_a_donated_cache_is_updated_in_place(platform):
    slots = jnp.array([3, 9])
    cache, key, value = operands(4, 4, 2, 64, slots)
    wanted = reference(cache, np.asarray(key), np.asarray(value), [3, 9])
    update = jax.jit(kv_cache_update, donate_argnums=0)
    address = cache.unsafe_buffer_pointer()
    for _ in range(3):
        cache = update(cache, key, value, slots)
        assert cache.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(np.asarray(cache), wanted)


def test_a_cache_that_is_not_donated_keeps_its_contents(platform):
    slots = jnp.array([3, 9])
    cache, key, value = operands(4, 4, 2, 64, slots)
    before = np.array(cache)
    out = kv_cache_update(cache, key, value, slots)
    np.testing.assert_array_equal(np.asarray(cache), before)
    np.testing.assert_array_equal(np.asarray(out), reference(before, np.asarray(key), np.asarray(value), [3, 9]))


def test_a_split_cache_is_updated_in_place_with_its_own_value_size(platform):
    rng = np.random.default_rng(1)
    k_cache, v_cache = (jnp.asarray(rng.standard_normal((4, 4, 2, d)), jnp.float32) for d in (64, 32))
    key, value = (jnp.asarray(rng.standard_normal((2, 2, d)), jnp.float32) for d in (64, 32))
    wanted_k, wanted_v = np.array(k_cache), np.array(v_cache)
    for wanted, rows in ((wanted_k, key), (wanted_v, value)):
        wanted.reshape(16, 2, -1)[[7, 2]] = rows
    update = jax.jit(lambda k, v, *rest: kv_cache_update((k, v), *rest), donate_argnums=(0, 1))
    addresses = [x.unsafe_buffer_pointer() for x in (k_cache, v_cache)]
    k_cache, v_cache = update(k_cache, v_cache, key, value, jnp.array([7, 2]))
    assert [x.unsafe_buffer_pointer() for x in (k_cache, v_cache)] == addresses
    np.testing.assert_array_equal(np.asarray(k_cache), wanted_k)
    np.testing.assert_array_equal(np.asarray(v_cache), wanted_v)


def test_slots_of_64_bits_are_not_cut(platform):
    with jax.enable_x64(True):
        slots = jnp.array([2**32 + 1, 2], jnp.int64)
        cache, key, value = operands(2, 4, 1, 8, slots)
        out = kv_cache_update(cache, key, value, slots)
    np.testing.assert_array_equal(out[0, 1], cache[0, 1])
    np.testing.assert_array_equal(out[0, 2, 0], key[1, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": (3, 2, 16)}, "value has shape [2, 2, 16], expected [T=3, Hkv=2, D=16]"),
        ({"value": (2, 1, 16)}, "value has shape [2, 1, 16], expected [T=2, Hkv=2, D=16]"),
        ({"cache": (4, 4, 3, 16)}, "kv_cache has shape [4, 4, 3, 16], expected [num_pages, page_size, 2*Hkv=4, D=16]"),
        ({"slots": (3,)}, "slot_mapping has shape [3], expected [T=2]"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_what_does_not_fit_is_a_value_error(change, message):
    shapes = {"cache": (4, 4, 4, 16), "key": (2, 2, 16), "value": (2, 2, 16), "slots": (2,), **change}
    cache, key, value = (jnp.zeros(shapes[name]) for name in ("cache", "key", "value"))
    with pytest.raises(ValueError, match="^xla_gpu_kv_cache_update: ") as caught:
        kv_cache_update(cache, key, value, jnp.zeros(shapes["slots"], jnp.int32))
    assert message in str(caught.value)


def test_layouts_have_names():
    cache, key, value = operands(2, 4, 1, 16, [0])
    with pytest.raises(ValueError, match="kv_layout is 'vllm', expected 'interleaved', 'stacked' or 'per_page'"):
        kv_cache_update(cache, key, value, jnp.array([0]), kv_layout="vllm")
    with pytest.raises(ValueError, match="kv_layout is 'stacked', which K and V apart do not have"):
        kv_cache_update((cache, cache), key, value, jnp.array([0]), kv_layout="stacked")


def test_caches_apart_have_one_dtype():
    k_cache, v_cache = jnp.zeros((2, 4, 1, 16), "float8_e5m2"), jnp.zeros((2, 4, 1, 16))
    with pytest.raises(ValueError, match="v_cache has dtype f32, expected f8e5m2"):
        kv_cache_update((k_cache, v_cache), *[jnp.zeros((1, 1, 16))] * 2, jnp.array([0]))


def test_slots_that_are_not_integers_are_a_type_error():
    cache, key, value = operands(2, 4, 1, 16, [0])
    with pytest.raises(TypeError, match="slot_mapping has dtype float32, expected integers"):
        kv_cache_update(cache, key, value, jnp.array([0.0]))


def test_the_update_stays_in_place_inside_a_loop(platform):
    """A decode loop that carries its cache must not copy it in each step."""
    cache, key, value = operands(4, 4, 1, 16, [0])
    update = functools.partial(kv_cache_update, key=key, value=value)

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(cache):
        return jax.lax.fori_loop(0, 16, lambda i, c: update(c, slot_mapping=i[None]), cache)

    address = cache.unsafe_buffer_pointer()
    cache = loop(cache)
    assert cache.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(cache[..., 0::2, :], jnp.broadcast_to(key, (4, 4, 1, 16)))
