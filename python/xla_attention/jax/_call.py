"""Custom calls in JAX: typed attributes, the trace-time validation, and the call itself."""

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
    """A Python bool as the i1 attribute ``name``; anything else is a TypeError."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r}, expected True or False")
    return np.bool_(value)


_STATIC = {"bool": static_bool, "i64": static_i64, "f32": static_f32}


def static_attributes(target: str, **values: Any) -> dict[str, np.generic]:  # noqa: ANN401
    """The attributes of a target with their declared types; None stands for an option that is off."""
    declared = operator(target).attributes
    given = {x.name: x.none if values[x.name] is None else values[x.name] for x in declared}
    return {x.name: _STATIC[x.kind](x.name, given[x.name]) for x in declared}


def _static(name: str, value: Any, expected: str) -> Any:  # noqa: ANN401
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} is traced, expected {expected} that is known when the program is compiled")
    if isinstance(value, jax.Array | np.ndarray):
        value = np.asarray(value)
        if value.ndim:
            raise TypeError(f"{name} has shape {list(value.shape)}, expected {expected}")
        value = value.item()
    if not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} is {value!r}, expected {expected}")
    return value


def scale_operand(scale: Array | float | None) -> Array | None:
    """A scale of q, K or V as ``f32[1]`` or ``f32[Hkv]``; a Python number is one value that all heads share."""
    return None if scale is None else jnp.atleast_1d(jnp.asarray(scale, jnp.float32))


def scale_cache_operand(scales: Any) -> Array | None:  # noqa: ANN401
    """The scales of a cache's rows as they are; another dtype than f32 is the handler's error."""
    return None if scales is None else jnp.asarray(scales)


def custom_call(
    target: str,
    operands: Sequence[Array | None],
    results: Sequence[jax.ShapeDtypeStruct | None],
    attributes: Mapping[str, np.generic],
) -> list[Array]:
    """Validate a call and emit it.

    Parameters
    ----------
    target
        The custom call's target name.
    operands, results
        In the order of the target's signature; None for one that is left out. Trailing ones are dropped, others become
        a buffer without an element. A result that updates a donated operand takes over its memory.
    attributes
        numpy scalars: JAX lowers a Python float as f64 and caches programs by Python equality, so each attribute has
        one fixed type.

    Returns
    -------
    list of Array
        One per result, up to the last that is not None.

    Raises
    ------
    ValueError, NotImplementedError
        With the text that the handler would give at run time.
    """
    shapes = [[None if t is None else (t.shape, t.dtype) for t in tensors] for tensors in (operands, results)]
    if all(isinstance(size, int) for tensors in shapes for t in tensors if t for size in t[0]):
        # The handler validates symbolic sizes (jax.export) when the program runs.
        _library.check(target, *shapes, attributes)
    operands = [jnp.zeros((0,), jnp.float32) if x is None else x for x in _without_trailing_none(operands)]
    results = [jax.ShapeDtypeStruct((0,), jnp.uint8) if x is None else x for x in _without_trailing_none(results)]
    # An operand that is left out has no result either.
    aliases = {
        operand: result
        for result, operand in operator(target).aliases.items()
        if operand < len(operands) and result < len(results)
    }
    call = jax.ffi.ffi_call(target, results, input_output_aliases=aliases or None)
    # Within shard_map, results vary along the same mesh axes as the operands; not every JAX infers this.
    axes = manual_axes(operands)
    return [_pvary(x, axes) for x in call(*operands, **attributes)]


def manual_axes(arrays: Sequence[Array]) -> frozenset[str]:
    """The axes of an enclosing shard_map along which some array varies from device to device."""
    types = map(jax.typeof, arrays) if hasattr(jax, "typeof") else ()
    # JAX 0.7 to 0.9 keep them as `vma` of the type.
    return frozenset().union(
        *(getattr(getattr(t, "manual_axis_type", None), "varying", None) or getattr(t, "vma", ()) for t in types)
    )


def pvary_all(operands: Any) -> Any:  # noqa: ANN401
    """Mark all operands as varying along each shard_map axis along which one does, so that gradients have their types.

    JAX sums the devices' gradients of an operand that was replicated before.
    """
    axes = manual_axes(jax.tree.leaves(operands))
    return jax.tree.map(lambda x: _pvary(x, axes), operands)


def _pvary(array: Array, axes: frozenset[str]) -> Array:
    """The array with a type that varies along the axes; the values stay."""
    missing = tuple(sorted(axes - manual_axes([array])))
    if not missing:
        return array
    return jax.lax.pcast(array, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(array, missing)


def _without_trailing_none(values: Sequence[Any]) -> list[Any]:
    values = list(values)
    while values and values[-1] is None:
        values.pop()
    return values
