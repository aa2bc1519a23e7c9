"""paged_attention_update through JAX: against the oracle, and against the two functions that it is one call of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batches import step
from xla_attention.jax import paged_attention_update

MIXED = [(33, 33), (1, 100), (5, 70), (0, 9), (3, 0), (1, 1), (9, 4)]


def test_tokens_one_by_one_are_the_prompt_at_once(platform):
    """A decode loop that carries its cache, from an empty one on, has the rows of the whole prompt."""
    query, cache, lens, tables, starts, count, key, value, slots = step([(20, 20)], spare_rows=0, page_size=3)
    out, whole = paged_attention_update(query, cache, lens, tables, starts, count, key, value, slots, scale=0.125)

    def token(cache, t):
        now = lens.at[0].set(t + 1)
        row = [jax.lax.dynamic_slice_in_dim(x, t, 1) for x in (query, key, value, slots)]
        first = starts.at[:2].set(jnp.array([0, 1]))
        new, cache = paged_attention_update(row[0], cache, now, tables, first, count, *row[1:], scale=0.125)
        return cache, new[0]

    cache, rows = jax.jit(lambda cache: jax.lax.scan(token, cache, jnp.arange(20)))(cache)
    np.testing.assert_array_equal(cache, whole)
    np.testing.assert_allclose(rows, out, atol=2e-5)


def test_a_donated_cache_is_updated_in_place(platform):
    query, cache, *rest = step(MIXED)
    update = jax.jit(functools.partial(paged_attention_update, scale=0.125), donate_argnums=1)
    cache = cache + 0
    address = cache.unsafe_buffer_pointer()
    for _ in range(3):
        _, cache = update(query, cache, *rest)
        assert cache.unsafe_buffer_pointer() == address


def test_a_cache_that_is_not_donated_keeps_its_contents(platform):
    query, cache, *rest = step(MIXED)
    before = np.array(cache)
    _, updated = jax.jit(functools.partial(paged_attention_update, scale=0.125))(query, cache, *rest)
    np.testing.assert_array_equal(cache, before)
    assert not np.array_equal(updated, before, equal_nan=True)


def test_it_stays_in_place_inside_a_loop(platform):
    query, cache, *rest = step([(2, 5), (3, 3)])

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(cache):
        return jax.lax.fori_loop(0, 5, lambda _, c: paged_attention_update(query, c, *rest, scale=0.1)[1], cache)

    cache = cache + 0
    address = cache.unsafe_buffer_pointer()
    assert loop(cache).unsafe_buffer_pointer() == address


def test_under_vmap_each_index_has_its_own_cache(platform):
    query, cache, *rest = step([(2, 5), (3, 3)], spare_rows=0)
    update = functools.partial(paged_attention_update, scale=0.1)
    queries, caches = jnp.stack([query, 2 * query]), jnp.stack([cache, 3 * cache])
    mapped = jax.vmap(lambda q, c: update(q, c, *rest))(queries, caches)
    for index in range(2):
        for found, wanted in zip(mapped, update(queries[index], caches[index], *rest), strict=True):
            np.testing.assert_array_equal(found[index], wanted)


def test_the_number_of_sequences_may_be_an_int_a_scalar_or_an_array(platform):
    query, cache, lens, tables, starts, count, *rows = step(MIXED)
    wanted, _ = paged_attention_update(query, cache, lens, tables, starts, count, *rows, scale=0.1)
    for number in (len(MIXED), count[0]):
        found, _ = paged_attention_update(query, cache, lens, tables, starts, number, *rows, scale=0.1)
        np.testing.assert_array_equal(found, wanted)


def test_slots_of_64_bits_are_not_cut(platform):
    query, cache, *rest = step([(2, 5), (3, 3)])
    with jax.enable_x64(True):
        far = jnp.asarray(rest[-1], jnp.int64) + 2**32
        _, updated = paged_attention_update(query, cache, *rest[:-1], far, scale=0.1)
    np.testing.assert_array_equal(updated, cache)


BAD = {
    "values of another width": (
        {"value": (4, 4, 32)},
        ValueError,
        "value has shape [4, 4, 32], expected [T=4, Hkv=4, D=64]",
    ),
    "a head dimension that is no multiple of 8": (
        {"query": (4, 8, 60), "kv_cache": (8, 16, 8, 60)},
        NotImplementedError,
        "query has head dimension 60; every multiple of 8 up to 256 works",
    ),
}
SHAPES = {
    "query": (4, 8, 64),
    "kv_cache": (8, 16, 8, 64),
    "context_lens": (3,),
    "block_tables": (3, 7),
    "query_start_loc": (4,),
    "num_seqs": (1,),
    "key": (4, 4, 64),
    "value": (4, 4, 64),
    "slot_mapping": (4,),
}
REAL = ("query", "kv_cache", "key", "value")


def zeros(**shapes):
    return [jnp.zeros(shapes.get(n, s), jnp.float32 if n in REAL else jnp.int32) for n, s in SHAPES.items()]


@pytest.mark.parametrize(("shapes", "kind", "message"), BAD.values(), ids=BAD.keys())
def test_operands_that_do_not_fit_are_refused_at_trace_time(shapes, kind, message):
    with pytest.raises(kind) as caught:
        jax.eval_shape(functools.partial(paged_attention_update, scale=1.0), *zeros(**shapes))
    assert str(caught.value) == f"xla_gpu_paged_attention_update: {message}"


def test_dtypes_and_options_that_do_not_fit_are_refused():
    operands = zeros()
    with pytest.raises(ValueError, match="^xla_gpu_paged_attention_update: key has dtype bf16, expected f32"):
        paged_attention_update(*operands[:6], operands[6].astype(jnp.bfloat16), *operands[7:], scale=1.0)
    with pytest.raises(TypeError, match="slot_mapping has dtype float32, expected integers"):
        paged_attention_update(*operands[:8], jnp.zeros(4), scale=1.0)
    with pytest.raises(
        ValueError, match="^xla_gpu_paged_attention_update: sliding_window is 0, expected >= 1, or None$"
    ):
        paged_attention_update(*operands, scale=1.0, sliding_window=0)
    with pytest.raises(TypeError, match="scale is traced"):
        jax.jit(lambda scale: paged_attention_update(*operands, scale=scale))(1.0)
