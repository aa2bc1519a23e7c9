"""rope_kv_cache_update in JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .._documentation import documented
from .._options import kv_layout_number
from ._batching import split_rows, with_batching
from ._batching_pages import concat_batches, concat_caches, concat_slot_mapping, kv_dim_of, layout_of_concat
from ._call import Array, custom_call, scale_operand, static_bool
from ._indices import index_operand, slot_operand
from ._no_gradient import without_gradient
from ._sharding import ShardingRule, drop_absent, partitioned
from ._sharding_dims import CACHE_DIMS, scale_dims


@documented("xla_gpu_rope_kv_cache_update")
def rope_kv_cache_update(
    kv_cache: Array,
    query: Array,
    key: Array,
    value: Array,
    slot_mapping: Array,
    positions: Array,
    cos_sin: Array,
    *,
    interleaved: bool = False,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    kv_layout: str = "interleaved",
) -> tuple[Array, Array]:
    """Rotate the queries and keys of new tokens by their positions and write keys and values into a paged cache.

    The rotary embedding and `kv_cache_update` in one pass over the rows. The cache is updated in place where it is
    donated or an intermediate value. ``docs/semantics.md#rope_kv_cache_update`` defines every bit.

    Parameters
    ----------
    kv_cache : Array
        K and V in one buffer, see `kv_layout`. Its dtype is that of `key`, or ``float8_e4m3fn`` or ``float8_e5m2``.
    query : Array
    key : Array
    value : Array
    slot_mapping : Array
        ... The queries of a skipped token are rotated too.
    positions : Array
    cos_sin : Array
    interleaved : bool
    k_scale : Array or float, optional
    v_scale : Array or float, optional
    kv_layout : str
        ``"interleaved"``, ``[P, page_size, 2*Hkv, D]`` with K of head h at index 2h and V at 2h+1; ``"stacked"``,
        ``[2, P, page_size, Hkv, D]``; ``"per_page"``, ``[P, 2, page_size, Hkv, D]``. Unrelated to the pairs of
        `interleaved`.

    Returns
    -------
    query : Array
        ``[T, Hq, D]``, rotated.
    kv_cache : Array
        The updated cache.

    Raises
    ------
    ValueError
        Shapes or dtypes do not fit together; the text names the operand.
    TypeError
        `interleaved` is not a bool, or `positions` or `slot_mapping` are not integers.
    NotImplementedError
        A head dimension that there is no kernel for.

    Notes
    -----
    The pair (a, b) becomes ``(a * cos - b * sin, b * cos + a * sin)``, in f32, rounded once: to the query's dtype or,
    after the division by the scale, to the cache's. An fp8 cache saturates, see `kv_cache_update`.

    Examples
    --------
    Two tokens, at positions 0 and 1, into slots 0 and 5; the second is rotated by 90 degrees.

    >>> import jax.numpy as jnp
    >>> from xla_attention.jax import rope_kv_cache_update
    >>> cos_sin = jnp.array([[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1]], jnp.float32)
    >>> cache, row = jnp.zeros((2, 4, 2, 8)), jnp.ones((2, 1, 8))
    >>> query, cache = rope_kv_cache_update(cache, row, row, row, jnp.array([0, 5]), jnp.array([0, 1]), cos_sin)
    >>> query[1, 0].tolist()
    [-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0]
    >>> cache[1, 1, 0, :5].tolist()
    [-1.0, -1.0, -1.0, -1.0, 1.0]
    """
    operands = (
        *map(jnp.asarray, (kv_cache, query, key, value)),
        slot_operand("slot_mapping", slot_mapping),
        index_operand("positions", positions),
        jnp.asarray(cos_sin),
        scale_operand(k_scale),
        scale_operand(v_scale),
    )
    return _rope(static_bool("interleaved", interleaved), kv_layout_number(kv_layout), *operands)


@functools.partial(jax.jit, static_argnums=(0, 1))
@without_gradient(
    "rope_kv_cache_update",
    "rotate the queries and keys by jax.numpy, and kv_cache.at[page, offset].set(rows) has a gradient",
    num_static=2,
)
def _rope(interleaved: np.bool_, kv_layout: np.int64, *operands: Array | None) -> tuple[Array, Array]:
    cache, query = _update_call((interleaved, kv_layout), *operands)
    return query, cache


def _ffi_call(static: tuple[np.bool_, np.int64], *operands: Array | None) -> tuple[Array, Array]:
    results = [jax.ShapeDtypeStruct(like.shape, like.dtype) for like in operands[:2]]
    attributes = dict(zip(("interleaved", "kv_layout"), static, strict=True))
    return tuple(custom_call("xla_gpu_rope_kv_cache_update", operands, results, attributes))


def _sharding_rule(static: tuple[np.bool_, np.int64], *operands: Array | None) -> ShardingRule:
    cache = CACHE_DIMS[static[1]]
    dims = (cache, "tHd", "thd", "thd", ".", ".", "..", *map(scale_dims, operands[7:]))
    return ShardingRule(drop_absent(dims, operands), (cache, "tHd"))


def _batching_rule(
    static: tuple[np.bool_, np.int64], axis_size: int, in_batched: list[bool], operands: tuple[Array | None, ...]
) -> tuple | None:
    interleaved, kv_layout = static
    cache, *rows, slots, positions = operands[:6]
    kv_dim = kv_dim_of(kv_layout)
    slots = concat_slot_mapping(axis_size, (in_batched[4], in_batched[0]), slots, cache, kv_dim=kv_dim)
    if slots is None or any(in_batched[6:]):
        return None
    rows = concat_batches(axis_size, (*in_batched[1:4], in_batched[5]), (*rows, positions))
    concat_cache = concat_caches(axis_size, in_batched[0], cache, kv_layout)
    concat_operands = concat_cache, *rows[:3], slots, rows[3], *operands[6:]

    def split_results(updated: Array, query: Array) -> tuple[Array, Array]:
        return updated.reshape(axis_size, *cache.shape[int(in_batched[0]) :]), split_rows(query, axis_size)

    return (interleaved, layout_of_concat(kv_layout)), concat_operands, split_results


_update_call = with_batching(partitioned("xla_gpu_rope_kv_cache_update", _ffi_call, _sharding_rule), _batching_rule)
