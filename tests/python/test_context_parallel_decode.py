"""Paged attention over a cache whose pages are spread over devices: the results of one device, by one collective.

With two or more GPUs the tests marked `gpu` run too, on four where there are as many.
"""

import functools
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from context_parallel_decode_cases import CASES
from subprocesses import python
from xla_attention.jax import (
    context_parallel_block_tables,
    context_parallel_paged_attention,
    context_parallel_slots,
    paged_attention,
)

HERE = pathlib.Path(__file__).parent
REPLICATED = P()
PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
JAX_VERSION = tuple(map(int, jax.__version__.split(".")[:2]))


def num_devices(platform):
    """Four, or the two GPUs of a machine that has fewer."""
    devices = 4 if platform == "cpu" else min(len(jax.devices("gpu")) // 2 * 2, 4)
    if devices < 2:
        pytest.skip("there is only one GPU")
    return devices


def runs_on(devices, case):
    """Whether a case has more than one device along the axis of the pages, so that there is a collective."""
    return devices == 4 or case.axes != "cp tp"


@functools.cache
def program(platform, is_slow):
    """The output of context_parallel_decode_program.py by case, from a subprocess with four CPU devices."""
    devices = num_devices(platform)
    names = [name for name, case in CASES.items() if case.is_slow == is_slow and runs_on(devices, case)]
    names += ["generation"] * (not is_slow)
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    # Programs may have JAX refuse arrays of different ranks.
    variables = {"XLA_FLAGS": flags, "JAX_NUMPY_RANK_PROMOTION": "raise", "CONTEXT_PARALLEL_DEVICES": str(devices)}
    # The decoder's own products are in f32, also where a GPU would take TF32.
    variables |= {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    done = python(HERE / "context_parallel_decode_program.py", platform, *names, **variables)
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


# Roundings of an output to 16 bits: one on each device, one of the merged output, and one device's own.
TOLERANCE = {"float32": 1e-5, "float16": 3 * 2.0**-11, "bfloat16": 3 * 2.0**-8}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * y.is_slow) for x, y in CASES.items()])
@pytest.mark.parametrize("on", PLATFORMS)
def test_results_are_those_of_one_device_by_one_collective(on, name):
    case = CASES[name]
    if not runs_on(num_devices(on), case):
        pytest.skip("pages and heads over two axes need four GPUs")
    row = program(on, case.is_slow)[name]
    rows_dtype = "bfloat16" if case.dtype.startswith("float8") else case.dtype
    # A GPU rounds the weights of 16-bit values to their dtype, relative to the largest score of a device's own keys.
    dtype = case.options.get("out_dtype", rows_dtype) if on == "cpu" else rows_dtype
    assert row["error"] <= TOLERANCE[dtype] * row["largest"]
    assert row["lse_error"] < 1e-5
    assert row["shape"] and row["same_cache"]
    expected = {"all-to-all": 1} if case.scatter else {"all-gather": 1}
    if case.gather:
        expected["all-gather"] = expected.get("all-gather", 0) + 1  # of the queries
    assert row["collectives"] == expected


@pytest.mark.parametrize("on", PLATFORMS)
def test_twenty_steps_in_place_with_one_collective_per_layer(on):
    row = program(on, False)["generation"]
    assert max(row["error"], row["cache_error"], row["export_error"]) < 2e-5
    assert row["in_place"] and row["copies"] == 0
    assert row["calls"] == 2 + 3 and row["collectives"] == {"all-gather": 2}


# ---------- tables and slots


def test_block_tables_place_every_token_once():
    """The slots of all tokens on all devices, read through the local pages, are the tokens of the whole cache."""
    rng = np.random.default_rng(0)
    page_size, devices, lens = 3, 4, np.array([0, 1, 12, 40, 37])
    whole = rng.permutation(100)[: 5 * 14].reshape(5, 14)
    whole[4, :7] = whole[3, :7]  # a prefix that two sequences share
    tables, pages = context_parallel_block_tables(whole, lens, page_size, devices, num_pages=20)
    assert tables.shape == (devices, 5, 4) and pages.shape == (devices, 20)
    assert all(len(np.unique(x[x >= 0])) == (x >= 0).sum() for x in pages)
    assert (tables[:, 3, :1] == tables[:, 4, :1]).all()
    for sequence, length in enumerate(lens):
        for page in range(-(-length // page_size)):
            rank, column = page % devices, page // devices
            assert pages[rank, tables[rank, sequence, column]] == whole[sequence, page]
    # 14 + 14 pages, of which 7 are shared, and 4 of the sequence of 12 tokens and 1 of that of one.
    assert (pages >= 0).sum() == 14 + 13 - 7 + 4 + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1, 2]], [9], 4, 2), "context_lens has 9, expected at most 8 tokens"),
        (([[1, -2]], [5], 4, 2), "block_tables has page -2, expected >= 0"),
        (([[1, 2]], [5, 5], 4, 2), r"context_lens has shape \[2\], expected \[S=1\]"),
        (([[1.5]], [5], 4, 2), "block_tables is float64"),
        (([[1]], [4], 0, 2), "page_size is 0, expected >= 1"),
        (([[1]], [4], 4, 0), "num_devices is 0, expected >= 1"),
    ],
)
def test_unusable_tables_are_named(arguments, message):
    with pytest.raises(ValueError, match=f"context_parallel_block_tables: {message}"):
        context_parallel_block_tables(*arguments)


def test_too_few_pages_are_named():
    with pytest.raises(ValueError, match="num_pages is 1, expected >= 2, the pages of the fullest device"):
        context_parallel_block_tables([[0, 1, 2]], [12], 4, 2, num_pages=1)


def traced(function, *operands, in_specs, out_specs=REPLICATED):
    """The results' shapes of a function on a mesh of four devices, which need not exist."""
    mesh = jax.sharding.AbstractMesh((4,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.eval_shape(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs), *operands)


def one_device(function, *operands):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("cp",))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P("cp")))(*operands)


def test_slots_of_padding_and_of_positions_without_a_page_are_skipped():
    tables = jnp.array([[3, 1], [7, -1], [2**30, 0]])
    starts, positions = jnp.array([1, 4, 5, 6]), jnp.array([0, 0, 7, 8, 4, 1, 2])

    def slots(tables):
        ragged = context_parallel_slots(positions, tables, 4, "cp", query_start_loc=starts)
        fewer = context_parallel_slots(positions, tables, 4, "cp", query_start_loc=starts, num_seqs=1)
        return ragged, fewer, context_parallel_slots(jnp.array([5, 2, -1]), tables, 4, "cp")

    ragged, fewer, single = one_device(slots, tables)
    assert ragged.tolist() == [-1, 12, 7, -1, -1, -1, -1]
    assert fewer.tolist() == [-1, 12, 7, -1, -1, -1, -1]
    assert single.tolist() == [5, 30, -1]


# ---------- metadata, on a mesh of one device


@jax.jit
def both(query, cache, sequences):
    """Attention over a cache that is spread over one device, and over one that is not."""

    def attend(query, cache, sequences):
        options = {"axis_name": "cp", "scale": 0.5, "sinks": jnp.ones(4), "sliding_window": 5, "return_lse": True}
        return context_parallel_paged_attention(query, cache, *sequences, **options)

    whole = paged_attention(query, cache, *sequences, scale=0.5, sinks=jnp.ones(4), sliding_window=5, return_lse=True)
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("cp",))
    return jax.shard_map(attend, mesh=mesh, in_specs=REPLICATED, out_specs=(P("cp"), P("cp")))(
        query, cache, sequences
    ), whole


def test_metadata_out_of_range_count_as_in_paged_attention():
    rng = np.random.default_rng(0)
    query, cache = (rng.standard_normal(shape, np.float32) for shape in ((9, 4, 8), (5, 2, 4, 8)))
    for _ in range(100):
        lens, starts, num_seqs = (rng.integers(-3, 12, size, np.int32) for size in (4, 5, 1))
        starts = np.sort(starts) if rng.integers(2) else starts
        actual, expected = both(query, cache, (lens, rng.integers(-2, 8, (4, 3), np.int32), starts, num_seqs))
        np.testing.assert_allclose(actual[0], expected[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", [(0, 2, 1, 3), (3, 0, 1, 3), (3, 2, 0, 3), (3, 2, 1, 0)])
def test_a_size_may_be_0(sizes):
    rows, seqs, columns, pages = sizes
    sequences = np.full(seqs, 2), np.zeros((seqs, columns), int), np.arange(seqs + 1), np.array([seqs])
    actual, expected = both(jnp.ones((rows, 4, 8)), jnp.ones((pages, 2, 4, 8)), sequences)
    np.testing.assert_allclose(actual[0], expected[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=1e-6)


# ---------- refusals at trace time

QUERY, CACHE, ROWS = jnp.zeros((3, 6, 8)), jnp.zeros((8, 4, 4, 8)), jnp.zeros((3, 2, 8))
SEQUENCES = jnp.ones(3, int), jnp.zeros((3, 2), int), jnp.arange(4), jnp.array([3])


def attend(*positional, query=QUERY, cache=CACHE, sequences=SEQUENCES, axis_name="cp", scale=1.0, **options):
    def call(query, cache):
        return context_parallel_paged_attention(
            query, cache, *sequences, *positional, axis_name=axis_name, scale=scale, **options
        )

    return traced(call, query, cache, in_specs=(P(), P() if isinstance(cache, tuple) else P("cp")))


def with_sequences(index, array):
    return {"sequences": (*SEQUENCES[:index], array, *SEQUENCES[index + 1 :])}


@pytest.mark.parametrize(
    ("positional", "options", "error", "message"),
    [
        ((), {"axis_name": "tp"}, ValueError, "axis_name is 'tp', expected a mesh axis of the jax.shard_map"),
        ((), {"axis_name": None}, TypeError, "axis_name is None, expected the name of a mesh axis"),
        ((), {"cache": CACHE[:, :0]}, ValueError, "page_size"),
        ((), {"scatter_heads": True}, ValueError, "query has 6 heads, expected a multiple of the 4 devices"),
        ((), {"alibi_slopes": jnp.ones(6)}, NotImplementedError, "alibi_slopes is given.*paged_attention has ALiBi"),
        ((ROWS,), {}, ValueError, "key is given and value is None, expected both or neither"),
        ((None, ROWS), {}, ValueError, "value is given and key is None, expected both or neither"),
        ((ROWS[:2], ROWS), {}, ValueError, r"key has shape \[2, 2, 8\], expected \[T=3, Hkv=2, D=8\]"),
        ((ROWS, ROWS[..., :4]), {}, ValueError, r"value has shape \[3, 2, 4\], expected \[T=3, Hkv=2, D=8\]"),
        ((), {"query": QUERY[0]}, ValueError, r"query has shape \[6, 8\], expected \[T, Hq, D\]"),
        ((), {"cache": CACHE[0]}, ValueError, r"kv_cache has shape \[1, 4, 8\], expected \[P, page_size, 2\*Hkv, D\]"),
        ((), {"cache": (CACHE,) * 3}, ValueError, "kv_cache has 3 arrays, expected two, or one array"),
        ((), {"cache": (CACHE,) * 2, "kv_layout": "stacked"}, ValueError, "kv_layout is 'stacked'"),
        ((), {"kv_layout": "stacked"}, ValueError, r"kv_cache has shape .*, expected \[2, P, page_size, Hkv, D\]"),
        ((), {"kv_layout": "paged"}, ValueError, "kv_layout is 'paged', expected 'interleaved'"),
        ((), {"sinks": jnp.ones(3)}, ValueError, r"sinks has shape \[3\], expected \[Hq=6\]"),
        ((), {"gather_heads": True, "sinks": jnp.ones(6)}, ValueError, r"sinks has shape \[6\], expected \[Hq=24\]"),
        ((), {"sliding_window": 0}, ValueError, "sliding_window is 0, expected >= 1"),
        ((), {"scatter_heads": 1}, TypeError, "scatter_heads is 1, expected True or False"),
        ((), with_sequences(0, jnp.ones((3, 1), int)), ValueError, r"context_lens has shape \[3, 1\], expected \[S\]"),
        ((), with_sequences(1, jnp.ones((2, 2), int)), ValueError, r"block_tables has shape \[2, 2\].* \[S=3, M\]"),
        ((), with_sequences(2, jnp.arange(3)), ValueError, r"query_start_loc has shape \[3\], expected \[S \+ 1 = 4\]"),
        ((), with_sequences(3, jnp.ones(2, int)), ValueError, r"num_seqs has shape \[2\], expected \[\] or \[1\]"),
        ((), with_sequences(0, jnp.ones(3)), TypeError, "context_lens has dtype float32, expected integers"),
    ],
)  # fmt: skip
def test_unusable_arguments_are_named(positional, options, error, message):
    with pytest.raises(error, match=message):
        attend(*positional, **options)


def test_pages_that_the_axis_does_not_divide_are_refused():
    with pytest.raises(ValueError, match="cp"):
        attend(cache=CACHE[:7])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis_name": "tp"}, "context_parallel_slots: axis_name is 'tp'"),
        ({"page_size": 0}, "page_size is 0, expected >= 1"),
        ({"positions": jnp.zeros(4, int)}, r"positions has shape \[4\], expected one per row of block_tables, 3"),
        ({"positions": jnp.zeros((3, 1), int)}, r"positions has shape \[3, 1\].*expected \[T\] and \[S, M\]"),
        ({"num_seqs": 2}, "num_seqs is given and query_start_loc is None"),
        ({"query_start_loc": jnp.arange(3)}, r"query_start_loc has shape \[3\], expected \[S \+ 1 = 4\]"),
    ],
)
def test_unusable_arguments_of_slots_are_named(options, message):
    arguments = {"positions": jnp.zeros(3, int), "block_tables": SEQUENCES[1], "page_size": 4, "axis_name": "cp"}
    with pytest.raises(ValueError, match=message):
        traced(lambda: context_parallel_slots(**{**arguments, **options}), in_specs=())


def test_there_is_no_gradient():
    def loss(query, cache):
        return context_parallel_paged_attention(query, cache, *SEQUENCES, axis_name="cp", scale=1.0).sum()

    with pytest.raises(NotImplementedError, match="there is no gradient"):
        traced(jax.grad(loss), QUERY, CACHE, in_specs=(P(), P("cp")), out_specs=P())
