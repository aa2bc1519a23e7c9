"""Sharding rules: how XLA partitions a call over the devices of a mesh.

A rule names each dimension of each operand and result by a letter, as einsum does. Dimensions with the same letter are
sharded alike, and every device makes the call on its shards:

    H   query heads; neighbouring ones share a KV head
    h   KV heads, each read by g = H / h query heads; sharded as H, but by at most h devices
    c   2 h heads of an interleaved cache, K and V side by side; sharded as h

and a call's own free letters, such as the batch, or the dimensions of an elementwise operator. A dimension with any
other letter, such as the tokens of a packed batch, is replicated.

With more devices than KV heads, devices share a KV head, and each has some of its query heads. Such a device has that
KV head alone, or all of them if K and V are packed rows, of which it then passes one to the call.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from ._call import Array, manual_axes
from ._sharding_axes import Assignment, Dims, MeshAxes, ShardingRule, assign
from ._sharding_warning import SourceLine, operand_names, warn_of_gathers, warn_of_partial_shard_map

__all__ = ["ShardingRule", "drop_absent", "partitioned", "reshard_like", "with_auto_axes"]


class _Call(NamedTuple):
    """A call without its arrays."""

    static: Any
    treedef: jax.tree_util.PyTreeDef  # of the operands, whose leaves are the arrays
    rule: ShardingRule
    target: str
    names: tuple[str, ...]  # of the arrays
    line: SourceLine


def partitioned(
    target: str,
    function: Callable,
    make_rule: Callable[..., ShardingRule],
    with_f32_gradients: Callable[[Any], Any] = lambda static: static,
) -> Callable:
    """Let XLA partition ``function(static, *operands)``, which returns a tuple of arrays.

    Parameters
    ----------
    target
        The custom call that the function makes.
    function
        Each device calls it with the same hashable `static` and with its shards of the arrays. An operand is an array,
        None, or a tree of these.
    make_rule
        The sharding rule, from the same arguments.
    with_f32_gradients
        From `static` that of a call whose gradients are f32, for those that devices sum.
    """

    def on_shards(call: _Call, *shards: Array) -> tuple[Array, ...]:
        return function(call.static, *call.treedef.unflatten(shards))

    def shardings(call: _Call, mesh: Mesh, arguments: Sequence[jax.ShapeDtypeStruct]) -> tuple[Assignment, list[tuple]]:
        mesh_axes = [_mesh_axes(x.sharding, len(x.shape), mesh) for x in arguments]
        assigned = assign(mesh.shape, mesh_axes, [x.shape for x in arguments], call.rule)
        sides = call.rule.operands, call.rule.results
        return assigned, [tuple(NamedSharding(mesh, _spec(assigned, dims)) for dims in side) for side in sides]

    def local_call(call: _Call, axis_sizes: Mapping[str, int], assigned: Assignment) -> Callable:
        local = functools.partial(on_shards, call)
        if assigned.sharing:
            parts = math.prod(axis_sizes[name] for name in assigned.sharing)
            in_f32 = functools.partial(on_shards, call._replace(static=with_f32_gradients(call.static)))
            local = _with_one_kv_head(local, in_f32, call.rule, assigned.sharing, parts)
        return _with_sums(local, call.rule, assigned)

    def partition(call: _Call, mesh: Mesh, arguments: Any, _results: Any) -> tuple:  # noqa: ANN401
        mesh_axes = [_mesh_axes(x.sharding, len(x.shape), mesh) for x in arguments]
        assigned, (argument_shardings, result_shardings) = shardings(call, mesh, arguments)
        warn_of_gathers(call.line, call.target, call.names, call.rule, arguments, mesh_axes, assigned)
        return mesh, local_call(call, mesh.shape, assigned), result_shardings, argument_shardings

    def infer(call: _Call, mesh: Mesh, arguments: Any, _results: Any) -> tuple:  # noqa: ANN401
        return shardings(call, mesh, arguments)[1][1]

    def shardy_rule(call: _Call, mesh: Mesh, operands: Sequence[Any], _results: Sequence[Any]) -> Any:  # noqa: ANN401
        return _shardy_rule(call.rule, mesh, operands)

    unpartitioned = custom_partitioning(on_shards, static_argnums=(0,))
    # Shardings arrive as XLA's, undecoded: JAX cannot decode one that shards by a part of a mesh axis, which Shardy
    # chooses where an axis is larger than the number of KV heads.
    options = {"sharding_rule": shardy_rule} if _has_shardy() else {}
    unpartitioned.def_partition(partition, infer, decode_shardings=False, **options)

    @functools.wraps(function)
    def wrapped(static: Any, *operands: Any) -> tuple[Array, ...]:  # noqa: ANN401
        arrays, treedef = jax.tree.flatten(operands)
        if manual_axes(arrays) or _manual_mesh() is not None:
            # Within shard_map the arrays are shards already.
            warn_of_partial_shard_map(target, _manual_mesh(), arrays)
            return function(static, *operands)
        names = operand_names(target, operands)
        call = _Call(static, treedef, make_rule(static, *operands), target, names, SourceLine())
        mesh = _explicit_mesh(arrays)
        if mesh is not None and not mesh.auto_axes:
            # The types have all shardings. jax.export cannot serialize a rule that waits for the partitioner.
            mesh_axes = _typed_mesh_axes(arrays)
            assigned = assign(mesh.shape, mesh_axes, [x.shape for x in arrays], call.rule)
            warn_of_gathers(call.line, target, names, call.rule, arrays, mesh_axes, assigned)
            in_specs, out_specs = (tuple(_spec(assigned, x) for x in side) for side in call.rule[:2])
            local = local_call(call, mesh.shape, assigned)
            shardings_in = [NamedSharding(mesh, spec) for spec in in_specs]
            # XLA of JAX 0.11 ends the process on an operand of shard_map without elements, so devices make their own.
            local, is_passed = _with_empty_shards(local, arrays, shardings_in)
            arrays = [
                jax.sharding.reshard(x, y)
                for x, y in itertools.compress(zip(arrays, shardings_in, strict=True), is_passed)
            ]
            in_specs = tuple(itertools.compress(in_specs, is_passed))
            options = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
            return jax.shard_map(local, **options)(*arrays)
        return with_auto_axes(functools.partial(unpartitioned, call), arrays, call.rule)(*arrays)

    return wrapped


def _with_empty_shards(
    local: Callable, arrays: Sequence[Array], shardings: Sequence[NamedSharding]
) -> tuple[Callable, list[bool]]:
    """`local` without its arguments that have no elements, and which arguments are left."""
    is_passed = [x.size > 0 for x in arrays]
    shards = [(y.shard_shape(x.shape), x.dtype) for x, y in zip(arrays, shardings, strict=True)]

    def complete(*passed: Array) -> Any:  # noqa: ANN401
        rest = iter(passed)
        pairs = zip(is_passed, shards, strict=True)
        return local(*(next(rest) if given else jnp.zeros(*shard) for given, shard in pairs))

    return complete, is_passed


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
    assigned = assign(mesh.shape, _typed_mesh_axes(arrays), [x.shape for x in arrays], rule)
    out_sharding = tuple(_spec(assigned, dims) for dims in rule.results)
    call = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=out_sharding)

    # The program may have set no mesh. JAX 0.7.0 lacks the function and asks for `jax.sharding.use_mesh` then.
    use_mesh = getattr(jax.sharding, "use_abstract_mesh", contextlib.nullcontext)

    def within_mesh(*arrays: Array) -> tuple[Array, ...]:
        with use_mesh(mesh):
            return call(*arrays)

    return within_mesh


def _manual_mesh() -> AbstractMesh | None:
    """The mesh of an enclosing shard_map; None outside of one, and before JAX 0.7."""
    if not _has_shardy():
        return None
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.manual_axes else None


def _explicit_mesh(arrays: Sequence[Array]) -> Any:  # noqa: ANN401
    """The mesh in the arrays' types, if it has explicit axes. Before `auto_axes`, JAX had another kind of these."""
    if not hasattr(jax.sharding, "auto_axes"):
        return None
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def _typed_mesh_axes(arrays: Sequence[Array]) -> list[MeshAxes]:
    """The explicit mesh axes in the arrays' types."""
    specs = (jax.typeof(x).sharding.spec for x in arrays)
    return [tuple(() if dim is None else (dim,) if isinstance(dim, str) else dim for dim in spec) for spec in specs]


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


def _spec(assigned: Assignment, dims: Dims) -> PartitionSpec:
    """The PartitionSpec of an array. One axis is not wrapped in a tuple: before 0.8, JAX distinguishes the two."""
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in assigned.of(dims)))


def _with_sums(local_call: Callable, rule: ShardingRule, assigned: Assignment) -> Callable:
    """The call with those results summed over devices that are sums over dimensions (`ShardingRule.summed`)."""
    letters = (*rule.free, "H")
    axes = [
        tuple(axis for letter in letters if letter not in dims for axis in assigned.axes.get(letter, ()))
        if i in rule.summed
        else ()
        for i, dims in enumerate(rule.results)
    ]
    if not any(axes):
        return local_call

    def call(*shards: Array) -> tuple[Array, ...]:
        return tuple(jax.lax.psum(x, of) if of else x for x, of in zip(local_call(*shards), axes, strict=True))

    return call


def _with_one_kv_head(
    local_call: Callable, in_f32: Callable, rule: ShardingRule, axes: tuple[str, ...], parts: int
) -> Callable:
    """The call of a device whose query heads read one of its KV heads.

    Parameters
    ----------
    local_call, in_f32
        From shards to shards; with gradients in f32.
    rule
        Of the call.
    axes, parts
        The mesh axes that shard query heads alone, and the number of devices along them.
    """
    dims_of_heads = [dims.index("h") if "h" in dims else None for dims in rule.operands]
    in_pages = any("P" in dims for dims in rule.operands)

    def call(*shards: Array) -> tuple[Array, ...]:
        heads = max((x.shape[dim] for x, dim in zip(shards, dims_of_heads, strict=True) if dim is not None), default=1)
        if heads > 1:
            head = jax.lax.axis_index(axes) // (parts // heads)
            shards = tuple(
                x if dim is None else jax.lax.dynamic_slice_in_dim(x, head, 1, dim)
                for x, dim in zip(shards, dims_of_heads, strict=True)
            )
        if in_pages or not any("h" in dims for dims in rule.results):
            # Each device has the results of its query heads; in a cache all devices write the same.
            return local_call(*shards)

        def gradient(result: Array, dims: str, dtype: np.dtype) -> Array:
            """Of K or V: the sum over the devices, each of which has the share of its query heads in one KV head."""
            if "h" in dims:
                dim = dims.index("h")
                if heads > 1:
                    zeros = jnp.zeros_like(result, shape=(*result.shape[:dim], heads, *result.shape[dim + 1 :]))
                    result = jax.lax.dynamic_update_slice_in_dim(zeros, result, head, dim)
                result = jax.lax.psum(result, axes)
            return result.astype(dtype)

        dtypes = [x.dtype for x in jax.eval_shape(local_call, *shards)]
        return tuple(map(gradient, in_f32(*shards), rule.results, dtypes))

    return call


def _shardy_rule(rule: ShardingRule, mesh: Mesh, operands: Sequence[Any]) -> Any:  # noqa: ANN401
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
    if any(heads % size == 0 for size in mesh.shape.values() if size > 1):
        query_heads = CompoundFactor("h", "g") if group > 1 else "h"
        factors |= {"h": "h", "c": CompoundFactor("h", "pair"), "H": query_heads}
    else:
        # No mesh axis can shard KV heads; Shardy would do it by a part of one.
        factors["H"] = "H"
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
