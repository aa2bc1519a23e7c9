"""paged_attention and ragged_paged_attention in JAX."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._documentation import documented
from .._operators import operator
from .._options import validate_sliding_window
from ._attention import output_dtype, with_workspace
from ._batching import batch_at_front, concat_rows, split_rows, with_batching
from ._batching_pages import (
    concat_batches,
    concat_read_caches,
    concat_score_operands,
    concat_sequences,
    concat_trees,
    split_lse_of_sequences,
)
from ._call import Array, scale_cache_operand, scale_operand, static_attributes, static_bool
from ._indices import index_operand, optional_index_operand
from ._no_gradient import without_gradient
from ._sharding import ShardingRule, drop_absent, partitioned
from ._sharding_dims import score_dims, sequence_dims
from ._tree_mask import tree_operand

# The alternative that has a gradient, for the error of attention over pages.
WITH_GRADIENT = "flash_attn_varlen over packed keys [Tk, Hkv, D] has gradients"


@documented("xla_gpu_paged_attention")
def paged_attention(
    query: Array,
    kv_cache: Array,
    context_lens: Array,
    block_tables: Array,
    query_start_loc: Array,
    num_seqs: Array | int,
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
) -> Array | tuple[Array, Array]:
    """Causal attention of a ragged batch of query tokens over a paged key/value cache.

    Prefill chunks and decode tokens may be mixed: sequence b has the query rows
    ``query_start_loc[b] : query_start_loc[b + 1]``, which are the last tokens of its ``context_lens[b]`` keys. The keys
    and values of the new tokens must already be in the cache (`kv_cache_update`). ``docs/semantics.md#paged_attention``
    defines the result.

    Parameters
    ----------
    query : Array
    kv_cache : Array
    context_lens : Array
    block_tables : Array
    query_start_loc : Array
    num_seqs : Array or int
        ... An int becomes a constant of the program, which is recompiled for each value.
    scale : float
    sliding_window : int, optional
    soft_cap : float, optional
    alibi_slopes : Array, optional
    sinks : Array, optional
    q_scale : Array or float, optional
    k_scale : Array or float, optional
    v_scale : Array or float, optional
    k_start : Array, optional
    k_end : Array, optional
    tree_mask : Array, optional
        ... `pack_tree_mask` makes it of booleans.
    kv_scale_cache : Array, optional
        ... ``docs/quantized_cache.md`` explains such caches.
    batch_invariant : bool
    return_lse : bool
        Whether to return `softmax_lse` too.
    out_dtype : dtype, optional
        bf16 (the default) or f16 for f8e4m3fn queries; otherwise the query's dtype (the default) or f32. For long
        f8e4m3fn sequences with D 128 or 256, Hopper multiplies 8-bit numbers on tensor cores: the error of `out` is
        then about 2 %, that of `softmax_lse` up to 5e-4 (``docs/semantics.md#fp8-queries``).

    Returns
    -------
    out : Array
        ``[T, Hq, D]``. Rows that attend to no key, and rows that belong to no sequence, are 0.
    softmax_lse : Array
        ``f32[Hq, T]``: natural logarithm of the softmax denominators, sinks included; -inf for rows that attend to
        neither a key nor a sink. Only with ``return_lse=True``.

    Raises
    ------
    ValueError
        Shapes, dtypes or options do not fit together; the text names the operand and what was expected.
    TypeError
        An option that is a compile-time constant is traced.
    NotImplementedError
        A combination of dtypes, or a head dimension, that there is no kernel for.

    Notes
    -----
    Lengths and page numbers stay on the device and are clamped there: a length to the pages of its row of the block
    table, a page number to the cache. 64-bit integers saturate to 32 bits; without ``jax_enable_x64``, however, JAX
    truncates NumPy's where they are arguments of ``jax.jit``.

    Examples
    --------
    Two sequences in one batch: three new tokens of a prompt of three, and one of a sequence of five.

    >>> import jax, jax.numpy as jnp
    >>> from xla_attention.jax import paged_attention
    >>> query = jax.random.normal(jax.random.key(0), (4, 2, 64))
    >>> kv_cache = jax.random.normal(jax.random.key(1), (8, 4, 2, 64))
    >>> lens, tables, starts = jnp.array([3, 5]), jnp.array([[3, 0], [5, 1]]), jnp.array([0, 3, 4])
    >>> out = paged_attention(query, kv_cache, lens, tables, starts, jnp.array([2]), scale=0.125)
    >>> out.shape
    (4, 2, 64)
    """
    attributes = score_attributes("xla_gpu_paged_attention", batch_invariant, scale, sliding_window, soft_cap)
    query = jnp.asarray(query)
    operands = (query, jnp.asarray(kv_cache), *metadata(context_lens, block_tables, query_start_loc, num_seqs))
    optional = score_operands(alibi_slopes, sinks, q_scale, k_scale, v_scale) + mask_operands(k_start, k_end, tree_mask)
    static = Static(*attributes, output_dtype(query.dtype, out_dtype), static_bool("return_lse", return_lse))
    return _paged_attention(static, *operands, *optional, scale_cache_operand(kv_scale_cache))


def score_attributes(
    target: str, batch_invariant: bool, scale: float, sliding_window: int | None, soft_cap: float | None
) -> tuple[np.generic, ...]:
    """The attributes of a paged attention call, in the order of the first fields of `Static`."""
    attributes = static_attributes(
        target, batch_invariant=batch_invariant, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
    )
    validate_sliding_window(sliding_window, f"{target}: ")
    return tuple(attributes.values())


def metadata(
    context_lens: Array, block_tables: Array, query_start_loc: Array, num_seqs: Array | int
) -> tuple[Array, ...]:
    """The operands that describe the sequences of a ragged batch, as i32."""
    return (
        index_operand("context_lens", context_lens),
        index_operand("block_tables", block_tables),
        index_operand("query_start_loc", query_start_loc),
        index_operand("num_seqs", num_seqs),
    )


def score_operands(
    alibi_slopes: Array | None, sinks: Array | None, *scales: Array | float | None
) -> tuple[Array | None, ...]:
    """The optional operands of a paged attention call."""
    vectors = (None if x is None else jnp.asarray(x, jnp.float32) for x in (alibi_slopes, sinks))
    return (*vectors, *map(scale_operand, scales))


def mask_operands(k_start: Array | None, k_end: Array | None, tree_mask: Array | None) -> tuple[Array | None, ...]:
    """The bounds of the keys of each row, as i32, and the bits of the trees."""
    ranges = optional_index_operand("k_start", k_start), optional_index_operand("k_end", k_end)
    return *ranges, tree_operand(tree_mask)


class Static(NamedTuple):
    """The compile-time constants of a paged attention call: its attributes, then what its results are."""

    batch_invariant: np.bool_
    scale: np.float32
    sliding_window: np.int64
    soft_cap: np.float32
    dtype: np.dtype
    return_lse: np.bool_

    def results(self, query: Array) -> list[jax.ShapeDtypeStruct | None]:
        """`out` and `softmax_lse` for queries ``[T, Hq, D]``; None for a log-sum-exp that is not returned."""
        out = jax.ShapeDtypeStruct(query.shape, self.dtype)
        lse = jax.ShapeDtypeStruct((*query.shape[1:2], *query.shape[:1]), jnp.float32)
        return [out, lse if self.return_lse else None]


@functools.partial(jax.jit, static_argnums=0)
@without_gradient("paged_attention", WITH_GRADIENT, num_static=1)
def _paged_attention(static: Static, *operands: Array | None) -> Array | tuple[Array, Array]:
    results = _attention_call(static, *operands)
    return results if static.return_lse else results[0]


def _ffi_call(static: Static, *operands: Array | None) -> tuple[Array, ...]:
    query, kv_cache, context_lens = operands[:3]
    results = with_workspace(
        "xla_gpu_paged_attention",
        operands,
        static.results(query),
        operator("xla_gpu_paged_attention").attributes_of(static),
        kv_heads=kv_cache.shape[2] // 2 if kv_cache.ndim == 4 else 0,
        num_seqs=context_lens.shape[0] if context_lens.ndim else 0,
    )
    return tuple(results)


def _sharding_rule(static: Static, *operands: Array | None) -> ShardingRule:
    dims = ("tHd", "Pscd", *sequence_dims(operands[5]), *score_dims(*operands[6:11]), "t", "t", "...", "Psc")
    return ShardingRule(drop_absent(dims, operands), ("tHd", "Ht")[: 1 + static.return_lse])


def _batching_rule(
    static: Static, axis_size: int, in_batched: list[bool], operands: tuple[Array | None, ...]
) -> tuple | None:
    query, cache, *sequences = operands[:6]
    query = batch_at_front(axis_size, in_batched[0], query)
    scores = concat_score_operands(axis_size, in_batched[6:11], operands[6:11], sequences[0].shape[-1])
    ranges = concat_batches(axis_size, in_batched[11:13], operands[11:13])
    trees = concat_trees(axis_size, in_batched[13], operands[13])
    if scores is None:
        return None
    pages, cache, scale_cache = concat_read_caches(axis_size, (in_batched[1], in_batched[14]), cache, operands[14])
    sequences = concat_sequences(axis_size, in_batched[2:6], sequences, query.shape[1], pages)
    starts = sequences[2]

    def split_results(out: Array, *lse: Array) -> tuple[Array, ...]:
        return split_rows(out, axis_size), *(split_lse_of_sequences(x, axis_size, starts) for x in lse)

    return static, (concat_rows(query), cache, *sequences, *scores, *ranges, trees, scale_cache), split_results


_attention_call = with_batching(partitioned("xla_gpu_paged_attention", _ffi_call, _sharding_rule), _batching_rule)


def ragged_paged_attention(
    q: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    *,
    sm_scale: Array | float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> Array:
    """`paged_attention` with the name and the arguments of JAX's TPU kernel (of JAX 0.6 to 0.12).

    ``docs/semantics.md#paged_attention`` defines the result.

    Parameters
    ----------
    q : Array
        ``[T, Hq, D]``.
    kv_pages : Array
        ``[P, page_size, 2*Hkv, D]``, K and V of a head side by side.
    kv_lens : Array
        ``i32[S]``: keys per sequence, the new tokens included.
    page_indices : Array
        ``i32[S, M]``: the pages of each sequence, in order.
    cu_q_lens : Array
        ``i32[S + 1]``: the first query row of each sequence and, last, the end.
    num_seqs : Array
        ``i32[1]``: how many of the S sequences are in use.
    sm_scale : Array or float
        Multiplies ``q . k``; finite and greater than 0. An array of one number, which may be traced, multiplies in f32
        when the program runs.
    sliding_window, soft_cap, k_scale, v_scale
        As for `paged_attention`.
    mask_value, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes
        Tuning parameters of the TPU kernel; accepted and ignored.

    Returns
    -------
    Array
        ``[T, Hq, D]``. Rows past ``cu_q_lens[num_seqs]`` are 0.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from xla_attention.jax import ragged_paged_attention
    >>> pages, one = jnp.ones((2, 16, 2, 128)), jnp.array([1])
    >>> ragged_paged_attention(jnp.ones((1, 4, 128)), pages, one, jnp.array([[1]]), jnp.array([0, 1]), one).shape
    (1, 4, 128)
    """
    del mask_value, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes
    options: dict[str, Any] = {"sliding_window": sliding_window, "soft_cap": soft_cap, "scale": sm_scale}
    if isinstance(sm_scale, jax.Array):
        if sm_scale.size != 1:
            raise ValueError(f"ragged_paged_attention: sm_scale has shape {list(sm_scale.shape)}, expected one number")
        options |= {"scale": 1.0, "q_scale": sm_scale.reshape(1)}
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return paged_attention(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, **options, **scales)
