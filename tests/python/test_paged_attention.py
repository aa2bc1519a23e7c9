"""paged_attention through JAX against the oracle, and what it promises beside numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batches import batch
from xla_attention.jax import paged_attention


def test_the_number_of_sequences_may_be_an_int_a_scalar_or_an_array(platform):
    operands = batch([(2, 5), (3, 3)])
    wanted = paged_attention(*operands, scale=0.1)
    for num_seqs in (2, jnp.int32(2), np.int64(2), jnp.array([2])):
        np.testing.assert_array_equal(paged_attention(*operands[:5], num_seqs, scale=0.1), wanted)


def test_wider_integers_are_cast_and_saturate(platform):
    operands = batch([(2, 5), (3, 3)])
    wanted = paged_attention(*operands, scale=0.1)
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.int64) for x in operands[2:]]
        wide[0] = wide[0].at[-1].set(2**40)
        np.testing.assert_array_equal(paged_attention(*operands[:2], *wide, scale=0.1), wanted)
    np.testing.assert_array_equal(paged_attention(*operands[:5], operands[5].astype(jnp.uint8), scale=0.1), wanted)


def test_it_works_inside_jit_scan_and_vmap(platform):
    query, *rest = batch([(2, 5), (3, 3)], spare_rows=0)
    attend = functools.partial(paged_attention, scale=0.1)
    wanted = attend(query, *rest)
    _, scanned = jax.lax.scan(lambda _, q: (None, attend(q, *rest)), None, jnp.stack([query, 2 * query]))
    np.testing.assert_array_equal(scanned[0], wanted)
    np.testing.assert_array_equal(scanned[1], attend(2 * query, *rest))
    mapped = jax.vmap(lambda q: attend(q, *rest))(jnp.stack([query, 2 * query]))
    np.testing.assert_array_equal(mapped, scanned)


def test_an_empty_batch_is_fine(platform):
    query, cache, lens, tables, starts, _ = batch([(0, 0)])
    out, lse = paged_attention(query, cache, lens, tables, starts, jnp.array([0]), scale=0.1, return_lse=True)
    assert (out == 0).all()
    assert jnp.isneginf(lse).all()
    nothing = [x[:0] for x in (query, cache, lens, tables)]
    assert paged_attention(*nothing, jnp.zeros(1, jnp.int32), jnp.array([0]), scale=0.1).shape == (0, 8, 64)


def test_a_long_jitted_chain_of_updates_and_reads_is_in_order(platform):
    """Many calls in one program: on a GPU XLA records them as a command buffer."""
    query, *rest = batch([(2, 20), (1, 33)], spare_rows=0)

    @jax.jit
    def chain(q):
        for _ in range(12):
            q = paged_attention(q, *rest, scale=0.1)
        return q

    wanted = query
    for _ in range(12):
        wanted = paged_attention(wanted, *rest, scale=0.1)
    for _ in range(4):
        np.testing.assert_array_equal(np.asarray(chain(query)), np.asarray(wanted))


# What the library refuses is in tests/conformance; here, that its text and its kind arrive.
BAD = {
    "another head dimension in the cache": (
        {"kv_cache": (8, 16, 8, 128)},
        ValueError,
        "kv_cache has shape [8, 16, 8, 128], expected [num_pages, page_size, 2*Hkv, D=64]",
    ),
    "a head dimension that is no multiple of 8": (
        {"query": (4, 8, 60), "kv_cache": (8, 16, 8, 60)},
        NotImplementedError,
        "query has head dimension 60; every multiple of 8 up to 256 works",
    ),
}


def zeros(**shapes):
    names = {
        "query": (4, 8, 64),
        "kv_cache": (8, 16, 8, 64),
        "context_lens": (3,),
        "block_tables": (3, 7),
        "query_start_loc": (4,),
        "num_seqs": (1,),
    }
    dtypes = {"query": jnp.float32, "kv_cache": jnp.float32}
    return [jnp.zeros(shapes.get(n, shape), dtypes.get(n, jnp.int32)) for n, shape in names.items()]


@pytest.mark.parametrize(("shapes", "kind", "message"), BAD.values(), ids=BAD.keys())
def test_operands_that_do_not_fit_are_refused_at_trace_time(shapes, kind, message):
    with pytest.raises(kind, match="^xla_gpu_paged_attention: ") as caught:
        jax.eval_shape(functools.partial(paged_attention, scale=1.0), *zeros(**shapes))
    assert str(caught.value) == f"xla_gpu_paged_attention: {message}" or message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"scale": float("nan")}, ValueError, "scale is NaN, expected finite and > 0"),
        ({"sliding_window": 0}, ValueError, "sliding_window is 0, expected >= 1"),
        ({"sliding_window": -1}, ValueError, "sliding_window is -1, expected >= 1"),
        ({"sliding_window": 1.5}, TypeError, "sliding_window is 1.5, expected an integer"),
        ({"soft_cap": -2.0}, ValueError, "soft_cap is -2, expected finite and >= 0"),
        ({"soft_cap": "2"}, TypeError, "soft_cap is '2', expected a number"),
        ({"return_lse": 1}, TypeError, "return_lse is 1, expected True or False"),
        ({"sinks": np.zeros(4, np.float32)}, ValueError, "sinks has shape [4], expected [Hq=8]"),
        ({"out_dtype": "float16"}, NotImplementedError, "query is f32, kv_cache is f32 and out is f16"),
    ],
    ids=lambda x: next(iter(x.items())).__str__() if isinstance(x, dict) else "",
)
def test_options_out_of_range_are_refused(options, kind, message):
    with pytest.raises(kind) as caught:
        paged_attention(*zeros(), **{"scale": 1.0, **options})
    assert message in str(caught.value)


def test_dtypes_outside_the_table_are_not_supported():
    operands = zeros()
    for query, cache in (("int32", "int32"), ("float32", "float16"), ("float32", "float8_e5m2")):
        with pytest.raises(NotImplementedError, match="there is f32 queries over f32"):
            paged_attention(operands[0].astype(query), operands[1].astype(cache), *operands[2:], scale=1.0)
    with pytest.raises(TypeError, match="context_lens has dtype float32, expected integers"):
        paged_attention(*operands[:2], jnp.zeros(3), *operands[3:], scale=1.0)


def test_a_traced_option_is_a_type_error():
    with pytest.raises(TypeError, match="scale is traced, expected a number that is known"):
        jax.jit(lambda scale: paged_attention(*zeros(), scale=scale))(1.0)
