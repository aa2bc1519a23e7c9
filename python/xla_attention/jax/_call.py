"""The one place where a JAX function becomes a custom call: attribute types, the trace-time check, the call itself."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _library
from .._operators import operator

Array = jax.Array


def static_f32(name: str, value: float) -> np.float32:
    """A Python number as the f32 attribute ``name``; a traced value is a TypeError."""
    return np.float32(_static(name, value, "a number"))


def static_i64(name: str, value: int) -> np.int64:
    """A Python integer as the i64 attribute ``name``; a traced value, a bool or a float is a TypeError."""
    value = _static(name, value, "an integer")
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} is {value!r}, expected an integer")
    limits = np.iinfo(np.int64)
    if not limits.min <= int(value) <= limits.max:
        raise ValueError(f"{name} is {value}, which 64 bits do not hold")
    return np.int64(value)


def static_bool(name: str, value: bool) -> np.bool_:
    """A Python bool as the i1 attribute ``name``."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r}, expected True or False")
    return np.bool_(value)


_STATIC = {"bool": static_bool, "i64": static_i64, "f32": static_f32}


def static_attributes(target: str, **values: Any) -> dict[str, np.generic]:  # noqa: ANN401
    """The attributes of a target with their declared types; None is an option that is not used."""
    declared = operator(target).attributes
    given = {one.name: one.none if values[one.name] is None else values[one.name] for one in declared}
    return {one.name: _STATIC[one.kind](one.name, given[one.name]) for one in declared}


def _static(name: str, value: Any, what: str) -> Any:  # noqa: ANN401
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} is traced, expected {what} that is known when the program is compiled")
    if isinstance(value, jax.Array | np.ndarray):
        value = np.asarray(value)
        if value.ndim:
            raise TypeError(f"{name} has shape {list(value.shape)}, expected {what}")
        value = value.item()
    if not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} is {value!r}, expected {what}")
    return value


def scale_operand(scale: Array | float | None) -> Array | None:
    """A scale of q, K or V as ``f32[1]`` or ``f32[Hkv]``; a Python number is one value for all heads."""
    return None if scale is None else jnp.atleast_1d(jnp.asarray(scale, jnp.float32))


def custom_call(
    target: str,
    operands: Sequence[Array | None],
    results: Sequence[jax.ShapeDtypeStruct | None],
    attributes: Mapping[str, np.generic],
) -> list[Array]:
    """Check a call, then emit it.

    Parameters
    ----------
    target
        The custom call's target name.
    operands, results
        In the order of the target's signature; None for one that is left out. Those at the end are dropped, others
        become a buffer without an element. A result that updates an operand has its memory, if it is donated.
    attributes
        numpy scalars: JAX lowers a Python float as f64 and caches programs by Python equality, so each attribute has
        one fixed type.

    Raises
    ------
    ValueError, NotImplementedError
        With the text that the handler would give at run time.
    """
    shapes = [[None if t is None else (t.shape, t.dtype) for t in tensors] for tensors in (operands, results)]
    if all(isinstance(size, int) for tensors in shapes for t in tensors if t for size in t[0]):
        # Symbolic sizes (jax.export) are checked when the program runs.
        _library.check(target, *shapes, attributes)
    operands = [jnp.zeros((0,), jnp.float32) if x is None else x for x in _without_trailing_none(operands)]
    results = [jax.ShapeDtypeStruct((0,), jnp.uint8) if x is None else x for x in _without_trailing_none(results)]
    aliases = {operand: result for result, operand in operator(target).aliases.items()}
    call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases or None)
    found = call(*operands, **attributes)
    axes = manual_axes(operands)
    # Within shard_map, what is made of a device's own part is its own too; not every JAX concludes this by itself.
    return [_varying(x, axes) for x in found]


def manual_axes(arrays: Sequence[Array]) -> frozenset[str]:
    """The axes of a mesh along which some array is a part that differs from device to device: those of shard_map."""
    types = map(jax.typeof, arrays) if hasattr(jax, "typeof") else ()
    # JAX 0.7 to 0.9 keep them in the type itself.
    return frozenset().union(
        *(getattr(getattr(t, "manual_axis_type", None), "varying", None) or getattr(t, "vma", ()) for t in types)
    )


def alike_varying(operands: Any) -> Any:  # noqa: ANN401
    """Operands that all differ along the axes of shard_map along which one does: gradients then have their types.

    Of an operand that is the same on every device, JAX sums the devices' gradients up.
    """
    axes = manual_axes(jax.tree.leaves(operands))
    return jax.tree.map(lambda x: _varying(x, axes), operands)


def _varying(array: Array, axes: frozenset[str]) -> Array:
    """The same numbers, of which JAX is told that they differ along the axes."""
    unknown = tuple(sorted(axes - manual_axes([array])))
    if not unknown:
        return array
    return jax.lax.pcast(array, unknown, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(array, unknown)


def _without_trailing_none(values: Sequence[Any]) -> list[Any]:
    values = list(values)
    while values and values[-1] is None:
        values.pop()
    return values
