"""The calls, and the collective, of context_parallel_paged_attention."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._call import Array
from ._context_parallel_pages import local_lens
from ._context_parallel_states import AxisName, State, all_gather, exchange_states, merge_states
from ._flash_attn_varlen import flash_attn_varlen
from ._kv_cache_update import kv_cache_update
from ._ragged_rows import row_counts, row_places, used_starts

_LARGEST = np.iinfo(np.int32).max


class Static(NamedTuple):
    """The compile-time constants."""

    axis_name: AxisName
    num_devices: int
    batch_invariant: np.bool_
    scale: np.float32
    sliding_window: np.int64  # -1 for none
    soft_cap: np.float32
    kv_layout: str | None
    page_size: int
    gather_heads: bool
    scatter_heads: bool
    out_dtype: np.dtype


class Scores(NamedTuple):
    """The optional operands; None for one that is left out."""

    sinks: Array | None
    q_scale: Array | None
    k_scale: Array | None
    v_scale: Array | None


@functools.partial(jax.jit, static_argnums=0)
def attend(
    static: Static,
    query: Array,
    caches: tuple[Array, ...],
    sequences: tuple[Array, ...],
    new_rows: tuple[Array, Array] | None,
    scores: Scores,
) -> tuple[Array, Array]:
    if static.gather_heads:
        query = all_gather(query, static.axis_name, axis=1, tiled=True)
    lens, tables, starts, num_seqs = sequences
    starts = used_starts(starts, num_seqs)
    if not lens.shape[0]:  # one sequence without rows
        lens, tables, starts = (jnp.zeros(shape, jnp.int32) for shape in ((1,), (1, tables.shape[1]), (2,)))
    sequences = lens, tables, starts, num_seqs
    exchange = (static.axis_name, static.num_devices, static.scatter_heads)
    if new_rows is None:
        return merge_states(exchange_states(_stored_rows(static, query, caches, sequences, scores), *exchange))
    # The sinks count in the part of the new keys.
    part = _stored_rows if static.sliding_window >= 0 else _stored_sequences
    key, value = _as_stored(*new_rows, caches[0].dtype, scores)
    stored = part(static, query, caches, sequences, scores._replace(sinks=None), num_new=row_counts(starts, len(query)))
    states = exchange_states(stored, *exchange)
    if static.scatter_heads:
        query, key, value, scores = _own_heads(static, query, key, value, scores)
    window = static.sliding_window - 1 if static.sliding_window >= 0 else -1
    return merge_states([*states, _flash(static, query, (key, value), starts, scores, causal=True, window=(window, 0))])


def _stored_rows(
    static: Static,
    query: Array,
    caches: tuple[Array, ...],
    sequences: tuple[Array, ...],
    scores: Scores,
    num_new: Array | None = None,
) -> State:
    """The state of each row over the keys of this device, each row as a sequence of its own.

    A causal mask or a window hides other local keys from each row than the positions of rows in a call could say. The
    keys of a row are those before its own, its own included; with `num_new`, the rows per sequence, those before the
    first row of its sequence.
    """
    lens, tables, starts, num_seqs = sequences
    rows, capacity = query.shape[0], _capacity(tables, static.page_size, static.num_devices)
    places = row_places(lens, starts, num_seqs, rows, capacity)
    ends = jnp.where(places.has_sequence, jnp.clip(places.position + 1, 0, capacity), 0)
    stored = ends
    if num_new is not None:
        stored = jnp.where(places.has_sequence, _num_stored(lens, num_new, capacity)[places.sequence], 0)
    options = {}
    if static.sliding_window >= 0:
        window = np.int32(min(static.sliding_window, _LARGEST))
        hidden = jnp.clip(jnp.maximum(ends - window, 0), 0, stored)
        options["leftpad_k"] = local_lens(hidden, static.page_size, static.axis_name, static.num_devices)
    if scores.sinks is not None:
        # A sink of -inf is no column. A row of no sequence attends to no sink.
        is_first = lax.axis_index(static.axis_name) == 0
        scores = scores._replace(sinks=jnp.where(is_first, scores.sinks, -jnp.inf))
        options["seqused_q"] = places.has_sequence.astype(jnp.int32)
    # A constant of the program where it can be one, not a kernel.
    arange = np.arange if isinstance(rows, int) else jnp.arange
    return _flash(
        static,
        query,
        caches,
        arange(rows + 1, dtype=np.int32),
        scores,
        max_seqlen_q=1,
        seqused_k=local_lens(stored, static.page_size, static.axis_name, static.num_devices),
        block_table=tables[places.sequence],
        **options,
    )


def _stored_sequences(
    static: Static,
    query: Array,
    caches: tuple[Array, ...],
    sequences: tuple[Array, ...],
    scores: Scores,
    num_new: Array,
) -> State:
    """The state of each row over the keys of this device that are stored before the first row of its sequence."""
    lens, tables, starts, _ = sequences
    stored = _num_stored(lens, num_new, _capacity(tables, static.page_size, static.num_devices))
    local = local_lens(stored, static.page_size, static.axis_name, static.num_devices)
    return _flash(static, query, caches, starts, scores, seqused_k=local, block_table=tables)


def _flash(
    static: Static,
    query: Array,
    keys: tuple[Array, ...],
    starts: Array,
    scores: Scores,
    **options: Any,  # noqa: ANN401
) -> tuple[Array, Array]:
    k, v = (*keys, None)[:2]
    return flash_attn_varlen(
        query,
        k,
        v,
        starts,
        kv_layout=static.kv_layout if v is None else None,
        softmax_scale=static.scale,
        softcap=static.soft_cap,
        batch_invariant=static.batch_invariant,
        out_dtype=static.out_dtype,
        return_lse=True,
        **scores._asdict(),
        **options,
    )


def _as_stored(key: Array, value: Array, dtype: np.dtype, scores: Scores) -> tuple[Array, Array]:
    """New keys and values as the cache will hold them: divided by their scales and rounded to its dtype."""
    if key.dtype == dtype and scores.k_scale is None and scores.v_scale is None:
        return key, value
    pages = tuple(jnp.zeros((len(x), 1, *x.shape[1:]), dtype) for x in (key, value))
    slots = jnp.arange(len(key), dtype=jnp.int32)
    pages = kv_cache_update(pages, key, value, slots, k_scale=scores.k_scale, v_scale=scores.v_scale)
    return pages[0][:, 0], pages[1][:, 0]


def _own_heads(
    static: Static, query: Array, key: Array, value: Array, scores: Scores
) -> tuple[Array, Array, Array, Scores]:
    """The query heads that this device returns, with the KV heads that they read."""
    heads, kv_heads = query.shape[1], key.shape[1]
    own = heads // static.num_devices
    first = lax.axis_index(static.axis_name) * own
    group = heads // kv_heads
    # Query heads that share a KV head, as many as begin at each multiple of it.
    step = math.gcd(own, group)
    kv = (first + jnp.arange(0, own, step)) // group
    query = lax.dynamic_slice_in_dim(query, first, own, axis=1)
    sinks = None if scores.sinks is None else lax.dynamic_slice_in_dim(scores.sinks, first, own)
    scales = (x if x is None or x.shape == (1,) else x[kv] for x in scores[1:])
    return query, key[:, kv], value[:, kv], Scores(sinks, *scales)


def _capacity(tables: Array, page_size: int, num_devices: int) -> int:
    """The tokens of a sequence that the pages of all devices hold."""
    return min(tables.shape[1] * num_devices * page_size, _LARGEST)


def _num_stored(lens: Array, num_new: Array, capacity: int) -> Array:
    """The keys of each sequence before its first row."""
    return jnp.maximum(jnp.clip(lens, 0, capacity) - num_new, 0)
