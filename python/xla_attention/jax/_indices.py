"""Integer operands, such as lengths, page numbers and slots: cast to what the targets read, and never wrapped.

Without ``jax_enable_x64`` JAX keeps the lower 32 bits of NumPy's integers: a length of ``2**32 + 4`` would count as 4.
What comes from the host is therefore cast before JAX sees it. An argument of ``jax.jit`` is beyond reach: JAX has cut
it off before the function begins.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._call import Array


def index_operand(name: str, value: Any) -> Array:  # noqa: ANN401
    """An integer operand as i32; a value that does not fit becomes the nearest that does."""
    return _operand(name, value, keep=np.int32, above=np.iinfo(np.int32).max)


def slot_operand(name: str, value: Any) -> Array:  # noqa: ANN401
    """Slots of a cache, as i32 or, where JAX has 64 bits, i64; one that does not fit is outside of every cache.

    The nearest that fits could be a slot of a very large cache, so -1 stands for those above.
    """
    return _operand(name, value, keep=np.int64 if jax.config.jax_enable_x64 else np.int32, above=-1)


def _operand(name: str, value: Any, keep: type[np.signedinteger], above: int) -> Array:  # noqa: ANN401
    """`value` as i32, or as the type `keep` if i32 does not hold its type; `above` stands for what is above `keep`."""
    if hasattr(value, "__jax_array__") and not isinstance(value, jax.Array):
        value = value.__jax_array__()
    if isinstance(value, list | tuple) and any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
        return jnp.asarray(jax.tree.map(lambda leaf: _operand(name, leaf, keep, above), value))
    # An array that was made under another setting would be cut off by the next operation on the device.
    is_cut_off = not jax.config.jax_enable_x64 and getattr(value, "dtype", None) in (np.int64, np.uint64)
    if isinstance(value, jax.core.Tracer) or (isinstance(value, jax.Array) and not is_cut_off):
        return _cast(name, value, keep, above, jnp)
    return jnp.asarray(_cast(name, _host_integers(value), keep, above, np))


def _host_integers(value: Any) -> np.ndarray:  # noqa: ANN401
    """As NumPy has it, but that Python integers beyond 64 bits are the nearest of 64 bits and not floats or objects."""
    array = np.asarray(value)
    if isinstance(value, int | list | tuple) and array.dtype.kind in "Of":
        exact = np.asarray(value, object)
        if exact.size and all(isinstance(x, int | np.integer) for x in exact.flat):
            limits = np.iinfo(np.int64)
            return np.asarray(np.clip(exact, limits.min, limits.max), np.int64)
    return array


def _cast(name: str, array: Any, keep: type[np.signedinteger], above: int, numpy: Any) -> Any:  # noqa: ANN401
    """By `numpy`, which is NumPy on the host and jax.numpy on the device."""
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {array.dtype}, expected integers")
    held, narrow = jnp.iinfo(array.dtype), jnp.iinfo(np.int32)
    fits_narrow = held.min >= narrow.min and held.max <= narrow.max
    kind = np.int32 if fits_narrow else keep
    limits, fitted = jnp.iinfo(kind), array
    # Only the bounds that the type can pass: comparing an unsigned type with a negative bound would wrap.
    if held.min < limits.min:
        fitted = numpy.maximum(fitted, limits.min)
    if held.max > limits.max:
        fitted = numpy.minimum(fitted, limits.max)
    fitted = fitted.astype(kind)
    return numpy.where(array > limits.max, kind(above), fitted) if held.max > limits.max > above else fitted
