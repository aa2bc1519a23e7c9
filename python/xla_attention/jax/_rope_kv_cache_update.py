"""rope_kv_cache_update in JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .._documentation import documented
from .._options import kv_layout_number
from ._call import Array, custom_call, scale_operand, static_bool
from ._fold import unfolded, with_vmap
from ._fold_pages import folded_cache, folded_rows, folded_slots, layout_of_written, sides_of
from ._indices import index_operand, slot_operand
from ._no_gradient import without_gradient
from ._partition import Letters, partitioned, present
from ._words import PAGES, of_scale


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
    donated or an intermediate value.

    Parameters
    ----------
    kv_cache : Array
        K and V in one buffer, see `kv_layout`. Of the dtype of `key`, or ``float8_e4m3fn`` or ``float8_e5m2``.
    query : Array
    key : Array
    value : Array
    slot_mapping : Array
        ... The queries of such a token are rotated all the same.
    positions : Array
    cos_sin : Array
    interleaved : bool
    k_scale : Array or float, optional
    v_scale : Array or float, optional
    kv_layout : str
        ``"interleaved"``, ``[P, page_size, 2*Hkv, D]`` with K of head h at index 2h and V at 2h+1; ``"stacked"``,
        ``[2, P, page_size, Hkv, D]``; ``"per_page"``, ``[P, 2, page_size, Hkv, D]``. Not to be confused with the pairs
        of `interleaved`.

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
        `interleaved` is no bool, or `positions` or `slot_mapping` are no integers.
    NotImplementedError
        A head dimension that is not built.

    Notes
    -----
    The pair (a, b) becomes ``(a * cos - b * sin, b * cos + a * sin)``, in f32, rounded once: to the query's dtype or,
    after the division by the scale, to the cache's. An fp8 cache saturates, see `kv_cache_update`.

    Examples
    --------
    Two tokens, at positions 0 and 1, into slots 0 and 5; the second turns by a right angle.

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
    cache, query = _updated((interleaved, kv_layout), *operands)
    return query, cache


def _run(static: tuple[np.bool_, np.int64], *operands: Array | None) -> tuple[Array, Array]:
    results = [jax.ShapeDtypeStruct(like.shape, like.dtype) for like in operands[:2]]
    attributes = dict(zip(("interleaved", "kv_layout"), static, strict=True))
    return tuple(custom_call("xla_gpu_rope_kv_cache_update", operands, results, attributes))


def _letters(static: tuple[np.bool_, np.int64], *operands: Array | None) -> Letters:
    cache = PAGES[static[1]]
    words = (cache, "tHd", "thd", "thd", ".", ".", "..", *map(of_scale, operands[7:]))
    return Letters(present(words, operands), (cache, "tHd"))


def _folded(
    static: tuple[np.bool_, np.int64], size: int, which: list[bool], operands: tuple[Array | None, ...]
) -> tuple | None:
    interleaved, kv_layout = static
    cache, *rows, slots, positions = operands[:6]
    slots = folded_slots(size, (which[4], which[0]), slots, cache, sides=sides_of(kv_layout))
    if slots is None or any(which[6:]):
        return None
    query, key, value, positions = folded_rows(size, (*which[1:4], which[5]), (*rows, positions))
    together = folded_cache(size, which[0], cache, kv_layout), query, key, value, slots, positions, *operands[6:]

    def unfold(found: Array, query: Array) -> tuple[Array, Array]:
        return found.reshape(size, *cache.shape[int(which[0]) :]), unfolded(query, size)

    return (interleaved, layout_of_written(kv_layout)), together, unfold


_updated = with_vmap(partitioned(_run, _letters), _folded)
