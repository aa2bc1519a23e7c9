"""The order of rows in the layout "zigzag" of context-parallel attention, on the host and on the devices."""

from typing import Any

import jax
import numpy as np

from ._call import pvary_all


def zigzag_order(cu_seqlens: Any, num_devices: int, *, total: int | None = None) -> np.ndarray:  # noqa: ANN401
    """The order in which the devices hold a stream's rows in the layout "zigzag" of `context_parallel_attention`.

    Every sequence is cut into ``2 * num_devices`` equal chunks, of which device r holds the chunks r and
    ``2 * num_devices - 1 - r``. This is computed on the host, where the batch is made.

    Parameters
    ----------
    cu_seqlens : array_like
        ``i32[B + 1]`` on the host: the first row of each sequence and, last, the end.
    num_devices : int
        The size n of the mesh axis that cuts the sequences.
    total : int, optional
        The number of rows T of the stream, if rows of no sequence follow the last one; ``cu_seqlens[-1]`` by default.

    Returns
    -------
    np.ndarray
        ``i32[T]``: ``x[zigzag_order(cu_seqlens, n)]`` has the rows of `x` in the order of the devices, T/n for each.
        Positions, targets and everything else with a row per token take the same order.

    Raises
    ------
    ValueError
        A start, a length or `total` is no multiple of ``2 * num_devices``. Pad the sequence and pass its true length as
        `seqused` to `context_parallel_attention`.
    TypeError
        `cu_seqlens` is traced.

    Examples
    --------
    A sequence of 8 rows and one of 4, over 2 devices.

    >>> from xla_attention.jax import zigzag_order
    >>> zigzag_order([0, 8, 12], 2).tolist()
    [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]
    """
    starts, total = _host_stream("zigzag_order", cu_seqlens, num_devices, total)
    return stream_rows(starts, total, num_devices, np)


def inverse_zigzag_order(cu_seqlens: Any, num_devices: int, *, total: int | None = None) -> np.ndarray:  # noqa: ANN401
    """The inverse of `zigzag_order`, which puts rows of the devices back into the order of the stream.

    Parameters
    ----------
    cu_seqlens, num_devices, total
        As for `zigzag_order`.

    Returns
    -------
    np.ndarray
        ``i32[T]``: ``y[inverse_zigzag_order(cu_seqlens, n)]`` has the rows of `y` in the order of the stream.

    Raises
    ------
    ValueError, TypeError
        As for `zigzag_order`.

    Examples
    --------
    >>> from xla_attention.jax import inverse_zigzag_order, zigzag_order
    >>> zigzag_order([0, 8, 12], 2)[inverse_zigzag_order([0, 8, 12], 2)].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    """
    starts, total = _host_stream("inverse_zigzag_order", cu_seqlens, num_devices, total)
    return device_rows(starts, total, num_devices, np)


def _host_stream(function: str, cu_seqlens: Any, num_devices: int, total: int | None) -> tuple[np.ndarray, int]:  # noqa: ANN401
    """The starts as i32 and the number of rows, validated."""
    if isinstance(cu_seqlens, jax.core.Tracer):
        raise TypeError(f"{function}: cu_seqlens is traced, expected an array on the host")
    if isinstance(num_devices, bool) or not isinstance(num_devices, int | np.integer) or num_devices < 1:
        raise ValueError(f"{function}: num_devices is {num_devices!r}, expected a positive integer")
    starts = np.asarray(cu_seqlens)
    if starts.ndim != 1 or not starts.size or starts.dtype.kind not in "iu":
        raise ValueError(f"{function}: cu_seqlens is {starts.dtype}{list(starts.shape)}, expected integers [B + 1]")
    if starts[0] < 0 or (np.diff(starts) < 0).any():
        raise ValueError(f"{function}: cu_seqlens is {starts.tolist()}, expected ascending rows from 0 on")
    total = int(starts[-1] if total is None else total)
    if total < starts[-1]:
        raise ValueError(f"{function}: total is {total}, but cu_seqlens ends at {starts[-1]}")
    validate_zigzag(function, starts, total, num_devices)
    return starts.astype(np.int32), total


def validate_zigzag(function: str, cu_seqlens: np.ndarray, total: int, num_devices: int) -> None:
    """Raise ValueError unless the sequences, and the rows before and after them, can be cut into 2 n chunks."""
    lengths = np.diff(_bounds(cu_seqlens, total, np))
    wrong = np.flatnonzero(lengths % (2 * num_devices))
    if wrong.size:
        first, last = wrong[0] == 0, wrong[0] == lengths.size - 1
        what = "cu_seqlens[0]" if first else f"total - cu_seqlens[{lengths.size - 2}]" if last else None
        what = what or f"the length of sequence {wrong[0] - 1}"
        raise ValueError(
            f"{function}: {what} is {lengths[wrong[0]]}, expected a multiple of 2 n = {2 * num_devices} in the layout "
            "'zigzag' over n devices; pad the sequences and pass their true lengths as seqused"
        )


def _bounds(cu_seqlens: Any, total: int, numpy: Any) -> Any:  # noqa: ANN401
    """The starts with 0 before and `total` behind them: the rows at the ends are cut as sequences are."""
    ends = (numpy.asarray([end], cu_seqlens.dtype) for end in (0, total))
    return numpy.concatenate([next(ends), cu_seqlens, next(ends)])


def sequence_of(row: Any, bounds: Any, numpy: Any) -> Any:  # noqa: ANN401
    """The number of each row's sequence, by where these begin; -1 before the first one."""
    if numpy is np:
        return np.searchsorted(bounds, row, side="right") - 1
    # JAX 0.7 searches only what varies along the same axes of shard_map, and JAX 0.6 nothing that varies, so all
    # starts are compared there. XLA fuses the unrolled search into the gather that follows; a loop would be a sequence
    # of small kernels.
    row, bounds = pvary_all((row, bounds))
    method = "scan_unrolled" if jax.__version_info__ >= (0, 7) else "compare_all"
    return numpy.searchsorted(bounds, row, side="right", method=method) - 1


def stream_rows(cu_seqlens: Any, total: int, num_devices: int, numpy: Any) -> Any:  # noqa: ANN401
    """For each row in the order of the devices, its row of the stream; `numpy` is NumPy or jax.numpy."""
    bounds = _bounds(cu_seqlens, total, numpy)
    rank, row = numpy.divmod(numpy.arange(total, dtype=numpy.int32), numpy.int32(total // num_devices))
    sequence = sequence_of(row, bounds // num_devices, numpy)
    start = bounds[sequence]
    chunk = numpy.maximum((bounds[sequence + 1] - start) // (2 * num_devices), 1)
    half, at = numpy.divmod(row - start // num_devices, chunk)
    return start + numpy.where(half == 0, rank, 2 * num_devices - 1 - rank) * chunk + at


def device_rows(cu_seqlens: Any, total: int, num_devices: int, numpy: Any) -> Any:  # noqa: ANN401
    """For each row of the stream, its row in the order of the devices: the inverse of `stream_rows`."""
    bounds = _bounds(cu_seqlens, total, numpy)
    row = numpy.arange(total, dtype=numpy.int32)
    sequence = sequence_of(row, bounds, numpy)
    start = bounds[sequence]
    chunk = numpy.maximum((bounds[sequence + 1] - start) // (2 * num_devices), 1)
    number, at = numpy.divmod(row - start, chunk)
    is_first = number < num_devices
    rank = numpy.where(is_first, number, 2 * num_devices - 1 - number)
    return rank * (total // num_devices) + start // num_devices + numpy.where(is_first, 0, chunk) + at
