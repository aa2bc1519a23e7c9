"""Which mesh axes shard each letter of a sharding rule, from the shardings of a call's operands."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# One letter per dimension, or numbers where there are more dimensions than letters.
Dims = str | tuple[int, ...]
# The mesh axes that shard each dimension of an array, major first.
MeshAxes = tuple[tuple[str, ...], ...]


class ShardingRule(NamedTuple):
    """The letters of every operand and result that the call has, and those of `free` dimensions."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    free: Dims = ""
    # Indices of results that are sums over the free dimensions and the heads, without those of their own dims: the
    # gradients of the sinks and of a bias.
    summed: tuple[int, ...] = ()

    @property
    def is_elementwise(self) -> bool:
        """Whether every dimension but the heads is free."""
        return all(letter in self.free or letter == "H" for dims in self.operands for letter in dims)


class Assignment(NamedTuple):
    """The mesh axes of each letter, and those along which neighbouring devices share a KV head."""

    axes: dict[str | int, tuple[str, ...]]
    # They shard H, but neither h nor c. A device may have several KV heads; its query heads then read one of them.
    sharing: tuple[str, ...] = ()

    def of(self, dims: Dims) -> MeshAxes:
        """The mesh axes of each dimension."""
        return tuple(self.axes.get(letter, ()) for letter in dims)


def assign(
    axis_sizes: Mapping[str, int], mesh_axes: Sequence[MeshAxes], shapes: Sequence[Sequence[int]], rule: ShardingRule
) -> Assignment:
    """The mesh axes that shard each letter.

    They are those of the first operand that is sharded along the letter, as far as they divide every dimension with it.
    Among heads, K and V come before the queries, because resharding a cache is the most expensive. Then follow those of
    the queries, as far as each device's query heads read one KV head.

    Parameters
    ----------
    axis_sizes
        Of the mesh.
    mesh_axes, shapes
        Of the operands.
    rule
        Of the call.
    """

    def candidates(letters: str | Sequence[int]) -> list[tuple[int, tuple[str, ...], Dims]]:
        """The size of each dimension with one of the letters, its mesh axes, and the dims of its operand."""
        return [
            (size // (2 if letter == "c" else 1), axes, dims)  # K and V of a head stay together
            for letter in letters
            for dims, shape, axes_of_array in zip(rule.operands, shapes, mesh_axes, strict=True)
            for dim, size, axes in itertools.zip_longest(dims, shape, axes_of_array, fillvalue=())
            if dim == letter
        ]

    def first_fitting(found: Sequence[tuple], sizes: Sequence[int]) -> tuple[str, ...]:
        for _, axes, _ in found:
            unused = itertools.takewhile(lambda name: name not in used, axes)
            if chosen := _dividing(axis_sizes, tuple(unused), sizes):
                return chosen
        return ()

    assigned: dict[str | int, tuple[str, ...]] = {}
    used: set[str] = set()
    sharing: tuple[str, ...] = ()
    # Vectors, as sinks and scales, do not decide: a parameter that is sharded for storage alone would take the axis
    # from the batch.
    heads = [candidate for candidate in candidates("chH") if len(candidate[2]) > 2]
    if heads:
        head_sizes = [size for size, _, _ in candidates("chH")]
        chosen = first_fitting(heads, head_sizes)
        kv_sizes = [size for size, _, _ in candidates("ch")]
        if kv_sizes:
            query_heads = [candidate for candidate in candidates("H") if len(candidate[2]) > 2]
            in_pages = any("P" in dims for dims in rule.operands)
            chosen, sharing = _with_query_axes(axis_sizes, chosen, query_heads, kv_sizes[0], in_pages)
        assigned = {"H": chosen + sharing, "h": chosen, "c": chosen}
        used.update(chosen, sharing)
    for letter in rule.free:
        if letter not in assigned:
            found = candidates([letter])
            assigned[letter] = first_fitting(found, [size for size, _, _ in found])
            used.update(assigned[letter])
    return Assignment(assigned, sharing)


def _dividing(axis_sizes: Mapping[str, int], axes: tuple[str, ...], sizes: Sequence[int]) -> tuple[str, ...]:
    """The first axes, as many as divide every size."""
    while any(size % _parts(axis_sizes, axes) for size in sizes):
        axes = axes[:-1]
    return axes


def _parts(axis_sizes: Mapping[str, int], axes: Sequence[str]) -> int:
    return math.prod(axis_sizes[name] for name in axes)


def _with_query_axes(
    axis_sizes: Mapping[str, int],
    axes: tuple[str, ...],
    query_heads: Sequence[tuple],
    kv_heads: int,
    in_pages: bool,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of KV heads, and those that shard the query heads further.

    Parameters
    ----------
    axis_sizes
        Of the mesh.
    axes
        Axes that divide the KV heads.
    query_heads
        Size, mesh axes and dims of each dimension of query heads.
    kv_heads
        Hkv.
    in_pages
        Whether K and V are in pages, of which a device cannot read one head without a copy of the cache.
    """
    for size, query_axes, _ in query_heads:
        further = tuple(name for name in query_axes if name not in axes)
        if not in_pages:
            more = _dividing(axis_sizes, axes + further, [kv_heads])[len(axes) :]
            axes, further = axes + more, further[len(more) :]
        local = kv_heads // _parts(axis_sizes, axes)  # KV heads of a device
        while further:
            is_divided = size % _parts(axis_sizes, axes + further) == 0
            if is_divided and (local == 1 if in_pages else _parts(axis_sizes, further) % local == 0):
                return axes, further
            further = further[:-1]
    return axes, ()
