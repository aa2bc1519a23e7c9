"""The warning about operands that XLA gathers because the sharding rule of a call cannot follow their shardings."""

import contextlib
import functools
import os
import pathlib
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from .._operators import operator
from ._sharding_axes import Assignment, MeshAxes, ShardingRule


class GatherWarning(UserWarning):
    """XLA gathers operands of a call along a mesh axis, because the call cannot be sharded by that axis.

    JAX issues it while it compiles a program for a mesh. ``docs/sharding.md`` has the remedies.

    Examples
    --------
    Python's filters turn the warning into an error, which ends the compilation. In the environment of a program
    ``PYTHONWARNINGS=error:xla_attention`` does the same.

    >>> import warnings
    >>> from xla_attention.jax import GatherWarning
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", GatherWarning)
    ...     pass  # compile programs here
    """


class SourceLine:
    """The line of a program that makes a call. All are equal, so that no program is compiled twice because of them."""

    def __init__(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            frame = frame.f_back
        self.file, self.number = frame.f_code.co_filename, frame.f_lineno

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourceLine)

    def __hash__(self) -> int:
        return 0


# Files between a program's line and the call: this package, JAX, and the wrappers that both use.
_LIBRARIES = (
    *(f"{pathlib.Path(file).parent}{os.sep}" for file in (jax.__file__, pathlib.Path(__file__).parent)),
    contextlib.__file__,
    functools.__file__,
)
_issued: dict = {}  # by which Python's default filter issues a warning once per line of a program


def operand_names(target: str, operands: Sequence[Any]) -> tuple[str, ...]:
    """The name of each array in the tree of operands: that of its field, otherwise the target's."""

    def name(path: tuple) -> str:
        return path[-1].name if hasattr(path[-1], "name") else operator(target).operands[path[0].idx].name

    return tuple(name(path) for path, _ in jax.tree_util.tree_flatten_with_path(operands)[0])


def warn_of_gathers(
    line: SourceLine,
    target: str,
    names: Sequence[str],
    rule: ShardingRule,
    arguments: Sequence[jax.ShapeDtypeStruct],
    mesh_axes: Sequence[MeshAxes],
    assigned: Assignment,
) -> None:
    """Warn of the operands that are sharded by a mesh axis by which their shards in the call are not.

    Vectors and matrices, such as lengths and block tables, are small: XLA gathers them without a warning.

    Parameters
    ----------
    line
        Of the program that makes the call.
    target, names
        The custom call, and the names of its operands.
    rule
        Of the call.
    arguments, mesh_axes
        The operands, and the mesh axes that shard them.
    assigned
        The mesh axes that shard the call.
    """
    if rule.is_elementwise:
        return
    gathered, remedies = [], {}
    for name, dims, argument, axes in zip(names, rule.operands, arguments, mesh_axes, strict=True):
        kept = {axis for axes_of_dim in assigned.of(dims) for axis in axes_of_dim}
        for i, axes_of_dim in enumerate(axes):
            lost = [axis for axis in axes_of_dim if axis not in kept]
            if lost and len(dims) > 2:
                shape = ", ".join(map(str, argument.shape))
                by = " and ".join(map(repr, lost))
                gathered.append(f"{name} {argument.dtype}[{shape}], whose dimension {i} is sharded by mesh axis {by}")
                remedies[_remedy(dims[i], rule)] = None
    if gathered:
        text = " ".join([f"xla_attention: XLA gathers operands of {target}: {'; '.join(gathered)}.", *remedies])
        # JAX compiles in a thread of its own, which has no frame of the program.
        location = {"filename": line.file, "lineno": line.number, "registry": _issued}
        warnings.warn_explicit(f"{text} See docs/sharding.md.", GatherWarning, **location)


def warn_of_partial_shard_map(target: str, mesh: AbstractMesh | None, arrays: Sequence[jax.Array]) -> None:
    """Warn of a call within a shard_map over some axes of the mesh, as XLA gathers what the others shard.

    JAX knows the shardings along explicit axes alone; along automatic ones there may be nothing to gather.

    Parameters
    ----------
    target
        The custom call.
    mesh
        That of the shard_map, if it is known.
    arrays
        The operands.
    """
    if mesh is None:
        return
    explicit = {
        axis
        for x in arrays
        for dim in jax.typeof(x).sharding.spec
        for axis in (dim if isinstance(dim, tuple) else (dim,))
        if axis in mesh.explicit_axes
    }
    others = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1 and axis in explicit.union(mesh.auto_axes)]
    if others:
        line, manual = SourceLine(), ", ".join(map(repr, mesh.manual_axes))
        by = " or ".join(map(repr, others))
        text = (
            f"xla_attention: {target} is called within jax.shard_map over {manual} alone: XLA gathers operands that "
            f"are sharded by mesh axis {by}. Let jax.shard_map cover all axes. See docs/sharding.md."
        )
        warnings.warn_explicit(text, GatherWarning, filename=line.file, lineno=line.number, registry=_issued)


def _remedy(letter: str, rule: ShardingRule) -> str:
    in_pages = any("P" in dims for dims in rule.operands)
    if letter in "Hhc":
        if in_pages:
            return "Shard the cache by the mesh axes that shard the query heads, or down to one KV head per device."
        return "The number of devices that shard heads has to divide the KV heads, or be a multiple of them."
    what = "heads and the batch" if rule.free else "heads"
    text = f"Only {what} can be sharded; within jax.shard_map each device calls the function on its own shards."
    if letter in "ts" and not in_pages:
        text = f"{text} context_parallel_attention takes sequences that are spread over devices."
    return text
