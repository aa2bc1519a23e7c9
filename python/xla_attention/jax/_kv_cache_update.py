"""kv_cache_update in JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .._documentation import documented
from .._options import kv_layout_number, reject_kv_layout
from ._batching import split_rows, with_batching
from ._batching_pages import concat_batches, concat_caches, concat_slot_mapping, kv_dim_of, layout_of_concat
from ._call import Array, custom_call, scale_cache_operand, scale_operand
from ._indices import slot_operand
from ._no_gradient import without_gradient
from ._sharding import ShardingRule, drop_absent, partitioned
from ._sharding_dims import CACHE_DIMS, scale_cache_dims, scale_dims

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
    kv_scale_cache: Array | None = None,
    kv_layout: str | None = None,
) -> Array | tuple[Array, Array]:
    """Write the keys and values of new tokens into a paged cache.

    The cache is updated in place where it is donated (``jax.jit(..., donate_argnums=...)``) or an intermediate value;
    otherwise XLA copies it first.

    Parameters
    ----------
    kv_cache : Array or pair of Arrays
        K and V in one buffer, see `kv_layout`; or in two, ``[P, page_size, Hkv, D]`` and
        ``[P, page_size, Hkv, Dv]``. Its dtype is that of `key`, or ``float8_e4m3fn`` or ``float8_e5m2``; with
        `kv_scale_cache` ``int8`` or ``float8_e4m3fn``.
    key, value : Array
        ``[T, Hkv, D]``, ``[T, Hkv, Dv]``, f16, bf16 or f32; D and Dv multiples of 8 up to 512.
    slot_mapping : Array
        ... Without ``jax_enable_x64``, JAX truncates a NumPy int64 that is an argument of ``jax.jit``: pass int32
        there.
    k_scale : Array or float, optional
        ... The attention functions multiply by the scale of the same name.
    v_scale : Array or float, optional
        ... The attention functions multiply by the scale of the same name.
    kv_scale_cache : Array, optional
        ... ``docs/quantized_cache.md`` explains such caches.
    kv_layout : str, optional
        The layout of a cache in one buffer: ``"interleaved"`` (the default), ``[P, page_size, 2*Hkv, D]`` with K of
        head h at index 2h and V at 2h+1; ``"stacked"``, ``[2, P, page_size, Hkv, D]``; ``"per_page"``,
        ``[P, 2, page_size, Hkv, D]``.

    Returns
    -------
    Array or pair of Arrays
        The updated cache, in the form of `kv_cache`; with `kv_scale_cache` a pair, the cache and its scales.

    Raises
    ------
    ValueError
        Shapes or dtypes do not fit together; the text names the operand.
    NotImplementedError
        A head dimension that there is no kernel for.

    Notes
    -----
    Numbers round to nearest even. An fp8 cache saturates: larger magnitudes than its largest finite number (448 or
    57344) become that number, infinities too; NaN stays NaN. ``docs/semantics.md#kv_cache_update`` defines every bit.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from xla_attention.jax import kv_cache_update
    >>> cache = jnp.zeros((2, 4, 2, 8))
    >>> rows = jnp.ones((3, 1, 8))
    >>> cache = kv_cache_update(cache, rows, 2 * rows, jnp.array([0, 5, -1]))
    >>> cache[:, :, :, 0].sum(axis=1).tolist()
    [[1.0, 2.0], [1.0, 2.0]]

    The same into 8 bits, with one scale for K and one per head for V:

    >>> cache = jnp.zeros((2, 4, 2, 8), jnp.float8_e4m3fn)
    >>> cache = kv_cache_update(cache, rows, 2 * rows, jnp.array([0, 5, -1]), k_scale=0.25, v_scale=jnp.array([0.5]))
    >>> cache[:, :, :, 0].astype(float).sum(axis=1).tolist()
    [[4.0, 4.0], [4.0, 4.0]]

    And with a scale for each row, which the call computes:

    >>> cache, scales = jnp.zeros((2, 4, 2, 8), jnp.int8), jnp.zeros((2, 4, 2))
    >>> cache, scales = kv_cache_update(cache, rows, 2 * rows, jnp.array([0, 5, -1]), kv_scale_cache=scales)
    >>> cache[0, 0, :, 0].tolist(), (127 * scales[0, 0]).tolist()
    ([127, 127], [1.0, 2.0])
    """
    slots = slot_operand("slot_mapping", slot_mapping)
    rows = (jnp.asarray(key), jnp.asarray(value), slots, scale_operand(k_scale), scale_operand(v_scale))
    if isinstance(kv_cache, tuple | list):
        reject_kv_layout(kv_layout)
        if kv_scale_cache is not None:
            text = "kv_scale_cache is given with K and V in two buffers, expected one buffer"
            raise ValueError(f"kv_cache_update: {text}")
        k_cache, v_cache = kv_cache
        return _update_split(jnp.asarray(k_cache), jnp.asarray(v_cache), *rows)
    scales = scale_cache_operand(kv_scale_cache)
    updated = _update(kv_layout_number(kv_layout or "interleaved"), jnp.asarray(kv_cache), *rows, scales)
    return updated[0] if scales is None else updated


@functools.partial(jax.jit, static_argnums=0)
@_without_gradient(num_static=1)
def _update(kv_layout: np.int64, *operands: Array | None) -> tuple[Array, ...]:
    return _update_call(kv_layout, *operands)


@jax.jit
@_without_gradient()
def _update_split(*operands: Array | None) -> tuple[Array, Array]:
    return _update_split_call(None, *operands)


def _ffi_call(kv_layout: np.int64, cache: Array, *rows: Array | None) -> tuple[Array, ...]:
    results = [_like(x) for x in (cache, rows[-1]) if x is not None]
    return tuple(custom_call("xla_gpu_kv_cache_update", [cache, *rows], results, {"kv_layout": kv_layout}))


def _ffi_call_split(_: None, k_cache: Array, v_cache: Array, *rows: Array | None) -> tuple[Array, Array]:
    operands, results = [k_cache, v_cache, *rows], [_like(k_cache), _like(v_cache)]
    return tuple(custom_call("xla_gpu_kv_cache_update_split", operands, results, {}))


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _sharding_rule(kv_layout: np.int64, *operands: Array | None) -> ShardingRule:
    cache, scales = CACHE_DIMS[kv_layout], scale_cache_dims(kv_layout)
    dims = (cache, "thd", "thd", ".", *map(scale_dims, operands[4:6]), scales)
    return ShardingRule(drop_absent(dims, operands), (cache,) if operands[6] is None else (cache, scales))


def _sharding_rule_split(_: None, *operands: Array | None) -> ShardingRule:
    caches = ("Pshd", "Pshe")
    return ShardingRule(drop_absent((*caches, "thd", "the", ".", *map(scale_dims, operands[5:])), operands), caches)


def _batching_rule(
    kv_layout: np.int64, axis_size: int, in_batched: list[bool], operands: tuple[Array | None, ...]
) -> tuple | None:
    cache, key, value, slots, *scales, scale_cache = operands
    kv_dim = kv_dim_of(kv_layout)
    slots = concat_slot_mapping(axis_size, (in_batched[3], in_batched[0]), slots, cache, kv_dim=kv_dim)
    if slots is None or any(in_batched[4:6]):
        return None
    rows = concat_batches(axis_size, in_batched[1:3], (key, value))
    shapes = [(axis_size, *cache.shape[int(in_batched[0]) :])]
    if scale_cache is not None:
        shapes.append((axis_size, *scale_cache.shape[int(in_batched[6]) :]))
        scale_cache = concat_caches(axis_size, in_batched[6], scale_cache, kv_layout)
    operands = concat_caches(axis_size, in_batched[0], cache, kv_layout), *rows, slots, *scales, scale_cache

    def split_results(*caches: Array) -> tuple[Array, ...]:
        return tuple(x.reshape(shape) for x, shape in zip(caches, shapes, strict=True))

    return layout_of_concat(kv_layout), operands, split_results


def _batching_rule_split(
    _: None, axis_size: int, in_batched: list[bool], operands: tuple[Array | None, ...]
) -> tuple | None:
    k_cache, v_cache, key, value, slots, *scales = operands
    slots = concat_slot_mapping(axis_size, (in_batched[4], in_batched[0]), slots, k_cache)
    if slots is None or any(in_batched[5:]):
        return None
    operands = *concat_batches(axis_size, in_batched[:4], (k_cache, v_cache, key, value)), slots, *scales
    return None, operands, lambda *caches: tuple(split_rows(x, axis_size) for x in caches)


_update_call = with_batching(partitioned("xla_gpu_kv_cache_update", _ffi_call, _sharding_rule), _batching_rule)
_update_split_call = with_batching(
    partitioned("xla_gpu_kv_cache_update_split", _ffi_call_split, _sharding_rule_split), _batching_rule_split
)
