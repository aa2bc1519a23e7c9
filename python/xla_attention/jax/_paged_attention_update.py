"""paged_attention_update in JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._documentation import documented
from .._operators import operator
from ._attention import output_dtype, with_workspace
from ._call import Array, static_bool
from ._fold import unfolded, with_vmap
from ._fold_pages import (
    folded_cache,
    folded_rows,
    folded_scores,
    folded_sequences,
    folded_slots,
    unfolded_lse_of_sequences,
)
from ._indices import slot_operand
from ._no_gradient import without_gradient
from ._paged_attention import WITH_GRADIENT, Static, metadata, score_attributes, score_operands
from ._partition import Letters, partitioned, present
from ._words import of_scores, of_sequences


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
    batch_invariant: bool = False,
    return_lse: bool = False,
    out_dtype: Any = None,  # noqa: ANN401
) -> tuple[Array, Array] | tuple[Array, Array, Array]:
    """Write the keys and values of new tokens into a paged cache and attend over it, in one call.

    The results are those of `kv_cache_update` and then `paged_attention`, bit for bit. The cache is updated in place
    where it is donated (``jax.jit(..., donate_argnums=...)``) or an intermediate value; otherwise XLA copies it first.

    Parameters
    ----------
    query : Array
    kv_cache : Array
        ... The slots of the new tokens may hold anything.
    context_lens : Array
    block_tables : Array
    query_start_loc : Array
    num_seqs : Array or int
        ... As an int it becomes a constant of the program, which is compiled anew for each value.
    key : Array
    value : Array
    slot_mapping : Array
        ... It is where `block_tables` has the token's key: with another slot, the rows of that sequence, and of any
        other that reads the slot, are unspecified. NumPy's int64 under ``jax.jit``: see
        `kv_cache_update`.
    scale : float
    sliding_window, soft_cap, alibi_slopes, sinks, q_scale, batch_invariant, out_dtype
        As for `paged_attention`.
    k_scale : Array or float, optional
    v_scale : Array or float, optional
    return_lse : bool
        Return the logarithm of the softmax denominators as well.

    Returns
    -------
    out : Array
        ``[T, Hq, D]``. Rows that see no key, and rows that belong to no sequence, are 0.
    softmax_lse : Array
        ``f32[Hq, T]``, natural logarithm; -inf for such rows (the sink's logit where a row of a sequence sees only
        that). Only with ``return_lse=True``.
    kv_cache : Array
        The updated cache, always last.

    Raises
    ------
    ValueError
        Shapes, dtypes or options do not fit together; the text names the operand and what was expected.
    TypeError
        An option that has to be known at compile time is traced, or indices are no integers.
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
    optional = score_operands(alibi_slopes, sinks, q_scale, k_scale, v_scale)
    dtype = output_dtype(query.dtype, out_dtype)
    return _update(Static(*attributes, dtype, static_bool("return_lse", return_lse)), *operands, *optional)


@functools.partial(jax.jit, static_argnums=0)
@without_gradient("paged_attention_update", WITH_GRADIENT, num_static=1)
def _update(static: Static, *operands: Array | None) -> tuple[Array, ...]:
    out, kv_cache, *lse = _updated(static, *operands)
    return out, *lse, kv_cache


def _run(static: Static, *operands: Array | None) -> tuple[Array, ...]:
    query, kv_cache, context_lens = operands[:3]
    out, lse = static.results(query)
    found = with_workspace(
        "xla_gpu_paged_attention_update",
        operands,
        [out, jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype), lse],
        operator("xla_gpu_paged_attention_update").attributes_of(static),
        kv_heads=kv_cache.shape[2] // 2 if kv_cache.ndim == 4 else 0,
        num_seqs=context_lens.shape[0] if context_lens.ndim else 0,
    )
    return tuple(found)


def _letters(static: Static, *operands: Array | None) -> Letters:
    words = ("tHd", "Pscd", *of_sequences(operands[5]), "thd", "thd", ".", *of_scores(*operands[9:]))
    return Letters(present(words, operands), ("tHd", "Pscd", "Ht")[: 2 + static.return_lse])


def _folded(static: Static, size: int, which: list[bool], operands: tuple[Array | None, ...]) -> tuple | None:
    query, cache, *sequences = operands[:6]
    scores = folded_scores(size, which[9:], operands[9:], sequences[0].shape[-1])
    slots = folded_slots(size, (which[8], which[1]), operands[8], cache)
    if scores is None or slots is None:
        return None
    query, key, value = folded_rows(size, (which[0], *which[6:8]), (query, *operands[6:8]))
    cache = folded_cache(size, which[1], cache)
    sequences = folded_sequences(size, which[2:6], sequences, query.shape[0] // size, cache.shape[0] // size)
    starts = sequences[2]

    def unfold(out: Array, cache: Array, *lse: Array) -> tuple[Array, ...]:
        return unfolded(out, size), unfolded(cache, size), *(unfolded_lse_of_sequences(x, size, starts) for x in lse)

    return static, (query, cache, *sequences, key, value, slots, *scores), unfold


_updated = with_vmap(partitioned(_run, _letters), _folded)
