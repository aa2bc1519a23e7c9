"""mla_paged_attention in JAX."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._documentation import documented
from .._operators import operator
from .._options import length_hint
from ._attention import output_dtype, with_workspace
from ._batching import batch_at_front, concat_rows, split_rows, with_batching
from ._batching_pages import concat_caches, concat_sequences, split_lse_of_sequences
from ._call import Array, scale_operand, static_attributes, static_bool, static_i64
from ._flash_attn_varlen import static_window
from ._indices import index_operand, optional_index_operand
from ._no_gradient import without_gradient
from ._sharding import ShardingRule, drop_absent, partitioned

_TARGET = "xla_gpu_mla_paged_attention"
# The alternative that has a gradient, for the error of attention over latent rows.
WITH_GRADIENT = "flash_attn_varlen over up-projected keys [Tk, Hq, D] and values [Tk, Hq, Dv] has gradients"


@documented(_TARGET)
def mla_paged_attention(
    q: Array,
    kv_cache: Array,
    cu_seqlens_q: Array,
    seqused_k: Array,
    block_table: Array,
    *,
    softmax_scale: float,
    head_dim_v: int = 512,
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
) -> Array | tuple[Array, Array]:
    """Multi-head latent attention (MLA) in its absorbed form, over a paged cache of latent rows.

    All query heads attend to the same rows. A row is the key, and its first ``head_dim_v`` columns are also the value,
    so that a cache holds one row per token: the compressed K and V (``kv_lora_rank`` columns), then the key part that
    carries positions, rotated. Queries have the same two parts: the first one multiplied by the up-projection of K, the
    second one rotated. The output is still to be multiplied by the up-projection of V.

    Prefill chunks and decode tokens may be mixed: sequence b has the query rows ``cu_seqlens_q[b] : cu_seqlens_q[b +
    1]``, which are the last tokens of its ``seqused_k[b]`` keys. The rows of the new tokens must already be in the
    cache; `mla_paged_attention_update` writes them too. ``docs/semantics.md#mla_paged_attention`` defines the result.

    Parameters
    ----------
    q : Array
    kv_cache : Array
    cu_seqlens_q : Array
    seqused_k : Array
    block_table : Array
    softmax_scale : float
        ... It is that of the heads before absorption, such as ``(128 + 64) ** -0.5``, and not of D.
    head_dim_v : int
        Dv: how many columns of a row are its value.
    num_seqs : Array or int, optional
        ... An int becomes a constant of the program, which is recompiled for each value.
    causal : bool
    window : tuple of int
        ``(left, right)``: how many keys before and after its own position a query attends to; -1 is no limit.
    softcap : float
    sinks : Array, optional
    kv_scale : Array or float, optional
    max_seqlen_q : int
        ... 0 is unknown.
    max_seqlen_k : int
        ... 0 is unknown.
    batch_invariant : bool
    return_lse : bool
        Whether to return `softmax_lse` too.
    out_dtype : dtype, optional
        The query's dtype (the default) or f32, for partial results that are merged.

    Returns
    -------
    out : Array
        ``[Tq, Hq, Dv]``. Rows that attend to no key, and rows that belong to no sequence, are 0.
    softmax_lse : Array
        ``f32[Hq, Tq]``: natural logarithm of the softmax denominators, sinks included; -inf for rows that attend to
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
    Lengths and page numbers stay on the device and are clamped there. 64-bit integers saturate to 32 bits; without
    ``jax_enable_x64``, however, JAX truncates NumPy's where they are arguments of ``jax.jit``.

    Examples
    --------
    A decode step of two sequences with DeepSeek's sizes and 16 heads.

    >>> import jax, jax.numpy as jnp
    >>> from xla_attention.jax import mla_paged_attention
    >>> q = jax.random.normal(jax.random.key(0), (2, 16, 576), jnp.bfloat16)
    >>> kv_cache = jax.random.normal(jax.random.key(1), (8, 64, 576), jnp.bfloat16)
    >>> starts, lens, table = jnp.array([0, 1, 2]), jnp.array([70, 5]), jnp.array([[3, 0], [5, 1]])
    >>> out = mla_paged_attention(q, kv_cache, starts, lens, table, softmax_scale=192**-0.5, causal=True)
    >>> out.shape
    (2, 16, 512)
    """
    q = jnp.asarray(q)
    static = static_options(
        _TARGET,
        head_dim_v=int(static_i64("head_dim_v", head_dim_v)),
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
    return _attention(static, *operands, *optional_operands(num_seqs, sinks, kv_scale))


class Static(NamedTuple):
    """The compile-time constants of a call: its attributes, then what its results are."""

    batch_invariant: np.bool_
    causal: np.bool_
    max_seqlen_k: np.int64
    max_seqlen_q: np.int64
    softcap: np.float32
    softmax_scale: np.float32
    window_left: np.int64
    window_right: np.int64
    head_dim_v: int
    dtype: np.dtype
    return_lse: np.bool_

    def results(self, q: Array) -> list[jax.ShapeDtypeStruct | None]:
        """`out` and `softmax_lse` for queries ``[Tq, Hq, D]``; None for a log-sum-exp that is not returned."""
        out = jax.ShapeDtypeStruct((*q.shape[:-1], self.head_dim_v), self.dtype)
        lse = jax.ShapeDtypeStruct((*q.shape[1:2], *q.shape[:1]), jnp.float32)
        return [out, lse if self.return_lse else None]


def static_options(
    target: str,
    *,
    head_dim_v: int,
    dtype: np.dtype,
    return_lse: bool,
    window: tuple[int, int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,  # noqa: ANN401
) -> Static:
    """The constants of a call of `target` from the arguments of the public function."""
    left, right = static_window(window, target)
    attributes = static_attributes(
        target,
        window_left=left,
        window_right=right,
        max_seqlen_q=length_hint(int(static_i64("max_seqlen_q", max_seqlen_q))),
        max_seqlen_k=length_hint(int(static_i64("max_seqlen_k", max_seqlen_k))),
        **options,
    )
    return Static(*attributes.values(), head_dim_v, dtype, static_bool("return_lse", return_lse))


def metadata(cu_seqlens_q: Array, seqused_k: Array, block_table: Array) -> tuple[Array, ...]:
    """The required operands that describe the sequences of a ragged batch, as i32."""
    return (
        index_operand("cu_seqlens_q", cu_seqlens_q),
        index_operand("seqused_k", seqused_k),
        index_operand("block_table", block_table),
    )


def optional_operands(
    num_seqs: Array | int | None, sinks: Array | None, kv_scale: Array | float | None
) -> tuple[Array | None, ...]:
    """The optional operands of a call."""
    count = optional_index_operand("num_seqs", num_seqs)
    return count, None if sinks is None else jnp.asarray(sinks, jnp.float32), scale_operand(kv_scale)


@functools.partial(jax.jit, static_argnums=0)
@without_gradient("mla_paged_attention", WITH_GRADIENT, num_static=1)
def _attention(static: Static, *operands: Array | None) -> Array | tuple[Array, Array]:
    results = _attention_call(static, *operands)
    return results if static.return_lse else results[0]


def _ffi_call(static: Static, *operands: Array | None) -> tuple[Array, ...]:
    results = with_workspace(
        _TARGET,
        operands,
        static.results(operands[0]),
        operator(_TARGET).attributes_of(static),
        kv_heads=1,
        num_seqs=operands[3].shape[0] if operands[3].ndim else 0,
    )
    return tuple(results)


def optional_dims(num_seqs: Array | None) -> tuple[str, ...]:
    """The letters of the optional operands, for the sharding rule."""
    return "." * (0 if num_seqs is None else num_seqs.ndim), "H", "."


def _sharding_rule(static: Static, *operands: Array | None) -> ShardingRule:
    # Devices with different query heads have the same cache.
    dims = ("tHd", "Psd", ".", ".", "..", *optional_dims(operands[5]))
    return ShardingRule(drop_absent(dims, operands), ("tHv", "Ht")[: 1 + static.return_lse])


def concat_latent_sequences(
    axis_size: int, in_batched: list[bool], sequences: tuple[Array | None, ...], rows: int, pages: int | None
) -> tuple[Array, ...]:
    """``cu_seqlens_q, seqused_k, block_table, num_seqs`` of n calls as those of one, see `concat_sequences`."""
    (starts, lens, tables, count), (starts_batched, lens_batched, tables_batched, count_batched) = sequences, in_batched
    if count is None:
        count, count_batched = jnp.full((1,), lens.shape[-1], jnp.int32), False
    flags = (lens_batched, tables_batched, starts_batched, count_batched)
    lens, tables, starts, count = concat_sequences(axis_size, flags, (lens, tables, starts, count), rows, pages)
    return starts, lens, tables, count


def _batching_rule(
    static: Static, axis_size: int, in_batched: list[bool], operands: tuple[Array | None, ...]
) -> tuple | None:
    if any(in_batched[6:]):
        return None  # sinks or scales
    q, cache = batch_at_front(axis_size, in_batched[0], operands[0]), operands[1]
    pages = cache.shape[1] if in_batched[1] else None
    cache = concat_caches(axis_size, True, cache) if in_batched[1] else cache
    sequences = concat_latent_sequences(axis_size, in_batched[2:6], operands[2:6], q.shape[1], pages)

    def split_results(out: Array, *lse: Array) -> tuple[Array, ...]:
        return split_rows(out, axis_size), *(split_lse_of_sequences(x, axis_size, sequences[0]) for x in lse)

    return static, (concat_rows(q), cache, *sequences, *operands[6:]), split_results


_attention_call = with_batching(partitioned(_TARGET, _ffi_call, _sharding_rule), _batching_rule)
