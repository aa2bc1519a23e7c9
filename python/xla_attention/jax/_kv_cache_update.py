"""kv_cache_update in JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .._documentation import documented
from .._options import kv_layout_number, refuse_layout_of_two
from ._call import Array, custom_call, scale_operand
from ._fold import unfolded, with_vmap
from ._fold_pages import folded_cache, folded_rows, folded_slots, layout_of_written, sides_of
from ._indices import slot_operand
from ._no_gradient import without_gradient
from ._partition import Letters, partitioned, present
from ._words import PAGES, of_scale

_without_gradient = functools.partial(
    without_gradient, "kv_cache_update", "kv_cache.at[page, offset].set(rows) has a gradient"
)


@documented("xla_gpu_kv_cache_update")
def kv_cache_update(
    kv_cache: Array | tuple[Array, Array],
    key: Array,
    value: Array,
    slot_mapping: Array,
    *,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    kv_layout: str | None = None,
) -> Array | tuple[Array, Array]:
    """Write the keys and values of new tokens into a paged cache.

    The cache is updated in place where it is donated (``jax.jit(..., donate_argnums=...)``) or an intermediate value;
    otherwise XLA copies it first.

    Parameters
    ----------
    kv_cache : Array or pair of Arrays
        K and V in one buffer, see `kv_layout`; or K and V apart, ``[P, page_size, Hkv, D]`` and
        ``[P, page_size, Hkv, Dv]``. Of the dtype of `key`, or ``float8_e4m3fn`` or ``float8_e5m2``.
    key, value : Array
        ``[T, Hkv, D]``, ``[T, Hkv, Dv]``, f16, bf16 or f32; D and Dv multiples of 8 up to 256.
    slot_mapping : Array
        ... As an argument of ``jax.jit``, NumPy's int64 is cut to its lower half by JAX itself, unless
        ``jax_enable_x64`` is on: pass int32 there.
    k_scale : Array or float, optional
        ... The attention functions multiply by the scale of the same name.
    v_scale : Array or float, optional
        ... The attention functions multiply by the scale of the same name.
    kv_layout : str, optional
        Of a cache in one buffer: ``"interleaved"`` (the default), ``[P, page_size, 2*Hkv, D]`` with K of head h at
        index 2h and V at 2h+1; ``"stacked"``, ``[2, P, page_size, Hkv, D]``; ``"per_page"``,
        ``[P, 2, page_size, Hkv, D]``.

    Returns
    -------
    Array or pair of Arrays
        The updated cache, in the form it was given.

    Raises
    ------
    ValueError
        Shapes or dtypes do not fit together; the text names the operand.
    NotImplementedError
        A head dimension that is not built.

    Notes
    -----
    Numbers round to nearest even. An fp8 cache saturates: what is larger than its largest finite number (448 or 57344)
    becomes that number, infinities too; NaN stays NaN.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from xla_attention.jax import kv_cache_update
    >>> cache = jnp.zeros((2, 4, 2, 8))
    >>> rows = jnp.ones((3, 1, 8))
    >>> cache = kv_cache_update(cache, rows, 2 * rows, jnp.array([0, 5, -1]))
    >>> cache[:, :, :, 0].sum(axis=1).tolist()
    [[1.0, 2.0], [1.0, 2.0]]

    The same into 8 bits, with one scale for K and one a head for V:

    >>> cache = jnp.zeros((2, 4, 2, 8), jnp.float8_e4m3fn)
    >>> cache = kv_cache_update(cache, rows, 2 * rows, jnp.array([0, 5, -1]), k_scale=0.25, v_scale=jnp.array([0.5]))
    >>> cache[:, :, :, 0].astype(float).sum(axis=1).tolist()
    [[4.0, 4.0], [4.0, 4.0]]
    """
    slots = slot_operand("slot_mapping", slot_mapping)
    rows = (jnp.asarray(key), jnp.asarray(value), slots, scale_operand(k_scale), scale_operand(v_scale))
    if isinstance(kv_cache, tuple | list):
        refuse_layout_of_two(kv_layout)
        k_cache, v_cache = kv_cache
        return _update_split(jnp.asarray(k_cache), jnp.asarray(v_cache), *rows)
    return _update(kv_layout_number(kv_layout or "interleaved"), jnp.asarray(kv_cache), *rows)


@functools.partial(jax.jit, static_argnums=0)
@_without_gradient(num_static=1)
def _update(kv_layout: np.int64, *operands: Array | None) -> Array:
    return _updated(kv_layout, *operands)[0]


@jax.jit
@_without_gradient()
def _update_split(*operands: Array | None) -> tuple[Array, Array]:
    return _updated_split(None, *operands)


def _run(kv_layout: np.int64, cache: Array, *rows: Array | None) -> tuple[Array]:
    return tuple(custom_call("xla_gpu_kv_cache_update", [cache, *rows], [_like(cache)], {"kv_layout": kv_layout}))


def _run_split(_: None, k_cache: Array, v_cache: Array, *rows: Array | None) -> tuple[Array, Array]:
    operands, results = [k_cache, v_cache, *rows], [_like(k_cache), _like(v_cache)]
    return tuple(custom_call("xla_gpu_kv_cache_update_split", operands, results, {}))


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _letters(kv_layout: np.int64, *operands: Array | None) -> Letters:
    cache = PAGES[kv_layout]
    return Letters(present((cache, "thd", "thd", ".", *map(of_scale, operands[4:])), operands), (cache,))


def _letters_split(_: None, *operands: Array | None) -> Letters:
    caches = ("Pshd", "Pshe")
    return Letters(present((*caches, "thd", "the", ".", *map(of_scale, operands[5:])), operands), caches)


def _folded(kv_layout: np.int64, size: int, which: list[bool], operands: tuple[Array | None, ...]) -> tuple | None:
    cache, key, value, slots, *scales = operands
    slots = folded_slots(size, (which[3], which[0]), slots, cache, sides=sides_of(kv_layout))
    if slots is None or any(which[4:]):
        return None
    rows = folded_rows(size, which[1:3], (key, value))
    together = folded_cache(size, which[0], cache, kv_layout), *rows, slots, *scales
    return layout_of_written(kv_layout), together, lambda found: (found.reshape(size, *cache.shape[int(which[0]) :]),)


def _folded_split(_: None, size: int, which: list[bool], operands: tuple[Array | None, ...]) -> tuple | None:
    k_cache, v_cache, key, value, slots, *scales = operands
    slots = folded_slots(size, (which[4], which[0]), slots, k_cache)
    if slots is None or any(which[5:]):
        return None
    together = *folded_rows(size, which[:4], (k_cache, v_cache, key, value)), slots, *scales
    return None, together, lambda *found: tuple(unfolded(x, size) for x in found)


_updated = with_vmap(partitioned(_run, _letters), _folded)
_updated_split = with_vmap(partitioned(_run_split, _letters_split), _folded_split)
