"""Which rows of a packed stream each device of a context-parallel axis holds, and which keys these rows attend to.

A stream of T rows holds B sequences, and rows of no sequence at either end. Each of the n devices of the axis holds T/n
rows; its rank is its index along the axis. A layout answers three questions by starts and lengths of sequences, which
may depend on the rank, so that every device runs the same program:

    own      this device's rows beside its own keys
    visiting this device's rows beside the keys of another device
    gathered this device's rows beside the keys of the whole stream

Causal attention of equally packed queries and keys needs no offsets for this. In both layouts, every key that a device
holds is visible to all rows of a part of another device's sequence or to none of them, and a key that is not visible is
outside of the starts and lengths. Rows beside their own keys are causal from the first to the last.
"""

from typing import NamedTuple, Protocol

import jax.numpy as jnp

from ._call import Array
from ._zigzag_order import device_rows, stream_rows


class Ranges(NamedTuple):
    """Rows and keys of each sequence in one call. A sequence of the stream is one entry, or several in a row."""

    cu_seqlens_q: Array
    cu_seqlens_k: Array
    seqused_q: Array | None = None
    seqused_k: Array | None = None
    entries: int = 1  # per sequence


class Stream(NamedTuple):
    """A packed stream over the devices of an axis, as the device `rank` sees it."""

    cu_seqlens: Array  # i32[B + 1], ascending, at most T
    seqused: Array | None  # i32[B], at most the lengths; None if every row is used
    num_devices: int
    rows: int  # on each device: T/n
    rank: Array  # i32[]

    @property
    def used(self) -> Array:
        """The used rows of each sequence."""
        return jnp.diff(self.cu_seqlens) if self.seqused is None else self.seqused


class Layout(Protocol):
    """A layout of a stream."""

    stream: Stream

    def own(self) -> Ranges:
        """The device's rows beside its own keys: causal if the attention is."""

    def visiting(self, source: Array, causal: bool) -> Ranges:
        """The device's rows beside the keys of the device `source`, another one: never causal."""

    def gathered(self, causal: bool) -> list[Ranges]:
        """The device's rows beside all keys in the order of the stream: causal if the attention is.

        With more than one, each row of a sequence is in use in one of them.
        """

    def in_stream_order(self, rows: Array) -> Array:
        """Rows ``[T, ...]`` of all devices in the order of the stream."""

    def in_device_order(self, rows: Array) -> Array:
        """The inverse of `in_stream_order`."""

    def longest(self, max_seqlen: int) -> int:
        """The rows that a sequence of `max_seqlen` rows has on one device at most."""


class Contiguous:
    """Device r holds the rows from r T/n to (r + 1) T/n of the stream, in the middle of a sequence or not.

    At most one sequence has rows on two given devices, and all its rows on the earlier one precede those on the later.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def _part(self, rank: Array) -> tuple[Array, Array | None]:
        """The starts and the used rows of each sequence on a device."""
        stream = self.stream
        starts = self.part_of(stream.cu_seqlens, rank)
        if stream.seqused is None:
            return starts, None
        ends = self.part_of(stream.cu_seqlens[:-1] + stream.seqused, rank)
        return starts, jnp.maximum(ends - starts[:-1], 0)

    def part_of(self, rows: Array, rank: Array) -> Array:
        """Row numbers of the stream as row numbers of a device, those outside of it as its nearer end."""
        return jnp.clip(rows - rank * self.stream.rows, 0, self.stream.rows)

    def own(self) -> Ranges:
        """See `Layout`."""
        starts, used = self._part(self.stream.rank)
        return Ranges(starts, starts, used, used)

    def visiting(self, source: Array, causal: bool) -> Ranges:
        """See `Layout`."""
        (starts_q, used_q), (starts_k, used_k) = map(self._part, (self.stream.rank, source))
        if causal:
            starts_k = jnp.where(source < self.stream.rank, starts_k, 0)
        return Ranges(starts_q, starts_k, used_q, used_k)

    def gathered(self, causal: bool) -> list[Ranges]:
        """See `Layout`."""
        stream = self.stream
        starts, used = self._part(stream.rank)
        keys = stream.seqused
        if causal:
            # The last query stands at the last key.
            end = (stream.rank + 1) * stream.rows
            keys = jnp.clip(end - stream.cu_seqlens[:-1], 0, stream.used)
        return [Ranges(starts, stream.cu_seqlens, used, keys)]

    def in_stream_order(self, rows: Array) -> Array:
        """See `Layout`."""
        return rows

    def in_device_order(self, rows: Array) -> Array:
        """See `Layout`."""
        return rows

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

    def _used(self, rank: Array) -> tuple[Array, Array]:
        """The used rows of each sequence in the first and in the second chunk of a device."""
        chunks = rank, 2 * self.stream.num_devices - 1 - rank
        first, second = (jnp.clip(self.stream.used - chunk * self._chunk, 0, self._chunk) for chunk in chunks)
        return first, second

    def _two_entries(self, second: Array) -> Array:
        """The starts of two entries per sequence, of which the second one begins at `second`."""
        pairs = jnp.stack([self._starts[:-1], second], axis=1)
        return jnp.append(pairs.reshape(-1), self._starts[-1])

    def own(self) -> Ranges:
        """See `Layout`."""
        used = None if self.stream.seqused is None else sum(self._used(self.stream.rank))
        return Ranges(self._starts, self._starts, used, used)

    def visiting(self, source: Array, causal: bool) -> Ranges:
        """See `Layout`."""
        rank, has_padding = self.stream.rank, self.stream.seqused is not None
        used_q, used_k = self._used(rank), self._used(source)
        if not causal:
            used = (sum(used_q), sum(used_k)) if has_padding else (None, None)
            return Ranges(self._starts, self._starts, *used)
        # Keys of an earlier device: all rows attend to its first chunk, in the first entry of a sequence. Keys of a
        # later one: the rows of the second chunk attend to all of them, in the second entry.
        is_earlier = source < rank
        starts, ends = self._starts[:-1], self._starts[1:]
        middle = starts + self._chunk
        cu_seqlens_q = self._two_entries(jnp.where(is_earlier, ends, middle))
        cu_seqlens_k = self._two_entries(jnp.where(is_earlier, middle, starts))
        if not has_padding:
            return Ranges(cu_seqlens_q, cu_seqlens_k, entries=2)
        zero = jnp.zeros_like(used_q[0])
        seqused_q = _pairs(jnp.where(is_earlier, sum(used_q), zero), jnp.where(is_earlier, zero, used_q[1]))
        seqused_k = _pairs(jnp.where(is_earlier, used_k[0], zero), jnp.where(is_earlier, zero, sum(used_k)))
        return Ranges(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, entries=2)

    def gathered(self, causal: bool) -> list[Ranges]:
        """See `Layout`."""
        # A call per chunk, because the chunks of a device attend to the same keys, which two entries of one call
        # cannot have. In each call the rows of the other chunk are unused.
        stream = self.stream
        starts, ends, middle = stream.cu_seqlens[:-1], stream.cu_seqlens[1:], self._starts[:-1] + self._chunk
        chunks = stream.rank, 2 * stream.num_devices - 1 - stream.rank
        zero = jnp.zeros_like(self._chunk)
        calls = []
        for half, (chunk, used_q) in enumerate(zip(chunks, self._used(stream.rank), strict=True)):
            used_k = jnp.minimum((chunk + 1) * self._chunk, stream.used) if causal else stream.used
            cu_seqlens_k = jnp.append(_pairs(starts, starts if half else ends), stream.cu_seqlens[-1])
            pairs = ((zero, used_q), (zero, used_k)) if half else ((used_q, zero), (used_k, zero))
            calls.append(Ranges(self._two_entries(middle), cu_seqlens_k, *(_pairs(*x) for x in pairs), entries=2))
        return calls

    def in_stream_order(self, rows: Array) -> Array:
        """See `Layout`."""
        return rows[device_rows(self.stream.cu_seqlens, rows.shape[0], self.stream.num_devices, jnp)]

    def in_device_order(self, rows: Array) -> Array:
        """See `Layout`."""
        return rows[stream_rows(self.stream.cu_seqlens, rows.shape[0], self.stream.num_devices, jnp)]

    def longest(self, max_seqlen: int) -> int:
        """See `Layout`."""
        return -(-max_seqlen // self.stream.num_devices)


def _pairs(first: Array, second: Array) -> Array:
    """The values of two entries per sequence."""
    return jnp.stack([first, second], axis=1).reshape(-1)


LAYOUTS = {"contiguous": Contiguous, "zigzag": Zigzag}
