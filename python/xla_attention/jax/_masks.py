"""Masks of dot_product_attention that the kernels can express: one range of keys for each query.

``mask[b, t, s] = t - left <= s <= t + right and t < rows[b] and first_key[b] <= s < keys[b]`` covers causal masks,
sliding windows, and padding of keys on either side and of queries at the end, without an array per query. Where a mask
has another form, each query may have a range of its own, ``mask[b, t, s] = k_start[b, t] <= s < k_end[b, t]``:
prefixes, documents, chunks. `recognise` finds these forms in a mask whose values are known. `promised` derives the
numbers of a traced mask on the device, given the form, and tells whether the mask has it. `gather_visible` handles
traced masks that are the same for all queries.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._call import Array
from ._sharding import ShardingRule, with_auto_axes

UNLIMITED = -1
# What a traced mask can be promised to be, as (left, right).
WINDOWS = {"causal": (UNLIMITED, 0), "padding": (UNLIMITED, UNLIMITED)}
FORMS = (*WINDOWS, "ranges")


class Visible(NamedTuple):
    """The keys that each query attends to. None stands for all rows, for the first key, for all keys."""

    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    rows: Array | None = None  # i32[B]: queries past this one attend to no key
    first_key: Array | None = None  # i32[B]
    keys: Array | None = None  # i32[B]: the end of the visible keys
    valid: Array | None = None  # bool[B]: whether the mask has this form; None if this is known
    ranges: tuple[Array | None, Array | None] = (None, None)  # i32[B, T]: the first key of each query, and the end


def as_4d(name: str, value: Any, sizes: tuple) -> Any:  # noqa: ANN401
    """A mask or bias as ``[B, N, T, S]`` with any of these 1, as JAX does: missing dimensions are leading ones."""
    if value.ndim > 4:
        raise ValueError(f"{name} has shape {list(value.shape)}, expected up to 4 dimensions")
    shape = (1,) * (4 - value.ndim) + tuple(value.shape)
    if any(size not in (1, full) for size, full in zip(shape, sizes, strict=True)):
        raise ValueError(
            f"{name} has shape {list(value.shape)}, expected [B, N, T, S] = {list(sizes)}, or 1 for any of them"
        )
    return value.reshape(shape)


def is_known(mask: Any) -> bool:  # noqa: ANN401
    """Whether this process can read the mask's values while it traces."""
    return not isinstance(mask, jax.core.Tracer) and getattr(mask, "is_fully_addressable", True)


def recognise(mask: np.ndarray, sizes: tuple[int, int, int, int]) -> Visible | None:
    """The form of ``mask[B, N, T, S]``, any of which may be 1; None if it has another one."""
    batch, _, num_rows, num_keys = sizes
    if not all(isinstance(size, int) for size in sizes) or not (mask == mask[:, :1]).all():
        return None
    mask = mask[:, 0]
    if mask.shape[1] != 1:  # otherwise the rows are alike, and one stands for all
        mask = np.broadcast_to(mask, (len(mask), num_rows, num_keys))
    else:
        mask = np.broadcast_to(mask, (len(mask), 1, num_keys))
    rows, first_key, keys = _extent(mask, np)
    for window in _windows(mask) if mask.shape[1] > 1 else [(UNLIMITED, UNLIMITED)]:
        if (_model(mask.shape, window, rows, first_key, keys, np) == mask).all():
            break
    else:
        k_start, k_end, is_range = _ranges(mask, np)
        if not is_range.all():
            return None
        return Visible(ranges=tuple(jnp.asarray(np.broadcast_to(x, (batch, num_rows))) for x in (k_start, k_end)))
    # An array of lengths is passed only where it says something.
    is_row = mask.shape[1] == 1
    return Visible(
        window,
        None if is_row or (rows == num_rows).all() else _per_batch(rows, batch),
        None if (first_key == 0).all() else _per_batch(first_key, batch),
        None if (keys == num_keys).all() else _per_batch(keys, batch),
    )


def promised(mask: Array, form: str, sizes: tuple) -> Visible:
    """The form of a traced ``mask[B, 1, T, S]`` with the window of `form`, and whether this is what the mask is."""
    batch, _, num_rows, num_keys = sizes
    if form == "ranges":
        return _promised_ranges(mask, sizes)
    # One row that attends to a range of keys is a causal mask too, with the other rows before it: that of decoding.
    window = WINDOWS[form] if num_rows != 1 else WINDOWS["padding"]
    shape = (mask.shape[0], num_rows if form == "causal" else mask.shape[2], num_keys)
    mask = jnp.broadcast_to(mask[:, 0], shape)

    def measure(mask: Array) -> tuple[Array, ...]:
        rows, first_key, keys = _extent(mask, jnp)
        return rows, first_key, keys, (_model(shape, window, rows, first_key, keys, jnp) == mask).all((1, 2))

    numbers = with_auto_axes(measure, [mask], ShardingRule(("b..",), ("b",) * 4, "b"))(mask)
    rows, *others = (jnp.broadcast_to(x, (batch,)) for x in numbers)
    return Visible(window, None if shape[1] == 1 else rows, *others)


def _promised_ranges(mask: Array, sizes: tuple) -> Visible:
    batch, _, num_rows, num_keys = sizes
    mask = jnp.broadcast_to(mask[:, 0], (mask.shape[0], num_rows, num_keys))

    def measure(mask: Array) -> tuple[Array, ...]:
        k_start, k_end, is_range = _ranges(mask, jnp)
        return k_start, k_end, is_range.all(1)

    k_start, k_end, valid = with_auto_axes(measure, [mask], ShardingRule(("b..",), ("b.", "b.", "b"), "b"))(mask)
    ranges = tuple(jnp.broadcast_to(x, (batch, num_rows)) for x in (k_start, k_end))
    return Visible(ranges=ranges, valid=jnp.broadcast_to(valid, (batch,)))


def gather_visible(mask: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Keys and values with those first that ``mask[B, S]`` shows, and their numbers ``i32[B]``.

    The order of the keys does not matter where every query attends to the same ones. This copies keys and values.
    """
    arrays = jnp.broadcast_to(mask, key.shape[:2]), key, value
    rule = ShardingRule(("b.", "bshd", "bshe"), ("bshd", "bshe", "b"), "b")
    return with_auto_axes(_gather_visible, arrays, rule)(*arrays)


def _gather_visible(mask: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    order = jnp.argsort(~mask, axis=1, stable=True)
    inverse = jnp.argsort(order, axis=1)
    return _permute(key, order, inverse), _permute(value, order, inverse), mask.sum(1, dtype=jnp.int32)


@jax.custom_vjp
def _permute(array: Array, order: Array, inverse: Array) -> Array:
    """``array[b, order[b, s]]``; its gradient is a permutation too, where JAX's would be a scatter."""
    del inverse
    return jnp.take_along_axis(array, order[:, :, None, None], axis=1)


def _permute_fwd(array: Array, order: Array, inverse: Array) -> tuple[Array, tuple[Array, Array]]:
    return _permute(array, order, inverse), (order, inverse)


def _permute_bwd(residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, None, None]:
    order, inverse = residuals
    return _permute(cotangent, inverse, order), None, None


_permute.defvjp(_permute_fwd, _permute_bwd)


def _extent(mask: Any, numpy: Any) -> tuple[Any, Any, Any]:  # noqa: ANN401
    """For ``mask[B, T, S]``: the end of the rows with a key, the first key that is seen, and the end of those seen."""
    seen, has_key = mask.any(1), mask.any(2)
    is_empty = ~has_key.any(1)

    def end(flags: Any) -> Any:  # noqa: ANN401
        return numpy.where(is_empty, 0, flags.shape[1] - numpy.argmax(flags[:, ::-1], 1)).astype(np.int32)

    return end(has_key), numpy.argmax(seen, 1).astype(np.int32), end(seen)


def _ranges(mask: Any, numpy: Any) -> tuple[Any, Any, Any]:  # noqa: ANN401
    """For ``mask[B, T, S]``: the first key of each query, the end of its keys, and whether it has all between."""
    first = numpy.argmax(mask, 2).astype(np.int32)
    count = mask.sum(2, dtype=np.int32)
    end = mask.shape[2] - numpy.argmax(mask[:, :, ::-1], 2).astype(np.int32)
    return first, first + count, (count == 0) | (first + count == end)


def _model(shape: tuple, window: tuple[int, int], rows: Any, first_key: Any, keys: Any, numpy: Any) -> Any:  # noqa: ANN401
    """The mask ``[B, T, S]`` of the form with these numbers."""
    row, key = numpy.arange(shape[1])[:, None], numpy.arange(shape[2])[None]
    rows, first_key, keys = (x[:, None, None] for x in (rows, first_key, keys))
    mask = (row < rows) & (first_key <= key) & (key < keys)
    left, right = window
    if left != UNLIMITED:
        mask &= key >= row - left
    if right != UNLIMITED:
        mask &= key <= row + right
    return mask


def _windows(mask: np.ndarray) -> list[tuple[int, int]]:
    """The windows that ``mask[B, T, S]`` may have, simple ones first."""
    pairs = mask.any(0)
    offsets = np.arange(mask.shape[2])[None] - np.arange(mask.shape[1])[:, None]
    if not pairs.any():
        return [(UNLIMITED, UNLIMITED)]
    left, right = -int(offsets.min(where=pairs, initial=0)), int(offsets.max(where=pairs, initial=0))
    candidates = [(UNLIMITED, UNLIMITED), (UNLIMITED, 0), (left, UNLIMITED), (UNLIMITED, right), (left, right)]
    return list(dict.fromkeys(candidates))


def _per_batch(values: np.ndarray, batch: int) -> Array:
    return jnp.asarray(np.broadcast_to(values, (batch,)))
