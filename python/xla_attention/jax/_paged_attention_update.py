"""paged_attention_update in JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._documentation import documented
from .._operators import operator
from ._attention import output_dtype, with_workspace
from ._batching import split_rows, with_batching
from ._batching_pages import (
    concat_batches,
    concat_caches,
    concat_score_operands,
    concat_sequences,
    concat_slot_mapping,
    concat_trees,
    split_lse_of_sequences,
)
from ._call import Array, scale_cache_operand, static_bool
from ._indices import slot_operand
from ._no_gradient import without_gradient
from ._paged_attention import WITH_GRADIENT, Static, mask_operands, metadata, score_attributes, score_operands
from ._sharding import ShardingRule, drop_absent, partitioned
from ._sharding_dims import score_dims, sequence_dims


@documented("xla_gpu_paged_attention_update")
def paged_attention_update(
    query: Array,
    kv_cache: Array,
    context_lens: Array,
    block_tables: Array,
    query_start_loc: Array,
    num_seqs: Array | int,
    key: Array,
    value: Array,
    slot_mapping: Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    q_scale: Array | float | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    k_start: Array | None = None,
    k_end: Array | None = None,
    tree_mask: Array | None = None,
    kv_scale_cache: Array | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out_dtype: Any = None,  # noqa: ANN401
) -> tuple[Array, ...]:
    """Write the keys and values of new tokens into a paged cache and attend over it, in one call.

    The results are those of `kv_cache_update` and then `paged_attention`, bit for bit. The cache is updated in place
    where it is donated (``jax.jit(..., donate_argnums=...)``) or an intermediate value; otherwise XLA copies it first.
    ``docs/semantics.md#paged_attention_update`` defines the result.

    Parameters
    ----------
    query : Array
    kv_cache : Array
        ... The slots of the new tokens may hold anything.
    context_lens : Array
    block_tables : Array
    query_start_loc : Array
    num_seqs : Array or int
        ... An int becomes a constant of the program, which is recompiled for each value.
    key : Array
    value : Array
    slot_mapping : Array
        ... It has to be the slot where `block_tables` has the token's key: otherwise the rows of that sequence, and of
        any other that reads the slot, are unspecified. For NumPy's int64 under ``jax.jit`` see `kv_cache_update`.
    scale : float
    sliding_window, soft_cap, alibi_slopes, sinks, q_scale, k_start, k_end, tree_mask, batch_invariant, out_dtype
        As for `paged_attention`.
    k_scale : Array or float, optional
    v_scale : Array or float, optional
    kv_scale_cache : Array, optional
        ... The call computes those of the new tokens; it is updated as `kv_cache` is.
    return_lse : bool
        Whether to return `softmax_lse` too.

    Returns
    -------
    out : Array
        ``[T, Hq, D]``. Rows that attend to no key, and rows that belong to no sequence, are 0.
    softmax_lse : Array
        ``f32[Hq, T]``: natural logarithm of the softmax denominators, sinks included; -inf for rows that attend to
        neither a key nor a sink. Only with ``return_lse=True``.
    kv_cache : Array
        The updated cache, last but for its scales.
    kv_scale_cache : Array
        The updated scales. Only with `kv_scale_cache`.

    Raises
    ------
    ValueError
        Shapes, dtypes or options do not fit together; the text names the operand and what was expected.
    TypeError
        An option that is a compile-time constant is traced, or indices are not integers.
    NotImplementedError
        A combination of dtypes, or a head dimension, that there is no kernel for.

    Examples
    --------
    A sequence of two keys in page 1 gets its third.

    >>> import jax.numpy as jnp
    >>> from xla_attention.jax import paged_attention_update
    >>> cache, row = jnp.zeros((2, 4, 2, 8)), jnp.ones((1, 1, 8))
    >>> sequence = jnp.array([3]), jnp.array([[1]]), jnp.array([0, 1]), jnp.array([1])
    >>> out, cache = paged_attention_update(0 * row, cache, *sequence, row, 6 * row, jnp.array([4 + 2]), scale=1.0)
    >>> round(out[0, 0, 0].item(), 4), cache[1, 2, :, 0].tolist()
    (2.0, [1.0, 6.0])
    """
    attributes = score_attributes("xla_gpu_paged_attention_update", batch_invariant, scale, sliding_window, soft_cap)
    query = jnp.asarray(query)
    operands = (
        query,
        jnp.asarray(kv_cache),
        *metadata(context_lens, block_tables, query_start_loc, num_seqs),
        jnp.asarray(key),
        jnp.asarray(value),
        slot_operand("slot_mapping", slot_mapping),
    )
    optional = score_operands(alibi_slopes, sinks, q_scale, k_scale, v_scale) + mask_operands(k_start, k_end, tree_mask)
    static = Static(*attributes, output_dtype(query.dtype, out_dtype), static_bool("return_lse", return_lse))
    return _update(static, *operands, *optional, scale_cache_operand(kv_scale_cache))


@functools.partial(jax.jit, static_argnums=0)
@without_gradient("paged_attention_update", WITH_GRADIENT, num_static=1)
def _update(static: Static, *operands: Array | None) -> tuple[Array, ...]:
    out, kv_cache, *others = _update_call(static, *operands)
    lse, scales = others[: int(static.return_lse)], others[int(static.return_lse) :]
    return out, *lse, kv_cache, *scales


def _ffi_call(static: Static, *operands: Array | None) -> tuple[Array, ...]:
    query, kv_cache, context_lens = operands[:3]
    out, lse = static.results(query)
    results = with_workspace(
        "xla_gpu_paged_attention_update",
        operands,
        [out, jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype), lse],
        operator("xla_gpu_paged_attention_update").attributes_of(static),
        kv_heads=kv_cache.shape[2] // 2 if kv_cache.ndim == 4 else 0,
        num_seqs=context_lens.shape[0] if context_lens.ndim else 0,
        after_workspace=() if operands[17] is None else (operands[17],),
    )
    return tuple(results)


def _sharding_rule(static: Static, *operands: Array | None) -> ShardingRule:
    dims = (
        "tHd",
        "Pscd",
        *sequence_dims(operands[5]),
        "thd",
        "thd",
        ".",
        *score_dims(*operands[9:14]),
        "t",
        "t",
        "...",
        "Psc",
    )
    scales = () if operands[17] is None else ("Psc",)
    return ShardingRule(drop_absent(dims, operands), ("tHd", "Pscd", "Ht")[: 2 + static.return_lse] + scales)


def _batching_rule(
    static: Static, axis_size: int, in_batched: list[bool], operands: tuple[Array | None, ...]
) -> tuple | None:
    query, cache, *sequences = operands[:6]
    scores = concat_score_operands(axis_size, in_batched[9:14], operands[9:14], sequences[0].shape[-1])
    ranges = concat_batches(axis_size, in_batched[14:16], operands[14:16])
    trees = concat_trees(axis_size, in_batched[16], operands[16])
    slots = concat_slot_mapping(axis_size, (in_batched[8], in_batched[1]), operands[8], cache)
    if scores is None or slots is None:
        return None
    query, key, value = concat_batches(axis_size, (in_batched[0], *in_batched[6:8]), (query, *operands[6:8]))
    cache = concat_caches(axis_size, in_batched[1], cache)
    scale_cache = None if operands[17] is None else concat_caches(axis_size, in_batched[17], operands[17])
    rows, pages = query.shape[0] // axis_size, cache.shape[0] // axis_size
    sequences = concat_sequences(axis_size, in_batched[2:6], sequences, rows, pages)
    starts = sequences[2]

    def split_results(out: Array, cache: Array, *others: Array) -> tuple[Array, ...]:
        lse, scales = others[: int(static.return_lse)], others[int(static.return_lse) :]
        lse = (split_lse_of_sequences(x, axis_size, starts) for x in lse)
        caches = (split_rows(x, axis_size) for x in scales)
        return split_rows(out, axis_size), split_rows(cache, axis_size), *lse, *caches

    return static, (query, cache, *sequences, key, value, slots, *scores, *ranges, trees, scale_cache), split_results


_update_call = with_batching(partitioned("xla_gpu_paged_attention_update", _ffi_call, _sharding_rule), _batching_rule)
