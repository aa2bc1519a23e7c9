"""Sharding rules: how XLA partitions a call over the devices of a mesh.

A rule names each dimension of each operand and result by a letter, as einsum does. Dimensions with the same letter are
sharded alike, and every device makes the call on its shards:

    H   query heads; neighbouring ones share a KV head
    h   KV heads, each read by g = H / h query heads; sharded as H
    c   2 h heads of an interleaved cache, K and V side by side; sharded as H

and a call's own free letters, such as the batch, or the dimensions of an elementwise operator. A dimension with any
other letter, such as the tokens of a packed batch, is replicated.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ._call import Array, manual_axes

# One letter per dimension, or numbers where there are more dimensions than letters.
Dims = str | tuple[int, ...]
# The mesh axes that shard each dimension of an array.
MeshAxes = tuple[tuple[str, ...], ...]


class ShardingRule(NamedTuple):
    """The letters of every operand and result that the call has, and those of `free` dimensions."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    free: Dims = ""


class _Call(NamedTuple):
    """A call without its arrays."""

    static: Any
    treedef: jax.tree_util.PyTreeDef  # of the operands, whose leaves are the arrays
    rule: ShardingRule


def partitioned(function: Callable, make_rule: Callable[..., ShardingRule]) -> Callable:
    """Let XLA partition ``function(static, *operands)``, which returns a tuple of arrays.

    Parameters
    ----------
    function
        Each device calls it with the same hashable `static` and with its shards of the arrays. An operand is an array,
        None, or a tree of these.
    make_rule
        The sharding rule, from the same arguments.
    """

    def on_shards(call: _Call, *shards: Array) -> tuple[Array, ...]:
        return function(call.static, *call.treedef.unflatten(shards))

    def shardings(call: _Call, mesh: Mesh, arguments: Sequence[jax.ShapeDtypeStruct]) -> list[tuple]:
        mesh_axes = [_mesh_axes(x.sharding, len(x.shape), mesh) for x in arguments]
        assigned = _assign(mesh.shape, mesh_axes, [x.shape for x in arguments], call.rule)
        sides = call.rule.operands, call.rule.results
        return [tuple(NamedSharding(mesh, _spec(assigned, dims)) for dims in side) for side in sides]

    def partition(call: _Call, mesh: Mesh, arguments: Any, _results: Any) -> tuple:  # noqa: ANN401
        argument_shardings, result_shardings = shardings(call, mesh, arguments)
        return mesh, functools.partial(on_shards, call), result_shardings, argument_shardings

    def infer(call: _Call, mesh: Mesh, arguments: Any, _results: Any) -> tuple:  # noqa: ANN401
        return shardings(call, mesh, arguments)[1]

    def shardy_rule(call: _Call, _mesh: Mesh, operands: Sequence[Any], _results: Sequence[Any]) -> Any:  # noqa: ANN401
        return _shardy_rule(call.rule, operands)

    unpartitioned = custom_partitioning(on_shards, static_argnums=(0,))
    # Shardings arrive as XLA's, undecoded: JAX cannot decode one that shards by a part of a mesh axis, which Shardy
    # chooses where an axis is larger than the number of KV heads.
    options = {"sharding_rule": shardy_rule} if _has_shardy() else {}
    unpartitioned.def_partition(partition, infer, decode_shardings=False, **options)

    @functools.wraps(function)
    def wrapped(static: Any, *operands: Any) -> tuple[Array, ...]:  # noqa: ANN401
        arrays, treedef = jax.tree.flatten(operands)
        if manual_axes(arrays):
            # Within shard_map the arrays are shards already.
            return function(static, *operands)
        call = _Call(static, treedef, make_rule(static, *operands))
        return with_auto_axes(functools.partial(unpartitioned, call), arrays, call.rule)(*arrays)

    return wrapped


def drop_absent(dims: Sequence[Dims], operands: Sequence[Array | None]) -> tuple[Dims, ...]:
    """The dims of those operands that are not None."""
    return tuple(letters for letters, operand in zip(dims, operands, strict=True) if operand is not None)


def reshard_like(array: Array, like: Array) -> Array:
    """The array with the sharding of `like`, where types have shardings: on a mesh with explicit axes."""
    return jax.sharding.reshard(array, jax.typeof(like).sharding) if _explicit_mesh([like]) is not None else array


def _has_shardy() -> bool:
    """Whether this JAX accepts a rule in Shardy's form, which it needs where Shardy partitions."""
    return tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 7)


def with_auto_axes(function: Callable, arrays: Sequence[Array], rule: ShardingRule) -> Callable:
    """The function; where types have explicit mesh axes, with these left to XLA and with typed results."""
    mesh = _explicit_mesh(arrays)
    if mesh is None:
        return function
    specs = [tuple(jax.typeof(x).sharding.spec) for x in arrays]
    mesh_axes = [tuple(() if dim is None else (dim,) if isinstance(dim, str) else dim for dim in s) for s in specs]
    assigned = _assign(mesh.shape, mesh_axes, [x.shape for x in arrays], rule)
    out_sharding = tuple(_spec(assigned, dims) for dims in rule.results)
    call = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=out_sharding)

    def within_mesh(*arrays: Array) -> tuple[Array, ...]:
        with jax.sharding.use_abstract_mesh(mesh):  # the program may have set none
            return call(*arrays)

    return within_mesh


def _explicit_mesh(arrays: Sequence[Array]) -> Any:  # noqa: ANN401
    """The mesh in the arrays' types, if it has explicit axes. Before `auto_axes`, JAX had another kind of these."""
    if not hasattr(jax.sharding, "auto_axes"):
        return None
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def _mesh_axes(sharding: Sharding | None, rank: int, mesh: Mesh) -> MeshAxes:
    """The mesh axes that shard each dimension, major first, without axes of which only a part shards it."""
    if sharding is None:  # not known yet
        return ((),) * rank
    # XLA's sharding names devices, not axes. For a shape that it divides evenly, the first index of each device's shard
    # grows along exactly those mesh axes that shard the dimension.
    shards = sharding.devices_indices_map((mesh.size,) * rank)

    def axes_of(dimension: int) -> tuple[str, ...]:
        first = np.array([shards[device][dimension].start or 0 for device in mesh.devices.flat])
        first = first.reshape(mesh.devices.shape)
        strides = {
            name: steps.flat[0]
            for i, name in enumerate(mesh.axis_names)
            if (steps := np.diff(first, axis=i)).size and (steps > 0).all()
        }
        return tuple(sorted(strides, key=lambda name: -strides[name]))

    return tuple(map(axes_of, range(rank)))


def _assign(
    axis_sizes: Mapping[str, int], mesh_axes: Sequence[MeshAxes], shapes: Sequence[Sequence[int]], rule: ShardingRule
) -> dict:
    """The mesh axes that shard each letter.

    They are those of the first operand that is sharded along the letter, as far as they divide every dimension with it.
    Among heads, K and V come before the queries, because resharding a cache is the most expensive.
    """
    assigned, used = {}, set()
    for group in ("chH", *((letter,) for letter in rule.free)):
        candidates = [
            (letter, size, axes)
            for letter in group
            for dims, shape, axes_of_array in zip(rule.operands, shapes, mesh_axes, strict=True)
            for dim, size, axes in itertools.zip_longest(dims, shape, axes_of_array, fillvalue=())
            if dim == letter
        ]
        # The dimensions that have to be divided; K and V of a head stay together.
        sizes = [size // (2 if letter == "c" else 1) for letter, size, _ in candidates]
        chosen = ()
        for _, _, axes in candidates:
            chosen = tuple(itertools.takewhile(lambda name: name not in used, axes))
            while any(size % int(np.prod([axis_sizes[name] for name in chosen])) for size in sizes):
                chosen = chosen[:-1]
            if chosen:
                break
        used.update(chosen)
        assigned.update(dict.fromkeys(group, chosen))
    return assigned


def _spec(assigned: dict, dims: Dims) -> PartitionSpec:
    """The PartitionSpec of an array. One axis is not wrapped in a tuple: before 0.8, JAX distinguishes the two."""
    axes = (assigned.get(letter, ()) for letter in dims)
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in axes))


def _shardy_rule(rule: ShardingRule, operands: Sequence[Any]) -> Any:  # noqa: ANN401
    """The rule in Shardy's terms: a factor per letter, or a product (query heads: KV heads times heads per group)."""
    from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule

    sizes = {
        letter: value.shape[i]
        for dims, value in zip(rule.operands, operands, strict=True)
        for i, letter in enumerate(dims)
    }
    heads = sizes.get("h") or sizes.get("c", 0) // 2 or sizes.get("H", 1)
    group = sizes.get("H", heads) // heads
    factors = {letter: f"free{letter}" for letter in rule.free}
    if heads > 1:
        query_heads = CompoundFactor("h", "g") if group > 1 else "h"
        factors |= {"h": "h", "c": CompoundFactor("h", "pair"), "H": query_heads}
    # A replicated dimension is a factor that no other dimension has, so that nothing is propagated along it.
    counter = itertools.count()

    def mapping(dims: Dims) -> ArrayMapping:
        return ArrayMapping(*(factors.get(letter) or f"replicated{next(counter)}" for letter in dims))

    mappings = [tuple(map(mapping, side)) for side in (rule.operands, rule.results)]
    # Shardy needs the sizes of the factors that occur only in products, and of no others.
    dimensions = [dimension for side in mappings for array in side for dimension in array]
    single = {dimension for dimension in dimensions if isinstance(dimension, str)}
    factor_names = single.union(*(dimension for dimension in dimensions if not isinstance(dimension, str)))
    known = {"h": heads, "g": group, "pair": 2}
    return SdyShardingRule(*mappings, **{name: known[name] for name in factor_names - single})
