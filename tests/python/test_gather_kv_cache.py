"""gather_kv_cache through JAX and torch."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle import split_layout
from xla_attention.jax import (
    export_disabled_checks,
    flash_attn_varlen,
    gather_kv_cache,
    kv_cache_update,
    merge_attention_states,
    paged_attention,
)

FP8 = ("float8_e4m3fn", "float8_e5m2")
SHAPES = {"interleaved": (5, 4, 4, 16), "stacked": (2, 5, 4, 2, 16), "per_page": (5, 2, 4, 2, 16)}
TABLES = np.array([[3, 1, 4], [0, 2, 2], [4, -1, 2**31 - 1]], np.int32)
LENS = np.array([9, -2, 2**31 - 1], np.int32)


def numbers(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32).astype(dtype)


def reference(sides, tables, lens, capacity, *, scales=(None, None), dtype=None):
    """Of K and V `[P, page_size, Hkv, D]`: keys, values, starts."""
    pages, page_size = sides[0].shape[:2]
    lens = np.clip(lens, 0, tables.shape[1] * page_size if pages else 0)
    rows = [(tables[b, j // page_size], j % page_size) for b, n in enumerate(lens) for j in range(n)][:capacity]
    found = []
    for side, scale in zip(sides, scales, strict=True):
        side = np.asarray(side)
        out = np.zeros((capacity, *side.shape[2:]), side.dtype if dtype is None else dtype)
        for i, (page, token) in enumerate(rows):
            row = side[np.clip(page, 0, pages - 1), token]
            out[i] = row if scale is None else row.astype(np.float32) * np.reshape(np.float32(scale), (-1, 1))
        found.append(out)
    return *found, np.minimum(np.cumsum([0, *lens.astype(np.int64)]), capacity)


def assert_gathered(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one), other)


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", *FP8])
def test_rows_follow_one_another(platform, layout, dtype):
    cache = numbers(0, *SHAPES[layout], dtype=dtype)
    found = gather_kv_cache(cache, TABLES, LENS, capacity=23, kv_layout=layout, dtype=dtype)
    assert_gathered(found, reference(split_layout(cache, layout), TABLES, LENS, 23))
    assert found[0].dtype == dtype and found[2].dtype == jnp.int32


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("out", [None, "float16", "float32"])
def test_8_bits_are_decoded_and_multiplied(platform, dtype, out):
    k, v = numbers(0, 5, 4, 2, 16, dtype=dtype), numbers(1, 5, 4, 2, 24, dtype=dtype)
    scales = 0.3, np.array([2.5, -0.1], np.float32)
    found = gather_kv_cache((k, v), TABLES, LENS, capacity=20, dtype=out, k_scale=scales[0], v_scale=scales[1])
    wanted = jnp.bfloat16 if out is None else out
    assert_gathered(found, reference((k, v), TABLES, LENS, 20, scales=scales, dtype=wanted))


@given(
    st.integers(0, 4), st.integers(1, 5), st.integers(0, 4), st.integers(0, 3), st.integers(0, 30), st.integers(0, 99)
)
def test_any_shape(pages, page_size, seqs, max_pages, capacity, seed):
    rng = np.random.default_rng(seed)
    cache = numbers(seed, pages, page_size, 2, 8)
    tables = rng.integers(-2, pages + 2, (seqs, max_pages))
    lens = rng.integers(-3, 20, seqs)
    found = gather_kv_cache(cache, tables, lens, capacity=capacity)
    assert_gathered(found, reference(split_layout(cache, "interleaved"), tables, lens, capacity))


@pytest.mark.parametrize("layout", [None, *SHAPES])
def test_it_is_the_inverse_of_an_update(platform, layout):
    key, value = numbers(0, 9, 2, 16), numbers(1, 9, 2, 16)
    tables, lens = np.array([[3, 0], [2, 4]]), np.array([6, 3])
    slots = np.concatenate([tables[b, np.arange(n) // 4] * 4 + np.arange(n) % 4 for b, n in enumerate(lens)])
    cache = (jnp.zeros((5, 4, 2, 16)),) * 2 if layout is None else jnp.full(SHAPES[layout], jnp.nan)
    cache = kv_cache_update(cache, key, value, slots, kv_layout=layout)
    found = gather_kv_cache(cache, tables, lens, capacity=9, kv_layout=layout)
    assert_gathered(found, (key, value, [0, 6, 9]))


def test_a_context_in_chunks_is_the_whole(platform):
    """docs/gather.md: attention over a long context, of which only so many keys are gathered at a time."""
    page_size, chunk, lens = 4, 8, jnp.array([21, 3, 12])
    cache, queries = numbers(0, 20, page_size, 4, 16), numbers(1, 3, 4, 16)
    tables = jnp.asarray(np.random.default_rng(2).permutation(20)[:18].reshape(3, 6))
    starts = jnp.arange(4)
    state = None
    for first in range(0, 24, chunk):
        pages = tables[:, first // page_size : (first + chunk) // page_size]
        keys, values, ends = gather_kv_cache(cache, pages, jnp.clip(lens - first, 0, chunk), capacity=3 * chunk)
        part = flash_attn_varlen(queries, keys, values, starts, ends, softmax_scale=0.2, return_lse=True)
        state = part if state is None else merge_attention_states(*state, *part)
    whole = paged_attention(queries, cache, lens, tables, starts, 3, scale=0.2, return_lse=True)
    for found, wanted in zip(state, whole, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


AXES = {
    "caches": (0, None, None),
    "sequences": (None, 0, 0),
    "all": (0, 0, 0),
    "lengths": (None, None, 0),
}


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("layout", [None, *SHAPES])
def test_vmap_is_each_alone(platform, layout, axes):
    """One call for all, but that stacked pages of each index run one after the other."""
    rng, axes = np.random.default_rng(0), AXES[axes]
    shape = SHAPES[layout] if layout else (5, 4, 2, 16)
    cache, tables = numbers(0, 3, *shape), rng.integers(-1, 7, (3, 4, 3))
    lens = rng.choice([-(2**31), 0, 1, 5, 12, 2**31 - 1], (3, 4))
    operands = [x if axis == 0 else x[0] for x, axis in zip((cache, tables, lens), axes, strict=True)]
    operands = [jnp.asarray(x) for x in operands]

    def gather(cache, tables, lens):
        cache = cache if layout else (cache, -cache)
        return gather_kv_cache(cache, tables, lens, capacity=20, kv_layout=layout)

    mapped = jax.jit(jax.vmap(gather, in_axes=axes))
    found = mapped(*operands)
    for index in range(3):
        alone = gather(*(x[index] if axis == 0 else x for x, axis in zip(operands, axes, strict=True)))
        assert_gathered([x[index] for x in found], alone)
    text = mapped.lower(*operands).as_text()
    assert text.count("custom_call @xla_gpu_") == 1
    assert ("stablehlo.while" in text) == (layout == "stacked" and axes[0] == 0)


def test_no_gradient_and_the_way_out_is_named():
    cache = numbers(0, 5, 4, 4, 16)
    with pytest.raises(NotImplementedError, match=r"gather_kv_cache: there is no gradient; kv_cache\[page, offset\]"):
        jax.grad(lambda x: gather_kv_cache(x, TABLES, LENS, capacity=8)[0].sum())(cache)


def test_symbolic_sizes_are_exported():
    seqs, pages = jax.export.symbolic_shape("s, p")
    specs = [((pages, 4, 4, 16), jnp.float32), ((seqs, 3), jnp.int32), ((seqs,), jnp.int32)]
    gather = jax.jit(functools.partial(gather_kv_cache, capacity=23))
    exported = jax.export.export(gather, platforms=["cpu"], disabled_checks=export_disabled_checks())(
        *(jax.ShapeDtypeStruct(*spec) for spec in specs)
    )
    cache = numbers(0, 5, 4, 4, 16)
    assert_gathered(exported.call(cache, TABLES, LENS), gather(cache, TABLES, LENS))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"capacity": -1}, ValueError, "capacity is -1, expected >= 0"),
        ({"capacity": 2.0}, TypeError, "capacity is 2.0, expected an integer"),
        ({"dtype": "bfloat16"}, ValueError, "keys has dtype bf16, expected f32"),
        ({"kv_layout": "sideways"}, ValueError, "kv_layout is 'sideways'"),
        ({"context_lens": LENS[:2]}, ValueError, r"block_tables has shape \[3, 3\], expected \[S=2, max_pages\]"),
        ({"block_tables": TABLES * 1.0}, TypeError, "block_tables has dtype float64, expected integers"),
        ({"kv_cache": (np.zeros((5, 4, 2, 16)),) * 2, "kv_layout": "stacked"}, ValueError, "K and V apart do not have"),
    ],
)
def test_mistakes_are_named(changes, error, text):
    call = {"kv_cache": numbers(0, 5, 4, 4, 16), "block_tables": TABLES, "context_lens": LENS, "capacity": 8}
    with pytest.raises(error, match=text):
        gather_kv_cache(**(call | changes))


@pytest.mark.parametrize("layout", [None, *SHAPES])
@pytest.mark.parametrize("dtype", ["bfloat16", *FP8])
def test_torch_gathers_the_same(torch_device, layout, dtype):
    from torch_side import array, tensor, torch
    from xla_attention.torch import gather_kv_cache as gather

    cache = numbers(0, *(SHAPES[layout] if layout else (5, 4, 2, 16)), dtype=dtype)
    cache = cache if layout else (cache, -cache)
    scale = 0.5 if dtype in FP8 else None
    wanted = gather_kv_cache(cache, TABLES, LENS, capacity=23, v_scale=scale, kv_layout=layout)
    of_torch = jax.tree.map(lambda x: tensor(x, torch_device), cache)
    where = (tensor(TABLES.astype(np.int64), torch_device), tensor(LENS, torch_device))
    found = gather(of_torch, *where, capacity=23, v_scale=scale, kv_layout=layout)
    assert found[0].dtype == torch.bfloat16
    assert_gathered(map(array, found), wanted)


def test_torch_reads_a_strided_pair_where_it_is(caplog):
    from torch_side import array, tensor
    from xla_attention.torch import gather_kv_cache as gather

    cache = numbers(0, 2, 5, 4, 2, 16)
    both = tensor(cache)
    found = gather((both[0], both[1]), tensor(TABLES), tensor(LENS), capacity=23)
    assert_gathered(map(array, found), gather_kv_cache(cache, TABLES, LENS, capacity=23, kv_layout="stacked"))
    assert "is copied to be dense" not in caplog.text


def test_torch_checks_compiles_and_has_no_gradient():
    from torch_side import array, tensor, torch
    from xla_attention.torch import gather_kv_cache as gather

    cache, tables, lens = map(tensor, (numbers(0, 5, 4, 4, 16), TABLES, LENS))
    op = torch.ops.xla_gpu.gather_kv_cache.default
    torch.library.opcheck(op, (cache, cache.new_empty(0), tables, lens, 9), {"kv_layout": "interleaved"})
    compiled = torch.compile(lambda *x: gather(*x, capacity=9)[0] + 1, backend="eager", fullgraph=True)
    assert_gathered([array(compiled(cache, tables, lens))], [array(gather(cache, tables, lens, capacity=9)[0]) + 1])
    meta = gather(cache.to("meta"), tables.to("meta"), lens.to("meta"), capacity=9)
    assert [tuple(x.shape) for x in meta] == [(9, 2, 16), (9, 2, 16), (4,)]
    with pytest.raises(NotImplementedError, match="use the cache indexed by page and offset"):
        gather(cache.requires_grad_(), tables, lens, capacity=9)[0].sum().backward()
    with pytest.raises(ValueError, match="capacity is -1, expected >= 0"):
        gather(cache.detach(), tables, lens, capacity=-1)
