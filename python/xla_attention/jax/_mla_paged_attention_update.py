"""mla_paged_attention_update in JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._documentation import documented
from .._operators import operator
from ._attention import output_dtype, with_workspace
from ._batching import split_rows, with_batching
from ._batching_pages import concat_batches, concat_caches, concat_slot_mapping, split_lse_of_sequences
from ._call import Array
from ._indices import slot_operand
from ._mla_paged_attention import (
    WITH_GRADIENT,
    Static,
    concat_latent_sequences,
    metadata,
    optional_dims,
    optional_operands,
    static_options,
)
from ._no_gradient import without_gradient
from ._sharding import ShardingRule, drop_absent, partitioned

_TARGET = "xla_gpu_mla_paged_attention_update"


@documented(_TARGET)
def mla_paged_attention_update(
    q: Array,
    kv_cache: Array,
    cu_seqlens_q: Array,
    seqused_k: Array,
    block_table: Array,
    c_kv: Array,
    k_pe: Array,
    slot_mapping: Array,
    *,
    softmax_scale: float,
    num_seqs: Array | int | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Array | None = None,
    kv_scale: Array | float | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out_dtype: Any = None,  # noqa: ANN401
) -> tuple[Array, Array] | tuple[Array, Array, Array]:
    """Write the latent rows of new tokens into a paged cache and attend over it, in one call.

    The row of token t is ``c_kv[t]``, then ``k_pe[t]``, as they are: `k_pe` has to be rotated already. The attention is
    that of `mla_paged_attention` over the updated cache, bit for bit, with Dv the columns of `c_kv`. The cache is
    updated in place where it is donated (``jax.jit(..., donate_argnums=...)``) or an intermediate value; otherwise XLA
    copies it first. ``docs/semantics.md#mla_paged_attention_update`` defines the result.

    Parameters
    ----------
    q : Array
    kv_cache : Array
        ... The slots of the new tokens may hold anything.
    cu_seqlens_q : Array
    seqused_k : Array
    block_table : Array
    c_kv : Array
    k_pe : Array
    slot_mapping : Array
        ... It has to be the slot where `block_table` has the token's row: otherwise the rows of that sequence, and of
        any other that reads the slot, are unspecified. For NumPy's int64 under ``jax.jit`` see `kv_cache_update`.
    softmax_scale : float
    num_seqs, causal, window, softcap, sinks, max_seqlen_q, max_seqlen_k, batch_invariant, out_dtype
        As for `mla_paged_attention`.
    kv_scale : Array or float, optional
    return_lse : bool
        Whether to return `softmax_lse` too.

    Returns
    -------
    out : Array
        ``[Tq, Hq, Dv]``. Rows that attend to no key, and rows that belong to no sequence, are 0.
    softmax_lse : Array
        ``f32[Hq, Tq]``, see `mla_paged_attention`. Only with ``return_lse=True``.
    kv_cache : Array
        The updated cache, always last.

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
    A sequence of one row in page 1 gets its second.

    >>> import jax.numpy as jnp
    >>> from xla_attention.jax import mla_paged_attention_update
    >>> cache, q = jnp.zeros((2, 4, 16)), jnp.zeros((1, 2, 16))
    >>> sequence = jnp.array([0, 1]), jnp.array([2]), jnp.array([[1]])
    >>> new = 6 * jnp.ones((1, 8)), jnp.ones((1, 8)), jnp.array([4 + 1])
    >>> out, cache = mla_paged_attention_update(q, cache, *sequence, *new, softmax_scale=1.0)
    >>> round(out[0, 0, 0].item(), 4), cache[1, 1, ::8].tolist()
    (3.0, [6.0, 1.0])
    """
    q, c_kv = jnp.asarray(q), jnp.asarray(c_kv)
    static = static_options(
        _TARGET,
        head_dim_v=c_kv.shape[-1] if c_kv.ndim else 0,
        dtype=output_dtype(q.dtype, out_dtype),
        return_lse=return_lse,
        softmax_scale=softmax_scale,
        causal=causal,
        window=window,
        softcap=softcap,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        batch_invariant=batch_invariant,
    )
    operands = (q, jnp.asarray(kv_cache), *metadata(cu_seqlens_q, seqused_k, block_table))
    new_tokens = (c_kv, jnp.asarray(k_pe), slot_operand("slot_mapping", slot_mapping))
    return _update(static, *operands, *new_tokens, *optional_operands(num_seqs, sinks, kv_scale))


@functools.partial(jax.jit, static_argnums=0)
@without_gradient("mla_paged_attention_update", WITH_GRADIENT, num_static=1)
def _update(static: Static, *operands: Array | None) -> tuple[Array, ...]:
    out, kv_cache, *lse = _update_call(static, *operands)
    return out, *lse, kv_cache


def _ffi_call(static: Static, *operands: Array | None) -> tuple[Array, ...]:
    q, kv_cache = operands[:2]
    out, lse = static.results(q)
    results = with_workspace(
        _TARGET,
        operands,
        [out, jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype), lse],
        operator(_TARGET).attributes_of(static),
        kv_heads=1,
        num_seqs=operands[3].shape[0] if operands[3].ndim else 0,
    )
    return tuple(results)


def _sharding_rule(static: Static, *operands: Array | None) -> ShardingRule:
    # Devices with different query heads have the same cache and write the same rows to it.
    dims = ("tHd", "Psd", ".", ".", "..", "tv", "tr", ".", *optional_dims(operands[8]))
    return ShardingRule(drop_absent(dims, operands), ("tHv", "Psd", "Ht")[: 2 + static.return_lse])


def _batching_rule(
    static: Static, axis_size: int, in_batched: list[bool], operands: tuple[Array | None, ...]
) -> tuple | None:
    if any(in_batched[9:]):
        return None  # sinks or scales
    cache = operands[1]
    # A latent cache has no dimension of heads.
    slots = concat_slot_mapping(axis_size, (in_batched[7], in_batched[1]), operands[7], cache[..., None, :])
    if slots is None:
        return None
    batched = (in_batched[0], *in_batched[5:7])
    q, c_kv, k_pe = concat_batches(axis_size, batched, (operands[0], *operands[5:7]))
    cache = concat_caches(axis_size, in_batched[1], cache)
    rows, pages = q.shape[0] // axis_size, cache.shape[0] // axis_size
    flags, sequences = (*in_batched[2:5], in_batched[8]), (*operands[2:5], operands[8])
    starts, lens, tables, count = concat_latent_sequences(axis_size, flags, sequences, rows, pages)

    def split_results(out: Array, cache: Array, *lse: Array) -> tuple[Array, ...]:
        lse = (split_lse_of_sequences(x, axis_size, starts) for x in lse)
        return split_rows(out, axis_size), split_rows(cache, axis_size), *lse

    return static, (q, cache, starts, lens, tables, c_kv, k_pe, slots, count, *operands[9:]), split_results


_update_call = with_batching(partitioned(_TARGET, _ffi_call, _sharding_rule), _batching_rule)
