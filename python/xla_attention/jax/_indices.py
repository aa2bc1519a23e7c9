"""Integer operands, such as lengths, page numbers and slots: cast to what the targets read, with saturation.

Without ``jax_enable_x64`` JAX truncates NumPy's integers to 32 bits: a length of ``2**32 + 4`` would count as 4. Host
integers are therefore cast before JAX sees them. This cannot help an argument of ``jax.jit``, which JAX truncates
before the function is called.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._call import Array


def index_operand(name: str, value: Any) -> Array:  # noqa: ANN401
    """An integer operand as i32, saturated."""
    return _operand(name, value, keep=np.int32, above=np.iinfo(np.int32).max)


def optional_index_operand(name: str, value: Any) -> Array | None:  # noqa: ANN401
    """`index_operand` of an operand that may be None."""
    return None if value is None else index_operand(name, value)


def slot_operand(name: str, value: Any) -> Array:  # noqa: ANN401
    """Slots of a cache, as i32, or as i64 under ``jax_enable_x64``; one that is too large becomes -1.

    It is not saturated, since the largest i32 may be a slot of a very large cache.
    """
    return _operand(name, value, keep=np.int64 if jax.config.jax_enable_x64 else np.int32, above=-1)


def _operand(name: str, value: Any, keep: type[np.signedinteger], above: int) -> Array:  # noqa: ANN401
    """`value` as i32, or as `keep` where i32 cannot hold its dtype; `above` replaces values too large for `keep`."""
    if hasattr(value, "__jax_array__") and not isinstance(value, jax.Array):
        value = value.__jax_array__()
    if isinstance(value, list | tuple) and any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
        return jnp.asarray(jax.tree.map(lambda leaf: _operand(name, leaf, keep, above), value))
    # A 64-bit array that was made under `jax_enable_x64`: without it, the next operation would truncate the array.
    is_truncated = not jax.config.jax_enable_x64 and getattr(value, "dtype", None) in (np.int64, np.uint64)
    if isinstance(value, jax.core.Tracer) or (isinstance(value, jax.Array) and not is_truncated):
        return _cast(name, value, keep, above, jnp)
    return jnp.asarray(_cast(name, _host_integers(value), keep, above, np))


def _host_integers(value: Any) -> np.ndarray:  # noqa: ANN401
    """`value` as a NumPy array, with Python integers saturated to 64 bits, which NumPy makes floats or objects."""
    array = np.asarray(value)
    if isinstance(value, int | list | tuple) and array.dtype.kind in "Of":
        exact = np.asarray(value, object)
        if exact.size and all(isinstance(x, int | np.integer) for x in exact.flat):
            limits = np.iinfo(np.int64)
            return np.asarray(np.clip(exact, limits.min, limits.max), np.int64)
    return array


def _cast(name: str, array: Any, keep: type[np.signedinteger], above: int, numpy: Any) -> Any:  # noqa: ANN401
    """The array as i32 or `keep`, computed by `numpy`: NumPy for host arrays, jax.numpy for device arrays."""
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {array.dtype}, expected integers")
    source, i32 = jnp.iinfo(array.dtype), jnp.iinfo(np.int32)
    dtype = np.int32 if source.min >= i32.min and source.max <= i32.max else keep
    target, cast = jnp.iinfo(dtype), array
    # Only the bounds that the dtype can exceed: comparing an unsigned dtype with a negative bound would wrap.
    if source.min < target.min:
        cast = numpy.maximum(cast, target.min)
    if source.max > target.max:
        cast = numpy.minimum(cast, target.max)
    cast = cast.astype(dtype)
    return numpy.where(array > target.max, dtype(above), cast) if source.max > target.max > above else cast
