"""Segment ids of a dense batch as the starts and lengths of its segments, computed on the device.

``docs/dot_product_attention.md#segment-ids`` defines what is computed: a query attends to the keys of its own id. A
sequence of a call has one range of keys, so equal ids have to be adjacent. The values are traced: `Segments.valid` says
which entries of the batch satisfy this, and the caller makes the results of the others NaN.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._call import Array, static_i64
from ._sharding import ShardingRule, with_auto_axes


class Segments(NamedTuple):
    """Up to M segments in each row of a batch, in their order; unused entries are empty segments at the end."""

    starts_q: Array  # i32[B, M + 1]: the first query of each segment, and last T
    starts_k: Array  # i32[B, M + 1]: the first key of each segment, and last S
    lengths_q: Array  # i32[B, M]
    lengths_k: Array  # i32[B, M]
    valid: Array | None  # bool[B]: whether the segments are all that the ids say; None if this is known


def id_arrays(name: str, segment_ids: Any, queries: tuple, keys: tuple) -> tuple[Any, Any]:  # noqa: ANN401
    """The ids of the queries and of the keys, one object if they are the same; validates shapes and dtypes.

    `queries` and `keys` are the expected shapes, ``(B, T)`` and ``(B, S)``; without a batch ``(T,)`` and ``(S,)``.
    """
    is_sequence = isinstance(segment_ids, tuple | list)
    if is_sequence and len(segment_ids) != 2:
        raise ValueError(f"{name} has {len(segment_ids)} entries, expected one array, or a pair for queries and keys")
    pair = tuple(segment_ids) if is_sequence else (segment_ids, segment_ids)
    if pair[0] is pair[1]:
        ids = _ids(name, pair[0])
        if queries != keys:
            raise ValueError(f"{name} is one array, expected a pair: there are {queries[-1]} queries, {keys[-1]} keys")
        pair = ids, ids
    else:
        pair = tuple(_ids(f"{name}[{i}]", ids) for i, ids in enumerate(pair))
        # jax.numpy's function gives i32 for i32 and u32.
        if np.promote_types(pair[0].dtype, pair[1].dtype).itemsize > 4 and not jax.config.jax_enable_x64:
            dtypes = " and ".join(str(ids.dtype) for ids in pair)
            raise TypeError(f"{name} are {dtypes}, which have no common dtype of 32 bits; cast one of them")
    for ids, expected in zip(pair, (queries, keys), strict=True):
        if tuple(ids.shape) != tuple(expected):
            raise ValueError(f"{name} has shape {list(ids.shape)}, expected {list(expected)}")
    return pair


def segments_of(
    name: str,
    ids: tuple[Any, Any],
    padding: int | None,
    max_segments: int | None,
) -> Segments:
    """The segments of ids ``[B, T]`` and ``[B, S]``, which `id_arrays` returned.

    Ids that are NumPy arrays are validated here, and a ValueError says what is wrong.
    """
    queries, keys = ids
    size = queries.shape[1]
    bound = size
    if max_segments is not None:
        bound = int(static_i64(f"{name}: max_segments", max_segments))
        if bound < 1:
            raise ValueError(f"{name}: max_segments is {bound}, expected >= 1, or None")
        bound = min(bound, size) if isinstance(size, int) else bound
    compute = functools.partial(_segments, padding=padding, bound=bound, is_one=keys is queries)
    if not all(isinstance(x, np.ndarray) for x in ids):
        arrays = [jnp.asarray(x) for x in ids]
        rule = ShardingRule(("b.",) * 2, (*("b.",) * 4, "b"), "b")
        return Segments(*with_auto_axes(compute, arrays, rule)(*arrays))
    with jax.ensure_compile_time_eval():
        segments = Segments(*compute(*map(jnp.asarray, ids)))
        invalid = np.flatnonzero(~np.asarray(segments.valid))
    if invalid.size:
        raise ValueError(
            f"{name}: segment_ids[{invalid[0]}] has equal ids that are not adjacent, more than max_segments segments, "
            "or other orders of queries and keys"
        )
    return segments._replace(valid=None)


def key_ranges_of(name: str, ids: tuple[Any, Any], padding: int | None) -> tuple[Array, Array, Array, Array | None]:
    """The keys of each query's id: the first and the end ``i32[B, T]``, which are 0 for a query without one.

    Then whether the query is padding ``[B, T]``, and whether the keys of each id are adjacent ``[B]``, or None if they
    are. `ids` are as for `segments_of`, whose metadata is smaller: this is for calls with other bounds per query.
    """
    compute = functools.partial(_key_ranges, padding=padding)
    if not all(isinstance(x, np.ndarray) for x in ids):
        rule = ShardingRule(("b.",) * 2, (*("b.",) * 3, "b"), "b")
        arrays = [jnp.asarray(x) for x in ids]
        return with_auto_axes(compute, arrays, rule)(*arrays)
    with jax.ensure_compile_time_eval():
        *ranges, valid = compute(*map(jnp.asarray, ids))
        invalid = np.flatnonzero(~np.asarray(valid))
    if invalid.size:
        raise ValueError(f"{name}: segment_ids[{invalid[0]}] has keys of one id that are not adjacent")
    return *ranges, None


@functools.partial(jax.jit, static_argnames=("padding",))
def _key_ranges(queries: Array, keys: Array, *, padding: int | None) -> tuple[Array, ...]:
    dtype = jnp.promote_types(queries.dtype, keys.dtype)
    queries, keys = queries.astype(dtype), keys.astype(dtype)
    is_padding = jnp.zeros_like(queries, bool) if padding is None else ~_differs(queries, padding)
    first, last, count = _keys_of_ids(queries, ~is_padding, keys)
    return (
        jnp.where(count > 0, first, 0),
        jnp.where(count > 0, first + count, 0),
        is_padding,
        ((count == 0) | (last - first + 1 == count)).all(1),
    )


def segment_mask(ids: tuple[Any, Any], padding: int | None) -> Array:
    """``bool[B, 1, T, S]``: the mask that the ids stand for."""
    queries, keys = map(jnp.asarray, ids)
    mask = queries[:, :, None] == keys[:, None, :]
    if padding is not None:
        mask &= _differs(queries, padding)[:, :, None]
    return mask[:, None]


def is_padding_id(ids: Any, padding: int) -> Array:  # noqa: ANN401
    """Which of the ids ``[B, T]`` are that of padding."""
    return ~_differs(jnp.asarray(ids), padding)


def padding_id(name: str, padding: Any) -> int | None:  # noqa: ANN401
    """The id of padding as a Python integer."""
    return None if padding is None else int(static_i64(name, padding))


def _ids(name: str, ids: Any) -> Any:  # noqa: ANN401
    """Ids as a NumPy array or as JAX's; those of 64 bits, which JAX would truncate, have to fit 32."""
    if not isinstance(ids, jax.Array | jax.core.Tracer):
        ids = ids.__jax_array__() if hasattr(ids, "__jax_array__") else np.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {ids.dtype}, expected integers")
    if isinstance(ids, np.ndarray) and ids.dtype.itemsize == 8:
        limits = np.iinfo(np.int32)
        if ids.size and not limits.min <= ids.min() <= ids.max() <= limits.max:
            raise ValueError(f"{name} has the id {ids.max()} or {ids.min()}, expected ids that 32 bits hold")
        ids = ids.astype(np.int32)
    return ids


@functools.partial(jax.jit, static_argnames=("padding", "bound", "is_one"))
def _segments(queries: Array, keys: Array, *, padding: int | None, bound: Any, is_one: bool) -> tuple[Array, ...]:  # noqa: ANN401
    dtype = jnp.promote_types(queries.dtype, keys.dtype)
    queries, keys = queries.astype(dtype), keys.astype(dtype)
    size = queries.shape[1]
    position = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), queries.shape)
    is_start = jnp.concatenate([jnp.ones_like(queries[:, :1], bool), queries[:, 1:] != queries[:, :-1]], 1)
    # Sorting moves the starts of runs to the front. A run ends where the next one starts.
    starts = jax.lax.sort(jnp.where(is_start, position, size), dimension=1)
    ends = jnp.concatenate([starts[:, 1:], jnp.full_like(starts[:, :1], size)], 1)
    if padding is not None:
        is_segment = (starts < size) & _differs(_take(queries, starts), padding)
        starts, ends = jax.lax.sort((jnp.where(is_segment, starts, size), ends), dimension=1, num_keys=1)
    valid = (starts < size).sum(1) <= bound
    starts, ends = starts[:, :bound], ends[:, :bound]
    lengths = jnp.where(starts < size, ends - starts, 0)
    starts_q = _append(starts, size)
    if is_one:
        valid &= ~_has_distant_equals(queries, position, padding)
        return starts_q, starts_q, lengths, lengths, valid
    starts_k, lengths_k, matches = _matching_keys(_take(queries, starts), starts < size, keys)
    return starts_q, _append(starts_k, keys.shape[1]), lengths, lengths_k, valid & matches


def _differs(ids: Array, padding: int) -> Array:
    limits = jnp.iinfo(ids.dtype)
    return ids != padding if limits.min <= padding <= limits.max else jnp.ones_like(ids, bool)


def _has_distant_equals(ids: Array, position: Array, padding: int | None) -> Array:
    """``bool[B]``: whether an id other than padding occurs at positions that are not adjacent."""
    sorted_ids, sorted_position = jax.lax.sort((ids, position), dimension=1, num_keys=1, is_stable=True)
    jumps = (sorted_ids[:, 1:] == sorted_ids[:, :-1]) & (sorted_position[:, 1:] != sorted_position[:, :-1] + 1)
    if padding is not None:
        jumps &= _differs(sorted_ids[:, 1:], padding)
    return jumps.any(1)


def _matching_keys(segment_ids: Array, is_segment: Array, keys: Array) -> tuple[Array, Array, Array]:
    """The first key and the number of keys of each segment, and per row whether they are one range each, in order."""
    first, last, count = _keys_of_ids(segment_ids, is_segment, keys)
    has_keys = count > 0
    ends = jax.lax.cummax(jnp.where(has_keys, first + count, 0), axis=1)
    previous_end = jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
    is_range = (last - first + 1 == count) & (first >= previous_end)
    starts = jnp.where(has_keys, first, previous_end)
    return starts, count, (is_range | ~has_keys).all(1)


def _keys_of_ids(ids: Array, is_wanted: Array, keys: Array) -> tuple[Array, Array, Array]:
    """The first and the last key of each of the ids ``[B, N]``, and their number, 0 where it is not wanted."""
    position = jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=jnp.int32), keys.shape)
    sorted_keys, sorted_position = jax.lax.sort((keys, position), dimension=1, num_keys=1, is_stable=True)
    left, right = (
        jax.vmap(functools.partial(jnp.searchsorted, side=side, method="sort"))(sorted_keys, ids).astype("int32")
        for side in ("left", "right")
    )
    count = jnp.where(is_wanted, right - left, 0)
    return _take(sorted_position, left), _take(sorted_position, right - 1), count


def _take(values: Array, index: Array) -> Array:
    """``values[b, index[b, i]]``; any value where the index is out of range."""
    return jnp.take_along_axis(values, jnp.clip(index, 0, values.shape[1] - 1), axis=1)


def _append(starts: Array, end: Any) -> Array:  # noqa: ANN401
    return jnp.concatenate([starts, jnp.full_like(starts[:, :1], end)], 1)
