"""paged_attention through JAX against the oracle, and what it promises beside numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import batch
from oracle import assert_close_like_naive, assert_lse_close, paged_attention_naive, paged_attention_reference
from xla_attention.jax import paged_attention

MIXED = [(33, 33), (1, 100), (5, 70), (0, 9), (3, 0), (1, 1), (9, 4)]


def check(operands, **options):
    """Output and lse against the oracle, within twice the error of the naive computation."""
    options = {"scale": operands[0].shape[-1] ** -0.5, **options}
    out, lse = paged_attention(*operands, return_lse=True, **options)
    numbers = [np.asarray(x) for x in operands]
    wanted, wanted_lse = paged_attention_reference(*numbers, **options)
    naive, _ = paged_attention_naive(*numbers, **options)
    assert out.dtype == operands[0].dtype
    assert_close_like_naive(out, wanted, naive)
    assert_lse_close(lse, wanted_lse, soft_cap_in_16_bit=out.dtype.itemsize == 2 and "soft_cap" in options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (9, 3), (8, 8), (32, 8)])
@pytest.mark.parametrize("d", [8, 64, 128])
def test_mixed_prefill_and_decode_equals_the_oracle(platform, dtype, heads, d):
    check(batch(MIXED, heads=heads, d=d, dtype=dtype))


@pytest.mark.parametrize("d", [16, 40, 80, 96, 192, 200, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_head_dimension_works(platform, d, dtype):
    check(batch([(20, 45), (1, 80)], d=d, dtype=dtype))


@pytest.mark.parametrize("page_size", [1, 2, 5, 16, 64, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_page_size_works(platform, page_size, dtype):
    check(batch(MIXED, page_size=page_size, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [1, 7, 64, 10**9])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_windows_and_soft_caps(platform, dtype, window, soft_cap):
    options = {} if soft_cap is None else {"soft_cap": soft_cap}
    check(batch(MIXED, dtype=dtype), sliding_window=window, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "option",
    [
        {"alibi_slopes": np.linspace(0.01, 0.5, 8, dtype=np.float32)},
        {"alibi_slopes": np.linspace(0.0, 0.5, 8 * 8, dtype=np.float32).reshape(8, 8)},
        {"sinks": np.linspace(-2.0, 3.0, 8, dtype=np.float32)},
        {"q_scale": 0.5, "k_scale": np.float32([0.5, 3.0]), "v_scale": np.float32([1.0, 0.25])},
    ],
    ids=lambda option: "+".join(option),
)
def test_biases_sinks_and_scales(platform, dtype, option):
    check(batch(MIXED, dtype=dtype), **option)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cache", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("d", "page_size"), [(64, 16), (128, 7), (24, 1)])
def test_the_cache_may_be_8_bit(platform, dtype, cache, d, page_size):
    query, kv_cache, *rest = batch(MIXED, d=d, page_size=page_size, dtype=dtype)
    check((query, kv_cache.astype(cache), *rest), k_scale=0.5, v_scale=2.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_alone_with_long_ragged_contexts(platform, dtype):
    check(batch([(1, n) for n in (1, 15, 16, 17, 300, 1025, 700, 2)], heads=(16, 4), d=128, dtype=dtype))


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 90)), max_size=5),
    st.sampled_from([(1, 1), (6, 2), (5, 1)]),
    st.sampled_from([8, 24, 64]),
    st.integers(1, 17),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([{}, {"sliding_window": 5}, {"soft_cap": 2.0}]),
)
def test_any_ragged_batch_equals_the_oracle(sequences, heads, d, page_size, dtype, options):
    check(batch(sequences, heads=heads, d=d, page_size=page_size, dtype=dtype), **options)


@settings(max_examples=60)
@given(st.data())
def test_hostile_metadata_gives_the_defined_result(data):
    """Sequences whose own numbers stay right are right; rows of no sequence are 0; nothing crashes."""
    query, cache, lens, tables, starts, _ = batch([(4, 20), (1, 9), (6, 6)], spare_slots=0, table_slack=0)
    number = st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 30)
    lens = np.array(lens)
    lens[1] = data.draw(number)
    tables = np.array(tables)
    tables[1] = data.draw(st.lists(number, min_size=tables.shape[1], max_size=tables.shape[1]))
    starts, num_seqs = np.array(starts), np.array([data.draw(number)], np.int32)
    starts[3] = data.draw(number)
    operands = (np.nan_to_num(query), np.nan_to_num(cache), lens, tables, starts, num_seqs)
    out, lse = paged_attention(*map(jnp.asarray, operands), scale=0.1, return_lse=True)
    wanted, wanted_lse = paged_attention_reference(*operands, scale=0.1)
    np.testing.assert_allclose(out, wanted, atol=1e-4)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(wanted_lse))


def test_two_runs_give_the_same_bits(platform):
    operands = batch(MIXED, dtype="bfloat16")
    first, second = (np.asarray(paged_attention(*operands, scale=0.1).view(jnp.uint16)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_sequence_has_the_same_bits_whatever_its_neighbours(platform):
    """batch_invariant: alone in the batch, elsewhere in it, with other T, S and table width."""
    operands = batch(MIXED, dtype="bfloat16", spare_rows=5)
    together = paged_attention(*operands, scale=0.1, batch_invariant=True)
    query, cache, lens, tables, starts, _ = operands
    for i, (new, _) in enumerate(MIXED):
        row = int(starts[i])
        width = tables.shape[1] + 2
        table = jnp.pad(tables[i : i + 1], ((0, 0), (0, 2)))[:, :width]
        alone = paged_attention(
            query[row : row + new],
            cache,
            lens[i : i + 1],
            table,
            jnp.array([0, new]),
            jnp.array([1]),
            scale=0.1,
            batch_invariant=True,
        )
        np.testing.assert_array_equal(np.asarray(alone), np.asarray(together[row : row + new]))


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


BAD = {
    "query of rank 2": ({"query": (4, 64)}, ValueError, "query has shape [4, 64], expected [T, Hq, D]"),
    "heads that do not divide": (
        {"query": (4, 6, 64)},
        ValueError,
        "kv_cache has shape [8, 16, 8, 64], expected 2*Hkv heads with Hkv a divisor of Hq=6",
    ),
    "an odd number of cache heads": (
        {"kv_cache": (8, 16, 3, 64)},
        ValueError,
        "kv_cache has shape [8, 16, 3, 64], expected 2*Hkv heads with Hkv a divisor of Hq=8",
    ),
    "another head dimension in the cache": (
        {"kv_cache": (8, 16, 8, 128)},
        ValueError,
        "kv_cache has shape [8, 16, 8, 128], expected [num_pages, page_size, 2*Hkv, D=64]",
    ),
    "a table of another height": (
        {"block_tables": (2, 7)},
        ValueError,
        "block_tables has shape [2, 7], expected [num_seqs=3, max_pages]",
    ),
    "starts without the end": (
        {"query_start_loc": (3,)},
        ValueError,
        "query_start_loc has shape [3], expected [num_seqs+1=4]",
    ),
    "two counts": ({"num_seqs": (2,)}, ValueError, "num_seqs has shape [2], expected [] or [1]"),
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
        ({"scale": 0.0}, ValueError, "scale is 0, expected finite and > 0"),
        ({"scale": -1.0}, ValueError, "scale is -1, expected finite and > 0"),
        ({"scale": float("inf")}, ValueError, "scale is inf, expected finite and > 0"),
        ({"sliding_window": 0}, ValueError, "sliding_window is 0, expected >= 1"),
        ({"sliding_window": -1}, ValueError, "sliding_window is -1, expected >= 1"),
        ({"sliding_window": 1.5}, TypeError, "sliding_window is 1.5, expected an integer"),
        ({"soft_cap": -2.0}, ValueError, "soft_cap is -2, expected finite and >= 0"),
        ({"soft_cap": "2"}, TypeError, "soft_cap is '2', expected a number"),
        ({"return_lse": 1}, TypeError, "return_lse is 1, expected True or False"),
        ({"k_scale": np.ones(8, np.float32)}, ValueError, "k_scale has shape [8], expected [1] or [Hkv=4]"),
        ({"sinks": np.zeros(4, np.float32)}, ValueError, "sinks has shape [4], expected [Hq=8]"),
        ({"alibi_slopes": np.zeros(4, np.float32)}, ValueError, "alibi_slopes has shape [4], expected [Hq=8] or ["),
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
