"""Batching rules of calls on paged caches, see `_batching`: ``jax.vmap`` becomes more rows, sequences and pages.

The caches of n calls become one cache of n times as many pages. A cache that is written has to be separate for each
call; one that is only read may be shared by all.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._options import kv_layout_number
from ._batching import (
    append_empty_sequence,
    batch_at_front,
    concat_alibi_slopes,
    concat_block_tables,
    concat_cu_seqlens,
    concat_rows,
    split_lse,
)
from ._call import Array

_INTERLEAVED, _STACKED, _PER_PAGE = map(kv_layout_number, ("interleaved", "stacked", "per_page"))


def concat_batches(axis_size: int, in_batched: Sequence[bool], arrays: Sequence[Array | None]) -> tuple:
    """Arrays ``[T, ...]`` of n calls as ``[n T, ...]``; None stays None."""
    at_front = (batch_at_front(axis_size, *pair) for pair in zip(in_batched, arrays, strict=True))
    return tuple(None if x is None else concat_rows(x) for x in at_front)


def concat_caches(axis_size: int, is_batched: bool, cache: Array, layout: np.int64 = _INTERLEAVED) -> Array:
    """The caches of n calls as one, whose layout is `layout_of_concat`."""
    cache = batch_at_front(axis_size, is_batched, cache)
    if layout == _STACKED:
        # [n, 2, P, page_size, Hkv, D] as [n, 2, P page_size, Hkv, D].
        return cache.reshape(*cache.shape[:2], -1, *cache.shape[4:])
    return concat_rows(cache)


def concat_read_caches(
    axis_size: int, in_batched: Sequence[bool], cache: Array, scale_cache: Array | None
) -> tuple[int | None, Array, Array | None]:
    """The interleaved caches that n calls read, and the scales of their rows, as those of one call.

    With them comes the number of pages of each call, None where all calls read the same cache.
    """
    if not any(in_batched):
        return None, cache, scale_cache
    pages = cache.shape[int(in_batched[0])]
    cache = concat_caches(axis_size, in_batched[0], cache)
    return pages, cache, None if scale_cache is None else concat_caches(axis_size, in_batched[1], scale_cache)


def layout_of_concat(layout: np.int64) -> np.int64:
    """The layout of `concat_caches`: a stacked cache becomes one long page, with K and V per page."""
    return _PER_PAGE if layout == _STACKED else layout


def concat_slot_mapping(
    axis_size: int, in_batched: Sequence[bool], slot_mapping: Array, cache: Array, *, kv_dim: int = 1
) -> Array | None:
    """``slot_mapping`` of n calls that each write to their own cache; None where its dtype cannot hold the slots.

    Parameters
    ----------
    axis_size
        n.
    in_batched
        Whether `slot_mapping` and `cache` are batched.
    slot_mapping, cache
        The operands, of which `cache` is one buffer, or the K or V of two.
    kv_dim
        The size of the cache's dimension for K and V, see `kv_dim_of`.
    """
    slots_batched, cache_batched = in_batched
    num_slots = math.prod(cache.shape[int(cache_batched) : -2]) // kv_dim
    if axis_size * num_slots > np.iinfo(slot_mapping.dtype).max:
        return None
    slots = batch_at_front(axis_size, slots_batched, slot_mapping)
    first = jnp.arange(axis_size, dtype=slots.dtype)[:, None] * num_slots
    return concat_rows(jnp.where((slots >= 0) & (slots < num_slots), slots + first, -1))


def kv_dim_of(layout: np.int64) -> int:
    """The size of the dimension that selects K or V in a cache of one buffer; 1 in the interleaved layout."""
    return 1 if layout == _INTERLEAVED else 2


def concat_sequences(
    axis_size: int, in_batched: Sequence[bool], sequences: Sequence[Array], rows: int, pages: int | None
) -> tuple[Array, ...]:
    """``context_lens, block_tables, query_start_loc, num_seqs`` of n calls of `rows` rows each, as those of one.

    `pages` is the number of pages of each call's cache, None where all calls read the same one. Slots of sequences that
    a call does not use become sequences without a row or a key.
    """
    lens, tables, starts, count = (batch_at_front(axis_size, *pair) for pair in zip(in_batched, sequences, strict=True))
    num_seqs = lens.shape[1]
    used = jnp.clip(count.reshape(axis_size, 1), 0, num_seqs)
    end = jnp.take_along_axis(starts, used, 1)
    starts = jnp.where(jnp.arange(num_seqs + 1) < used, starts, end)
    lens = jnp.where(jnp.arange(num_seqs) < used, lens, 0)
    if pages is not None:
        tables = concat_block_tables(tables, pages)
    total_seqs = jnp.full((1,), axis_size * (num_seqs + 1), jnp.int32)
    return append_empty_sequence(lens), append_empty_sequence(tables), concat_cu_seqlens(starts, rows), total_seqs


def concat_trees(axis_size: int, is_batched: bool, tree_mask: Array | None) -> Array | None:
    """``tree_mask`` of n calls as that of the sequences of `concat_sequences`."""
    return None if tree_mask is None else append_empty_sequence(batch_at_front(axis_size, is_batched, tree_mask))


def split_lse_of_sequences(lse: Array, axis_size: int, starts: Array) -> Array:
    """``[Hq, n T]`` as ``[n, Hq, T]``, with -inf in rows that belong to no sequence of their call.

    In the one call these rows belong to the appended sequences, whose rows attend to the sinks. `starts` is the one
    call's ``query_start_loc``.
    """
    lse = split_lse(lse, axis_size)
    first_rows = jnp.arange(axis_size)[:, None] * lse.shape[2]
    starts = jax.lax.cummax(starts[:-1].reshape(axis_size, -1), axis=1) - first_rows
    row = jnp.arange(lse.shape[2])
    in_sequence = (row >= starts[:, :1]) & (row < starts[:, -1:])
    return jnp.where(in_sequence[:, None], lse, -jnp.inf)


def concat_score_operands(
    axis_size: int, in_batched: Sequence[bool], operands: Sequence[Array | None], num_seqs: int
) -> tuple | None:
    """ALiBi slopes, sinks and scales of n calls as those of one; None where sinks or scales differ between calls."""
    slopes, *shared = operands
    if any(in_batched[1:]):
        return None
    if slopes is not None:
        slopes = concat_alibi_slopes(axis_size, in_batched[0], slopes, num_seqs)
    return slopes, *shared
