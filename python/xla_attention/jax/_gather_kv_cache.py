"""gather_kv_cache in JAX."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._documentation import documented
from .._options import kv_layout_number, reject_kv_layout
from ._batching import batch_at_front, concat_block_tables, concat_rows, with_batching
from ._call import Array, custom_call, scale_cache_operand, scale_operand, static_i64
from ._indices import index_operand
from ._no_gradient import without_gradient
from ._sharding import ShardingRule, drop_absent, partitioned
from ._sharding_dims import CACHE_DIMS, scale_cache_dims, scale_dims

_STACKED, _PER_PAGE = map(kv_layout_number, ("stacked", "per_page"))


class _Static(NamedTuple):
    kv_layout: np.int64
    capacity: int
    dtype: np.dtype


@documented("xla_gpu_gather_kv_cache")
def gather_kv_cache(
    kv_cache: Array | tuple[Array, Array],
    block_tables: Array,
    context_lens: Array,
    *,
    capacity: int,
    dtype: Any = None,  # noqa: ANN401
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    kv_scale_cache: Array | None = None,
    kv_layout: str | None = None,
) -> tuple[Array, Array, Array]:
    """Copy the keys and values of sequences out of a paged cache into packed rows, those of a sequence in order.

    The inverse of `kv_cache_update`: for exporting a prefix, for attention over a long context in chunks
    (`flash_attn_varlen` over the gathered rows, then `merge_attention_states`), and for inspecting a cache.
    ``docs/semantics.md#gather_kv_cache`` defines the result.

    Parameters
    ----------
    kv_cache : Array or pair of Arrays
        K and V in one buffer, see `kv_layout`; or in two, ``[P, page_size, Hkv, D]`` and
        ``[P, page_size, Hkv, Dv]``. f16, bf16, f32, ``float8_e4m3fn`` or ``float8_e5m2``; with
        `kv_scale_cache` ``int8`` or ``float8_e4m3fn``.
    block_tables : Array
    context_lens : Array
    capacity : int
        N, the number of rows of the results, a Python integer. Tokens beyond it are dropped; rows after the last token
        are 0.
    dtype : dtype, optional
        The dtype of keys and values: by default that of the cache, or bf16 for an 8-bit cache, whose keys and values
        may also be f16 or f32.
    k_scale : Array or float, optional
        ... The scale that `kv_cache_update` was given.
    v_scale : Array or float, optional
        ... The scale that `kv_cache_update` was given.
    kv_scale_cache : Array, optional
        ... ``docs/quantized_cache.md`` explains such caches.
    kv_layout : str, optional
        The layout of a cache in one buffer: ``"interleaved"`` (the default), ``[P, page_size, 2*Hkv, D]`` with K of
        head h at index 2h and V at 2h+1; ``"stacked"``, ``[2, P, page_size, Hkv, D]``; ``"per_page"``,
        ``[P, 2, page_size, Hkv, D]``.

    Returns
    -------
    keys : Array
        ``[N, Hkv, D]``
    values : Array
        ``[N, Hkv, Dv]``
    cu_seqlens : Array
        ``i32[S+1]``: the first row of each sequence and, last, the end; at most N.

    Raises
    ------
    ValueError
        Shapes or dtypes do not fit together; the text names the operand.
    NotImplementedError
        A head dimension that there is no kernel for.

    Notes
    -----
    Results of the cache's dtype are bitwise copies. The other dtypes represent 8-bit floats exactly; products with a
    scale are rounded to nearest even.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from xla_attention.jax import gather_kv_cache, kv_cache_update
    >>> rows = jnp.arange(3.0)[:, None, None] * jnp.ones((1, 1, 8))
    >>> cache = kv_cache_update(jnp.zeros((2, 2, 2, 8)), rows, -rows, jnp.array([2, 3, 0]))
    >>> keys, values, cu_seqlens = gather_kv_cache(cache, jnp.array([[1, 0]]), jnp.array([3]), capacity=4)
    >>> keys[:, 0, 0].tolist(), values[:, 0, 0].tolist(), cu_seqlens.tolist()
    ([0.0, 1.0, 2.0, 0.0], [-0.0, -1.0, -2.0, 0.0], [0, 3])
    """
    if isinstance(kv_cache, tuple | list):
        reject_kv_layout(kv_layout)
        k_cache, v_cache = map(jnp.asarray, kv_cache)
        layout = kv_layout_number(None)
    else:
        k_cache = jnp.asarray(kv_cache)
        v_cache = jnp.zeros((0,), k_cache.dtype)
        layout = kv_layout_number(kv_layout or "interleaved")
    if dtype is None:
        dtype = jnp.bfloat16 if k_cache.dtype.itemsize == 1 else k_cache.dtype
    static = _Static(layout, int(static_i64("capacity", capacity)), jnp.dtype(dtype))
    if static.capacity < 0:
        raise ValueError(f"xla_gpu_gather_kv_cache: capacity is {capacity}, expected >= 0")
    tables, lens = index_operand("block_tables", block_tables), index_operand("context_lens", context_lens)
    scales = scale_operand(k_scale), scale_operand(v_scale), scale_cache_operand(kv_scale_cache)
    return _gather(static, k_cache, v_cache, tables, lens, *scales)


@functools.partial(jax.jit, static_argnums=0)
@without_gradient("gather_kv_cache", "kv_cache[page, offset] has a gradient", num_static=1)
def _gather(static: _Static, *operands: Array | None) -> tuple[Array, Array, Array]:
    return _gather_call(static, *operands)


def _ffi_call(static: _Static, *operands: Array | None) -> tuple[Array, Array, Array]:
    k_cache, v_cache, _, lens, *_ = operands
    heads = k_cache.shape[-2] // (2 if static.kv_layout == kv_layout_number("interleaved") else 1)
    dims = k_cache.shape[-1], (k_cache if static.kv_layout else v_cache).shape[-1]
    results = [jax.ShapeDtypeStruct((static.capacity, heads, dim), static.dtype) for dim in dims]
    starts = jax.ShapeDtypeStruct(tuple(size + 1 for size in lens.shape[:1]), jnp.int32)
    attributes = {"kv_layout": static.kv_layout}
    return tuple(custom_call("xla_gpu_gather_kv_cache", operands, [*results, starts], attributes))


def _sharding_rule(static: _Static, *operands: Array | None) -> ShardingRule:
    caches = (CACHE_DIMS[static.kv_layout], ".") if static.kv_layout else ("Pshd", "Pshe")
    scales = scale_cache_dims(static.kv_layout) if static.kv_layout else "...."
    dims = (*caches, "..", ".", *map(scale_dims, operands[4:6]), scales)
    return ShardingRule(drop_absent(dims, operands), ("nhd", "nhe", "."))


def _batching_rule(
    static: _Static, axis_size: int, in_batched: list, operands: tuple[Array | None, ...]
) -> tuple | None:
    """One call packs the rows of all calls densely; each call's rows are then copied to the start of its results."""
    k_cache, v_cache, tables, lens, *scales, scale_cache = operands
    has_caches, capacity = any((*in_batched[:2], in_batched[6])), static.capacity
    if any(in_batched[4:6]) or (has_caches and static.kv_layout == _STACKED):
        return None
    if axis_size * capacity > np.iinfo(np.int32).max:
        return None
    shape = k_cache.shape[int(in_batched[0]) :]
    pages, page_size = (shape[i] for i in {_STACKED: (1, 2), _PER_PAGE: (0, 2)}.get(static.kv_layout, (0, 1)))
    if has_caches:
        k_cache = concat_rows(batch_at_front(axis_size, in_batched[0], k_cache))
        if scale_cache is not None:
            scale_cache = concat_rows(batch_at_front(axis_size, in_batched[6], scale_cache))
        if not static.kv_layout:
            v_cache = concat_rows(batch_at_front(axis_size, in_batched[1], v_cache))
    tables, lens = (batch_at_front(axis_size, *pair) for pair in zip(in_batched[2:4], (tables, lens), strict=True))
    longest = min(tables.shape[2] * page_size if pages else 0, capacity)
    starts = _cu_seqlens(jnp.clip(lens, 0, longest), capacity)
    if has_caches:
        tables = concat_block_tables(tables, pages)
    operands = k_cache, v_cache, concat_rows(tables), jnp.diff(starts).reshape(-1), *scales, scale_cache

    def split_results(keys: Array, values: Array, _: Array) -> tuple[Array, Array, Array]:
        total = starts[:, -1]
        row, first = jnp.arange(capacity), jnp.cumsum(total) - total
        index = jnp.minimum(first[:, None] + row, axis_size * capacity - 1)
        is_token = (row < total[:, None])[:, :, None, None]
        keys, values = (jnp.where(is_token, rows[index], jnp.zeros((), rows.dtype)) for rows in (keys, values))
        return keys, values, starts

    return static._replace(capacity=axis_size * capacity), operands, split_results


def _cu_seqlens(lens: Array, capacity: int) -> Array:
    """``cu_seqlens [n, S+1]`` of lengths up to `capacity`: the sums saturate at it, so that they do not overflow."""

    def add(a: Array, b: Array) -> Array:
        return jnp.minimum(a + b, np.uint32(capacity))

    ends = lens.astype(jnp.uint32)
    if lens.shape[1]:
        ends = jax.lax.associative_scan(add, ends, axis=1)
    return jnp.concatenate([jnp.zeros_like(ends, shape=(lens.shape[0], 1)), ends], 1).astype(jnp.int32)


_gather_call = with_batching(partitioned("xla_gpu_gather_kv_cache", _ffi_call, _sharding_rule), _batching_rule)
