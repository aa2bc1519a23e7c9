"""Batches of calls on caches of pages, see `_fold`: an axis of ``jax.vmap`` becomes more rows, sequences and pages.

The caches of n calls are one of n times as many pages. What is written has to be a cache for each call; what is only
read may be shared by them all.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .._options import kv_layout_number
from ._call import Array
from ._fold import as_rows, each_call, folded_slopes, starts_of_calls, table_of_calls, unfolded_lse, with_another

_INTERLEAVED, _STACKED, _PER_PAGE = map(kv_layout_number, ("interleaved", "stacked", "per_page"))


def folded_rows(size: int, which: Sequence[bool], arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Arrays ``[T, ...]`` of n calls as ``[n T, ...]``."""
    return tuple(as_rows(each_call(size, *pair)) for pair in zip(which, arrays, strict=True))


def folded_cache(size: int, batched: bool, cache: Array, layout: np.int64 = _INTERLEAVED) -> Array:
    """The caches of n calls as one of the layout `layout_of_written`."""
    cache = each_call(size, batched, cache)
    if layout == _STACKED:
        return cache.reshape(*cache.shape[:2], -1, *cache.shape[4:])
    return as_rows(cache)


def layout_of_written(layout: np.int64) -> np.int64:
    """Of `folded_cache`: each stacked cache becomes one long page of a cache with K and V per page."""
    return _PER_PAGE if layout == _STACKED else layout


def folded_slots(size: int, which: Sequence[bool], slots: Array, cache: Array, *, sides: int = 1) -> Array | None:
    """``slot_mapping`` of n calls, of which each writes into its own cache; None where slots have too large numbers.

    `which` are the slots and the cache; the latter holds `sides` of K and V, in one dimension of its own.
    """
    of_slots, of_cache = which
    count = math.prod(cache.shape[int(of_cache) : -2]) // sides
    if size * count > np.iinfo(slots.dtype).max:
        return None
    slots = each_call(size, of_slots, slots)
    first = jnp.arange(size, dtype=slots.dtype)[:, None] * count
    return as_rows(jnp.where((slots >= 0) & (slots < count), slots + first, -1))


def sides_of(layout: np.int64) -> int:
    """How many of K and V have a dimension of a cache in one buffer to themselves."""
    return 1 if layout == _INTERLEAVED else 2


def folded_sequences(
    size: int, which: Sequence[bool], sequences: Sequence[Array], rows: int, pages: int | None
) -> tuple[Array, ...]:
    """``context_lens, block_tables, query_start_loc, num_seqs`` of n calls of `rows` rows each.

    As those of packed calls (`_fold`); slots that are not in use become sequences without a row or a key. `pages` are
    those of a call's own cache, None where all calls read the same.
    """
    lens, tables, starts, count = (each_call(size, *pair) for pair in zip(which, sequences, strict=True))
    num_seqs = lens.shape[1]
    used = jnp.clip(count.reshape(size, 1), 0, num_seqs)
    end = jnp.take_along_axis(starts, used, 1)
    starts = jnp.where(jnp.arange(num_seqs + 1) < used, starts, end)
    lens = jnp.where(jnp.arange(num_seqs) < used, lens, 0)
    if pages is not None:
        tables = table_of_calls(tables, pages)
    every = jnp.full((1,), size * (num_seqs + 1), jnp.int32)
    return with_another(lens), with_another(tables), starts_of_calls(starts, rows), every


def unfolded_lse_of_sequences(lse: Array, size: int, starts: Array) -> Array:
    """``[Hq, n T]`` as ``[n, Hq, T]``, -inf in rows of no sequence, which have the sinks as rows of one without keys.

    `starts` are those of the call that was made.
    """
    lse = unfolded_lse(lse, size)
    starts = jax.lax.cummax(starts[:-1].reshape(size, -1), axis=1) - jnp.arange(size)[:, None] * lse.shape[2]
    row = jnp.arange(lse.shape[2])
    of_sequences = (row >= starts[:, :1]) & (row < starts[:, -1:])
    return jnp.where(of_sequences[:, None], lse, -jnp.inf)


def folded_scores(size: int, which: Sequence[bool], scores: Sequence[Array | None], num_seqs: int) -> tuple | None:
    """ALiBi's slopes, sinks and scales of n calls; None where calls have sinks or scales of their own."""
    slopes, *shared = scores
    if any(which[1:]):
        return None
    return slopes if slopes is None else folded_slopes(size, which[0], slopes, num_seqs), *shared
