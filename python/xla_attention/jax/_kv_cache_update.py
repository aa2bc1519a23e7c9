"""kv_cache_update in JAX."""

import jax
import jax.numpy as jnp
import numpy as np

from ._call import Array, custom_call, index_operand, scale_operand

# The attribute kv_layout of a cache [num_pages, page_size, 2*Hkv, D].
_INTERLEAVED = np.int64(1)


def kv_cache_update(
    kv_cache: Array | tuple[Array, Array],
    key: Array,
    value: Array,
    slot_mapping: Array,
    *,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
) -> Array | tuple[Array, Array]:
    """Write the keys and values of new tokens into a paged cache.

    The cache is updated in place where it is donated (``jax.jit(..., donate_argnums=...)``) or an intermediate value;
    otherwise XLA copies it first.

    Parameters
    ----------
    kv_cache : Array or pair of Arrays
        ``[P, page_size, 2*Hkv, D]``, K of head h at index 2h and V at 2h+1; or K and V apart,
        ``[P, page_size, Hkv, D]`` and ``[P, page_size, Hkv, Dv]``. f16, bf16 or f32.
    key, value : Array
        ``[T, Hkv, D]``, ``[T, Hkv, Dv]``, of the cache's dtype.
    slot_mapping : Array
        ``[T]`` integers: token t goes to slot ``page * page_size + offset``. A slot outside the cache is skipped, so -1
        marks padding. Where two tokens have one slot, it may hold parts of both.
    k_scale, v_scale : Array or float, optional
        ``f32[1]`` or ``f32[Hkv]``: what is stored is the row divided by it.

    Returns
    -------
    Array or pair of Arrays
        The updated cache, in the form it was given.

    Raises
    ------
    ValueError
        Shapes or dtypes do not fit together; the text names the operand.
    NotImplementedError
        The cache is fp8.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from xla_attention.jax import kv_cache_update
    >>> cache = jnp.zeros((2, 4, 2, 8))
    >>> rows = jnp.ones((3, 1, 8))
    >>> cache = kv_cache_update(cache, rows, 2 * rows, jnp.array([0, 5, -1]))
    >>> cache[:, :, :, 0].sum(axis=1).tolist()
    [[1.0, 2.0], [1.0, 2.0]]
    """
    slots = index_operand("slot_mapping", slot_mapping, keep=("int32", "int64"))
    rows = (jnp.asarray(key), jnp.asarray(value), slots, scale_operand(k_scale), scale_operand(v_scale))
    if isinstance(kv_cache, tuple | list):
        k_cache, v_cache = kv_cache
        return _update_split(jnp.asarray(k_cache), jnp.asarray(v_cache), *rows)
    return _update(jnp.asarray(kv_cache), *rows)


@jax.jit
def _update(cache: Array, *rows: Array | None) -> Array:
    attributes = {"kv_layout": _INTERLEAVED}
    return custom_call("xla_gpu_kv_cache_update", [cache, *rows], [_like(cache)], attributes, aliases={0: 0})[0]


@jax.jit
def _update_split(k_cache: Array, v_cache: Array, *rows: Array | None) -> tuple[Array, Array]:
    operands, results = [k_cache, v_cache, *rows], [_like(k_cache), _like(v_cache)]
    k_out, v_out = custom_call("xla_gpu_kv_cache_update_split", operands, results, {}, aliases={0: 0, 1: 1})
    return k_out, v_out


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
