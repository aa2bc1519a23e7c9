"""ragged_paged_attention_v3 in JAX."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._options import validate_sliding_window
from ._call import Array, static_bool, static_i64
from ._flash_attn_varlen import flash_attn_varlen
from ._indices import index_operand, optional_index_operand
from ._kv_cache_update import kv_cache_update
from ._packed_kv_cache import (
    PackedForm,
    block_tables,
    new_token_slots,
    pack,
    packed_form,
    pad_heads,
    unpack,
)
from ._paged_attention import paged_attention
from ._paged_attention_update import paged_attention_update
from ._ragged_paged_attention_v3_arguments import (
    NAME,
    largest_tree,
    max_pages_per_seq,
    per_head_scale,
    per_head_sinks,
    reject_unsupported,
    result_dtype,
    score_scale,
    soft_cap_attribute,
    validate_metadata,
    validate_rows,
)
from ._ragged_rows import used_starts
from ._tree_mask import tree_mask_from_custom_mask


def ragged_paged_attention_v3(
    queries: Array,
    keys: Array,
    values: Array,
    kv_cache: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    distribution: Array,
    attention_sink: Array | float | None = None,
    *,
    cu_kv_lens: Array | None = None,
    use_causal_mask: bool = True,
    update_kv_cache: bool = True,
    sm_scale: Array | float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_scale: Array | float | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    out_dtype: Any = None,  # noqa: ANN401
    kv_layout: str | None = None,
    pages_per_seq: int | None = None,
    batch_invariant: bool = False,
    custom_mask: Array | None = None,
    mask_aligned_to_cu_kv: bool = False,
    q_max: int | None = None,
    xai_temperature_len: None = None,
    softmax_dtype: Any = None,  # noqa: ANN401
    skip_kv_mask: bool = False,
    mask_value: float | None = None,
    chunk_prefill_size: int | None = None,
    d_block_sizes: tuple[int, ...] | None = None,
    p_block_sizes: tuple[int, ...] | None = None,
    m_block_sizes: tuple[int, ...] | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    debug_mode: bool = False,
    disable_bounds_checks: bool = True,
    disable_semaphore_checks: bool = True,
) -> tuple[Array, Array]:
    """Write the keys and values of new tokens into a packed cache and attend over it, as JAX serving calls it.

    The name, the arguments and their meaning are those of tpu-inference's third ragged paged attention kernel and of
    its form for head dimension 64, with the arguments that sglang-jax's copy adds. Decode steps, prompts and chunks of
    prompts may be mixed. A causal call is one `paged_attention_update`; the cache is updated in place where it is
    donated (``jax.jit(..., donate_argnums=...)``) or an intermediate value. ``docs/ragged_paged_attention_v3.md`` says
    what becomes of every argument.

    Parameters
    ----------
    queries : Array
        ``[T, Hq, D]``, f16, bf16, f32 or f8e4m3fn; D is a multiple of 8 up to 512.
    keys, values : Array
        ``[T, Hkv, D]``, the rows of the new tokens, in the dtype of `kv_cache`: for an 8-bit cache they are quantised
        already. Not read without `update_kv_cache`.
    kv_cache : Array
        Packed pages, ``[P, page_size, rows, packing, lanes]``, of the queries' dtype, or f8e4m3fn or f8e5m2 under f16
        and bf16 queries. "interleaved": ``rows * packing`` is ``2*Hkv``, K and V of a head in turn, and `lanes` is D,
        or D rounded up to a multiple of 128. "concatenated", for D = 64: ``rows * packing`` is Hkv, and each row of
        128 has K of a head and then V. Where `packing` does not divide these numbers, they are rounded up to a
        multiple of it.
    kv_lens : Array
        ``i32[S]``: keys per sequence, the new tokens included.
    page_indices : Array
        ``i32[S * M]``: the pages of each sequence, M per sequence. With `cu_kv_lens` ``i32[N]``.
    cu_q_lens : Array
        ``i32[S + 1]``: the first row of each sequence and, last, the end. Entries past that of the last sequence may
        hold anything.
    distribution : Array
        ``i32[3]``, of which the last is the number of sequences in use. The others, the ends of the sequences that only
        decode and that only prefill, select kernels on a TPU; here no result depends on them.
    attention_sink : Array or float, optional
        ``f32[Hq]`` or one number: the logit of one more column per row, whose value is 0.
    cu_kv_lens : Array, optional
        ``i32[S + 1]``: `page_indices` has the pages of sequence b from ``ceil(cu_kv_lens[b] / page_size)`` on.
    use_causal_mask : bool
        Without it every query attends to all keys of its sequence, or to those from the start of its `sliding_window`
        on. The call is then two custom calls.
    update_kv_cache : bool
        Without it the rows of the new tokens are in the cache already (layers that share a cache), and the cache is
        returned as it is.
    sm_scale : Array or float
        Multiplies ``q . k``; finite and greater than 0. An array of one number, which may be traced, multiplies in f32
        when the program runs.
    sliding_window : int, optional
        How many of the last keys a query attends to, its own included; at least 1.
    soft_cap : float, optional
        Scores become ``soft_cap * tanh(score / soft_cap)``; greater than 0.
    q_scale : Array or float, optional
        The queries are divided by it in f32, clipped to the range of the cache's dtype and rounded to that dtype;
        scores are multiplied by it. A number, or an array of one number or one per KV head, which may be traced.
    k_scale : Array or float, optional
        Multiplies the keys as they are read. A number or an array, as `q_scale`.
    v_scale : Array or float, optional
        Multiplies the values of an 8-bit cache as they are read, and otherwise `out`. A number or an array, as
        `q_scale`.
    out_dtype : dtype, optional
        The queries' dtype by default, bf16 for f8e4m3fn queries. Besides that only f16 and bf16, for f32 and f8e4m3fn
        queries.
    kv_layout : str, optional
        "interleaved" or "concatenated". Needed where the shape of `kv_cache` could be either: with D = 64 and 128
        lanes, if Hkv is 1 and the packing 2 or 4, or Hkv is 2 and the packing 4.
    pages_per_seq : int, optional
        With `cu_kv_lens`, the most pages that a sequence can have; N by default. The call gathers S times as many page
        numbers. Later keys of a longer sequence do not count.
    batch_invariant : bool
        As for `paged_attention`.
    custom_mask : Array, optional
        ``[N]``, without `use_causal_mask`: the masks ``[q, kv]`` of the sequences, one after another, not 0 where a
        query attends to a key. Of the keys of a sequence only the newest, those of its own rows, may be hidden: all
        older ones are visible, whatever the mask says (`tree_mask_from_custom_mask`).
    mask_aligned_to_cu_kv : bool
        Whether the rows of `custom_mask` are padded to the differences of `cu_kv_lens`.
    q_max : int, optional
        With `custom_mask`, the most rows of a sequence, T by default. A longer sequence is causal. The call unpacks
        ``S * q_max * q_max`` numbers.
    xai_temperature_len
        Has to be None: there is no temperature that grows with the position.
    softmax_dtype : dtype, optional
        Has to be None or f32, which is what the softmax is computed in.
    skip_kv_mask : bool
        Ignored, as a hint that lengths are multiples of a block; an error with `use_causal_mask`, as on a TPU.
    mask_value, chunk_prefill_size, d_block_sizes, p_block_sizes, m_block_sizes
        Parameters of the TPU kernel; accepted and ignored, as are the following.
    num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes, debug_mode
    disable_bounds_checks, disable_semaphore_checks

    Returns
    -------
    out : Array
        ``[T, Hq, D]``. Rows that belong to no sequence are 0.
    kv_cache : Array
        The updated cache, in the form of `kv_cache`.

    Raises
    ------
    ValueError
        Shapes or options do not fit together; the text names the argument and what was expected.
    TypeError
        An option that is a compile-time constant is traced.
    NotImplementedError
        An argument that is not supported, or a combination of dtypes or a head dimension that there is no kernel for.

    Notes
    -----
    All metadata stay on the device. Lengths and starts are clamped as in `paged_attention_update`; a new token whose
    page is not in the cache is not stored. Padding heads and elements of stored rows are 0.

    8-bit keys and values are stored as they are, with two exceptions: an infinity of f8e5m2 becomes the largest finite
    number, and a NaN may lose its sign. The magnitude of `v_scale` has to be between 2^-100 and 2^100.

    Examples
    --------
    A sequence of two keys in page 1 gets its third; one KV head in bf16, with packing 2.

    >>> import jax.numpy as jnp
    >>> from xla_attention.jax import ragged_paged_attention_v3
    >>> cache, row = jnp.zeros((2, 4, 1, 2, 128), jnp.bfloat16), jnp.ones((1, 1, 128), jnp.bfloat16)
    >>> sequence = jnp.array([3]), jnp.array([1]), jnp.array([0, 1]), jnp.array([1, 1, 1])
    >>> out, cache = ragged_paged_attention_v3(0 * row, row, 6 * row, cache, *sequence)
    >>> out[0, 0, 0].item(), cache[1, 2, 0, :, 0].tolist()
    (2.0, [1.0, 6.0])
    """
    del mask_value, chunk_prefill_size, d_block_sizes, p_block_sizes, m_block_sizes, num_kv_pages_per_block
    del num_queries_per_block, vmem_limit_bytes, debug_mode, disable_bounds_checks, disable_semaphore_checks
    reject_unsupported(xai_temperature_len, softmax_dtype)
    causal = bool(static_bool("use_causal_mask", use_causal_mask))
    if skip_kv_mask and causal:
        raise ValueError(f"{NAME}: skip_kv_mask is True, expected False with use_causal_mask")
    queries, keys, values, kv_cache = map(jnp.asarray, (queries, keys, values, kv_cache))
    validate_rows(queries, keys, values, kv_cache)
    form = packed_form(NAME, kv_cache, *keys.shape[1:], kv_layout)
    metadata = {
        "kv_lens": index_operand("kv_lens", kv_lens),
        "page_indices": index_operand("page_indices", page_indices),
        "cu_q_lens": index_operand("cu_q_lens", cu_q_lens),
        "distribution": index_operand("distribution", distribution),
        "cu_kv_lens": optional_index_operand("cu_kv_lens", cu_kv_lens),
    }
    validate_metadata(**metadata)
    sizes = (queries.shape[0], metadata["kv_lens"].shape[0])
    aligned = bool(static_bool("mask_aligned_to_cu_kv", mask_aligned_to_cu_kv))
    q_max = largest_tree(q_max, custom_mask, causal, sizes, aligned, cu_kv_lens)
    if sliding_window is not None:
        sliding_window = int(static_i64("sliding_window", sliding_window))
        validate_sliding_window(sliding_window, f"{NAME}: ")
    scale, array_scale = score_scale(sm_scale, q_scale, k_scale, keys.shape[1])
    static = _Static(
        scale=scale,
        causal=causal,
        update=bool(static_bool("update_kv_cache", update_kv_cache)),
        sliding_window=sliding_window,
        soft_cap=soft_cap_attribute(soft_cap),
        out_dtype=result_dtype(queries.dtype, out_dtype),
        form=form,
        pages_per_seq=max_pages_per_seq(pages_per_seq, cu_kv_lens),
        batch_invariant=bool(static_bool("batch_invariant", batch_invariant)),
        q_max=q_max,
        mask_aligned=aligned,
    )
    metadata["custom_mask"] = None if custom_mask is None else jnp.asarray(custom_mask)
    scales = _Scales(
        None if q_scale is None else per_head_scale("q_scale", q_scale, keys.shape[1]),
        array_scale,
        None if v_scale is None else per_head_scale("v_scale", v_scale, keys.shape[1]),
    )
    return _attend(
        static, queries, keys, values, kv_cache, per_head_sinks(attention_sink, queries.shape[1]), scales, metadata
    )


class _Static(NamedTuple):
    """The compile-time constants."""

    scale: np.float32
    causal: bool
    update: bool
    sliding_window: int | None
    soft_cap: float | None
    out_dtype: np.dtype
    form: PackedForm
    pages_per_seq: int | None
    batch_invariant: bool
    q_max: int | None
    mask_aligned: bool

    @property
    def paged(self) -> bool:
        """Whether the paged operators compute the mask."""
        return self.causal or self.q_max is not None


class _Scales(NamedTuple):
    """Scales as ``f32[1]`` or ``f32[Hkv]``; None for one that is left out."""

    query: Array | None  # divides the queries before they are rounded
    score: Array | None  # multiplies the scores, the static scale aside
    value: Array | None  # multiplies the values


@functools.partial(jax.jit, static_argnums=0)
def _attend(
    static: _Static,
    queries: Array,
    keys: Array,
    values: Array,
    kv_cache: Array,
    sinks: Array | None,
    scales: _Scales,
    metadata: dict[str, Array | None],
) -> tuple[Array, Array]:
    form = static.form
    num_rows, num_heads, head_dim = queries.shape
    padded_heads = num_heads // keys.shape[1] * form.num_heads
    kernel_dtype = queries.dtype if queries.dtype.itemsize == 4 else static.out_dtype
    # An update divides new values by the scale that it reads them with: exact for 8 bits (`_scaled_values`) alone.
    value_scale, out_scale = (scales.value, None) if kv_cache.dtype.itemsize == 1 else (None, scales.value)
    if scales.query is not None:
        queries = _quantized(queries, scales.query, kv_cache.dtype)
    queries = pad_heads(queries, padded_heads, form.head_dim)
    pages = unpack(kv_cache, form)
    kv_lens, cu_q_lens, num_seqs = metadata["kv_lens"], metadata["cu_q_lens"], metadata["distribution"][2:]
    page_indices, cu_kv_lens = metadata["page_indices"], metadata["cu_kv_lens"]
    tables = block_tables(page_indices, kv_lens.shape[0], cu_kv_lens, pages.shape[1], static.pages_per_seq)
    score = {
        "sinks": sinks if sinks is None or num_heads == padded_heads else jnp.pad(sinks, (0, padded_heads - num_heads)),
        "q_scale": _pad_scale(scales.score, form.num_heads),
        "v_scale": _pad_scale(value_scale, form.num_heads),
        "batch_invariant": static.batch_invariant,
        "out_dtype": kernel_dtype,
    }
    if static.update:
        slots = new_token_slots(kv_lens, tables, cu_q_lens, num_seqs, num_rows, pages.shape)
        if keys.dtype.itemsize == 1:
            # An update takes no 8-bit rows; bf16 holds all their numbers.
            keys, values = keys.astype(jnp.bfloat16), values.astype(jnp.bfloat16)
            values = _scaled_values(values, value_scale) if static.paged else values
        keys, values = (pad_heads(x, form.num_heads, form.head_dim) for x in (keys, values))
    if static.paged:
        options = {"scale": static.scale, "sliding_window": static.sliding_window, "soft_cap": static.soft_cap}
        if static.q_max is not None:
            options["tree_mask"] = tree_mask_from_custom_mask(
                metadata["custom_mask"],
                kv_lens,
                used_starts(cu_q_lens, num_seqs),
                static.q_max,
                mask_kv_lens=cu_kv_lens[1:] - cu_kv_lens[:-1] if static.mask_aligned else None,
            )
        sequences = kv_lens, tables, cu_q_lens, num_seqs
        if static.update:
            out, pages = paged_attention_update(queries, pages, *sequences, keys, values, slots, **options, **score)
        else:
            out = paged_attention(queries, pages, *sequences, **options, **score)
    else:
        if static.update:
            pages = kv_cache_update(pages, keys, values, slots)
        out = flash_attn_varlen(
            queries,
            pages,
            None,
            used_starts(cu_q_lens, num_seqs),
            seqused_k=kv_lens,
            block_table=tables,
            kv_layout="interleaved",
            softmax_scale=static.scale,
            softcap=0.0 if static.soft_cap is None else static.soft_cap,
            window=(-1 if static.sliding_window is None else static.sliding_window - 1, -1),
            **score,
        )
    out = out[:, :num_heads, :head_dim]
    if out_scale is not None:
        out = out.astype(jnp.float32) * _of_query_heads(out_scale, num_heads)
    return out.astype(static.out_dtype), pack(pages, form) if static.update else kv_cache


def _scaled_values(values: Array, v_scale: Array | None) -> Array:
    """8-bit values, as bf16, times the scale that an update divides them by.

    Product and quotient have errors far below half a step of an 8-bit number, so that the update stores its bits.
    """
    if v_scale is None:
        return values
    return (values.astype(jnp.float32) * v_scale[None, :, None]).astype(values.dtype)


def _quantized(queries: Array, q_scale: Array, dtype: np.dtype) -> Array:
    """The queries divided by the scale and rounded to the cache's dtype.

    They have their own dtype, which then holds the numbers exactly, where there is no kernel for that of the cache.
    """
    limits = jnp.finfo(dtype)
    quotient = queries.astype(jnp.float32) / _of_query_heads(q_scale, queries.shape[1])
    quantized = jnp.clip(quotient, limits.min.astype(np.float32), limits.max.astype(np.float32)).astype(dtype)
    has_kernel = dtype == jnp.float8_e4m3fn and queries.dtype.itemsize < 4
    # XLA:GPU makes one conversion of two, without the rounding; the barrier keeps them apart.
    return quantized if has_kernel else jax.lax.optimization_barrier(quantized).astype(queries.dtype)


def _of_query_heads(scale: Array, num_heads: int) -> Array:
    """A scale, ``f32[1]`` or one per KV head, to be broadcast with ``[T, Hq, D]``."""
    return (scale if scale.shape == (1,) else jnp.repeat(scale, num_heads // scale.shape[0]))[None, :, None]


def _pad_scale(scale: Array | None, num_heads: int) -> Array | None:
    """A scale of KV heads, with 1 for those that fill up a packed word."""
    if scale is None or scale.shape in ((1,), (num_heads,)):
        return scale
    return jnp.pad(scale, (0, num_heads - scale.shape[0]), constant_values=1.0)
