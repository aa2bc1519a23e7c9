"""Which rows of a packed stream each device of a context-parallel axis holds, and which keys these rows attend to.

A stream of T rows holds B sequences, and rows of no sequence at either end. Each of the n devices of the axis holds T/n
rows; its rank is its index along the axis. A layout describes calls of the operator by starts, lengths and offsets of
sequences, which may depend on the rank, so that every device runs the same program:

    own      this device's rows beside its own keys
    visiting this device's rows beside the keys of another device
    gathered this device's rows beside the keys of all devices, in one call

A call attends to keys by their positions if the attention has a window or ALiBi slopes. Otherwise the layout "zigzag"
needs fewer calls: every key that a device holds is then visible to all rows of a part of another device's sequence or
to none of them, and a key that is not visible is outside of the starts and lengths.
"""

from typing import NamedTuple, Protocol

import jax.numpy as jnp

from ._call import Array
from ._zigzag_order import device_rows, sequence_of, stream_rows


class Ranges(NamedTuple):
    """Rows and keys of each sequence in one call. A sequence of the stream is one entry, or several in a row."""

    causal: bool
    cu_seqlens_q: Array
    cu_seqlens_k: Array
    seqused_q: Array | None = None
    seqused_k: Array | None = None
    q_offset: Array | None = None  # of the first row from the first key; None if the last row stands at the last key
    entries: int = 1  # per sequence


class Stream(NamedTuple):
    """A packed stream over the devices of an axis, as the device `rank` sees it."""

    cu_seqlens: Array  # i32[B + 1], ascending, at most T
    seqused: Array | None  # i32[B], at most the lengths; None if every row is used
    num_devices: int
    rows: int  # on each device: T/n
    rank: Array  # i32[]
    causal: bool
    is_positional: bool  # whether there is a window, or slopes

    @property
    def used(self) -> Array:
        """The used rows of each sequence."""
        return jnp.diff(self.cu_seqlens) if self.seqused is None else self.seqused


class Layout(Protocol):
    """A layout of a stream."""

    stream: Stream

    def own(self) -> list[Ranges]:
        """The device's rows beside its own keys. The first call has every row of every sequence."""

    def visiting(self, source: Array) -> list[Ranges]:
        """The device's rows beside the keys of the device `source`, another one."""

    def gathered(self) -> Ranges:
        """The device's rows beside the rows of `gathered_keys`."""

    def gathered_keys(self, rows: Array) -> Array:
        """What each sequence may attend to, from the rows ``[T, ...]`` of all devices. A row can be there twice."""

    def sum_of_keys(self, gradients: Array) -> Array:
        """Gradients of the rows ``[T, ...]`` of all devices from those of `gathered_keys`."""

    def longest(self, max_seqlen: int) -> int:
        """The rows that a sequence of `max_seqlen` rows has on one device at most."""


class Contiguous:
    """Device r holds the rows from r T/n to (r + 1) T/n of the stream, in the middle of a sequence or not.

    At most one sequence has rows on two given devices.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def _part(self, rank: Array) -> tuple[Array, Array | None, Array]:
        """The starts and the used rows of each sequence on a device, and the positions of their first rows."""
        stream = self.stream
        starts = self._row_of(stream.cu_seqlens, rank)
        positions = jnp.maximum(rank * stream.rows - stream.cu_seqlens[:-1], 0)
        if stream.seqused is None:
            return starts, None, positions
        ends = self._row_of(stream.cu_seqlens[:-1] + stream.seqused, rank)
        return starts, jnp.maximum(ends - starts[:-1], 0), positions

    def _row_of(self, stream_rows: Array, rank: Array) -> Array:
        """Rows of the stream as rows of a device, those outside of it as its nearer end."""
        return jnp.clip(stream_rows - rank * self.stream.rows, 0, self.stream.rows)

    def own(self) -> list[Ranges]:
        """See `Layout`."""
        starts, used, _ = self._part(self.stream.rank)
        return [Ranges(self.stream.causal, starts, starts, used, used)]

    def visiting(self, source: Array) -> list[Ranges]:
        """See `Layout`."""
        (starts_q, used_q, first_q), (starts_k, used_k, first_k) = map(self._part, (self.stream.rank, source))
        return [Ranges(self.stream.causal, starts_q, starts_k, used_q, used_k, first_q - first_k)]

    def gathered(self) -> Ranges:
        """See `Layout`."""
        starts, used, first = self._part(self.stream.rank)
        return Ranges(self.stream.causal, starts, self.stream.cu_seqlens, used, self.stream.seqused, first)

    def gathered_keys(self, rows: Array) -> Array:
        """See `Layout`."""
        return rows

    def sum_of_keys(self, gradients: Array) -> Array:
        """See `Layout`."""
        return gradients

    def longest(self, max_seqlen: int) -> int:
        """See `Layout`."""
        return min(max_seqlen, self.stream.rows)


class Zigzag:
    """Every sequence is cut into 2 n equal chunks; device r holds the chunks r and 2 n - 1 - r of each, in this order.

    Under a causal mask all devices have the same work, whatever the lengths. The first chunk of device r precedes the
    first chunk of each later device, and its second chunk follows theirs.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._starts = stream.cu_seqlens // stream.num_devices  # the same on every device
        self._chunk = jnp.diff(stream.cu_seqlens) // (2 * stream.num_devices)

    def _chunks(self, rank: Array) -> tuple[Array, Array]:
        """The numbers of a device's chunks."""
        return rank, 2 * self.stream.num_devices - 1 - rank

    def _used(self, rank: Array) -> tuple[Array, Array]:
        """The used rows of each sequence in the first and in the second chunk of a device."""
        first, second = (
            jnp.clip(self.stream.used - chunk * self._chunk, 0, self._chunk) for chunk in self._chunks(rank)
        )
        return first, second

    def _two_entries(self, first: Array, second: Array) -> Array:
        """The starts of two entries per sequence."""
        return jnp.append(_pairs(first, second), self._starts[-1])

    def own(self) -> list[Ranges]:
        """See `Layout`."""
        if self.stream.is_positional:
            return self._by_chunks(self.stream.rank)
        # A causal mask over both chunks side by side is right, because the first one precedes the second.
        used = None if self.stream.seqused is None else sum(self._used(self.stream.rank))
        return [Ranges(self.stream.causal, self._starts, self._starts, used, used)]

    def visiting(self, source: Array) -> list[Ranges]:
        """See `Layout`."""
        if self.stream.is_positional:
            return self._by_chunks(source)
        rank, has_padding = self.stream.rank, self.stream.seqused is not None
        used_q, used_k = self._used(rank), self._used(source)
        if not self.stream.causal:
            used = (sum(used_q), sum(used_k)) if has_padding else (None, None)
            return [Ranges(False, self._starts, self._starts, *used)]
        # Keys of an earlier device: all rows attend to its first chunk, in the first entry of a sequence. Keys of a
        # later one: the rows of the second chunk attend to all of them, in the second entry.
        is_earlier = source < rank
        starts, ends = self._starts[:-1], self._starts[1:]
        middle = starts + self._chunk
        cu_seqlens_q = self._two_entries(starts, jnp.where(is_earlier, ends, middle))
        cu_seqlens_k = self._two_entries(starts, jnp.where(is_earlier, middle, starts))
        if not has_padding:
            return [Ranges(False, cu_seqlens_q, cu_seqlens_k, entries=2)]
        zero = jnp.zeros_like(used_q[0])
        seqused_q = _pairs(jnp.where(is_earlier, sum(used_q), zero), jnp.where(is_earlier, zero, used_q[1]))
        seqused_k = _pairs(jnp.where(is_earlier, used_k[0], zero), jnp.where(is_earlier, zero, sum(used_k)))
        return [Ranges(False, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, entries=2)]

    def _by_chunks(self, source: Array) -> list[Ranges]:
        """Each chunk of rows beside one chunk of the source's keys per call, because each pair has its own offset.

        The first call has the first chunks of both and the second chunks of both, the others a pair each.
        """
        starts, ends = self._starts[:-1], self._starts[1:]
        middle = starts + self._chunk
        cu_seqlens_q = self._two_entries(starts, middle)
        used_q, used_k = self._used(self.stream.rank), self._used(source)
        chunks_q, chunks_k = self._chunks(self.stream.rank), self._chunks(source)
        zero = jnp.zeros_like(self._chunk)

        def call(cu_seqlens_k: Array, first: int | None, second: int | None) -> Ranges:
            """The entries' chunks of keys; None for an entry without keys and rows."""
            pairs = [(half, key) for half, key in enumerate((first, second))]
            seqused_q = _pairs(*(zero if key is None else used_q[half] for half, key in pairs))
            seqused_k = _pairs(*(zero if key is None else used_k[key] for _, key in pairs))
            offsets = (zero if key is None else (chunks_q[half] - chunks_k[key]) * self._chunk for half, key in pairs)
            causal = self.stream.causal
            return Ranges(causal, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, _pairs(*offsets), entries=2)

        calls = [call(cu_seqlens_q, 0, 1), call(self._two_entries(starts, starts), None, 0)]
        if not self.stream.causal:
            # A first chunk of any device precedes all second chunks.
            calls.append(call(self._two_entries(middle, ends), 1, None))
        return calls

    # The two chunks of a device attend to keys that begin with the same ones, which two entries of one call cannot
    # share. So `gathered_keys` has the keys of each chunk, (2 n + 1) / (2 n) times those of the sequence under a causal
    # mask. Without one, and where positions do not count, both chunks are one entry with all keys.

    @property
    def _repeats_keys(self) -> bool:
        return (self.stream.causal or self.stream.is_positional) and len(self._chunk) > 0

    def _visible(self) -> tuple[Array, Array]:
        """The keys of each sequence that rows of the device's first and second chunk may attend to."""
        lens = jnp.diff(self.stream.cu_seqlens)
        if not self.stream.causal:
            return lens, lens
        first, second = ((chunk + 1) * self._chunk for chunk in self._chunks(self.stream.rank))
        return first, second

    def _starts_of_keys(self) -> Array:
        """The first row of each entry's keys in `gathered_keys`, and the end."""
        return jnp.append(jnp.zeros(1, jnp.int32), jnp.cumsum(_pairs(*self._visible()), dtype=jnp.int32))

    def gathered(self) -> Ranges:
        """See `Layout`."""
        stream, used = self.stream, self._used(self.stream.rank)
        has_padding = stream.seqused is not None
        if not self._repeats_keys:
            return Ranges(False, self._starts, stream.cu_seqlens, sum(used) if has_padding else None, stream.seqused)
        used_k = (jnp.minimum(stream.used, visible) for visible in self._visible())
        lens = (_pairs(*used), _pairs(*used_k)) if has_padding else (None, None)
        # Under a causal mask the last row of an entry stands at its last key.
        offsets = (chunk * self._chunk for chunk in self._chunks(stream.rank))
        offset = None if stream.causal else _pairs(*offsets)
        starts = self._starts[:-1]
        cu_seqlens_q = self._two_entries(starts, starts + self._chunk)
        return Ranges(stream.causal, cu_seqlens_q, self._starts_of_keys(), *lens, offset, entries=2)

    def gathered_keys(self, rows: Array) -> Array:
        """See `Layout`."""
        stream, total = self.stream, rows.shape[0]
        places = device_rows(stream.cu_seqlens, total, stream.num_devices, jnp)
        if self._repeats_keys:
            count = total + (-(-total // (2 * stream.num_devices)) if stream.causal else total)
            key, starts = jnp.arange(count, dtype=jnp.int32), self._starts_of_keys()
            entry = sequence_of(key, starts, jnp)
            places = _rows_of(places, _rows_of(stream.cu_seqlens, entry // 2) + key - _rows_of(starts, entry))
        return _rows_of(rows, places)

    def sum_of_keys(self, gradients: Array) -> Array:
        """See `Layout`."""
        stream = self.stream
        total = stream.num_devices * stream.rows
        row = stream_rows(stream.cu_seqlens, total, stream.num_devices, jnp)
        if not self._repeats_keys:
            return gradients[row]
        sequence, starts = sequence_of(row, stream.cu_seqlens, jnp), self._starts_of_keys()
        at = row - _rows_of(stream.cu_seqlens, sequence)
        is_row = (sequence >= 0) & (sequence < len(stream.cu_seqlens) - 1)
        parts = []
        for half, visible in enumerate(self._visible()):
            part = _rows_of(gradients, _rows_of(starts, 2 * sequence + half) + at)
            is_there = is_row & (at < _rows_of(visible, sequence))
            parts.append(jnp.where(is_there.reshape(-1, *[1] * (gradients.ndim - 1)), part, 0))
        return parts[0] + parts[1]

    def longest(self, max_seqlen: int) -> int:
        """See `Layout`."""
        return -(-max_seqlen // self.stream.num_devices)


def _rows_of(array: Array, rows: Array) -> Array:
    """Rows of an array, and one that exists for a row that does not."""
    return array.at[rows].get(mode="clip")


def _pairs(first: Array, second: Array) -> Array:
    """The values of two entries per sequence."""
    return jnp.stack([first, second], axis=1).reshape(-1)


LAYOUTS = {"contiguous": Contiguous, "zigzag": Zigzag}
