"""flash_attn_varlen_func and its forms with packed operands: sequences of different lengths without padding."""

import torch

from ._attention import Options, Results, attention, require_shape, results


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Results:
    """Attention of packed sequences, as ``flash_attn.flash_attn_varlen_func`` of flash-attn 2.8.3 computes it.

    Sequence b has the query rows ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]`` and the key rows
    ``cu_seqlens_k[b] : cu_seqlens_k[b + 1]``; causal masks and windows are aligned to its bottom right corner.
    ``docs/semantics.md#flash_attn_varlen`` defines the result; there are gradients of q, k and v without a
    `block_table`.

    Parameters
    ----------
    q : Tensor
        ``[total_q, Hq, D]``
    k, v : Tensor
        ``[total_k, Hkv, D]`` and ``[total_k, Hkv, Dv]``; with a `block_table` ``[P, page_size, Hkv, D]`` and
        ``[P, page_size, Hkv, Dv]``, with any `page_size` (in flash-attn a multiple of 256).
    cu_seqlens_q, cu_seqlens_k : Tensor
        ``i32[B + 1]``, on the device: the first row of each sequence and, last, the end.
    max_seqlen_q, max_seqlen_k : int
        Lengths of the longest sequences, 0 for unknown. They choose kernels only: a number that is too small changes no
        result, while flash-attn leaves out the rows past it.
    block_table : Tensor, optional
        ``i32[B, M]``: the pages of each sequence, in order.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As for `flash_attn_func`.

    Returns
    -------
    out : Tensor
        ``[total_q, Hq, Dv]``; 0 in rows that attend to no key, and in rows of no sequence.
    softmax_lse : Tensor
        ``f32[Hq, total_q]``, +inf in these rows. Only with ``return_attn_probs=True``.
    S_dmask : Tensor
        Empty. Only with ``return_attn_probs=True``.

    Raises
    ------
    NotImplementedError, ValueError
        As for `flash_attn_func`; the gradient of a call with a `block_table` is a NotImplementedError.

    Examples
    --------
    >>> import torch
    >>> from xla_attention.torch.flash_attn_interface import flash_attn_varlen_func
    >>> q, starts = torch.randn(5, 4, 64), torch.tensor([0, 3, 5], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, starts, starts, 3, 3, causal=True).shape
    torch.Size([5, 4, 64])
    """
    options = Options(
        "flash_attn_varlen_func", softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p
    )
    pages = () if block_table is None else ("page_size",)
    first = "num_blocks" if pages else "total_k"
    require_shape(options.function, "q", q, ("total_q", "nheads", "headdim"))
    require_shape(options.function, "k", k, (first, *pages, "nheads_k", "headdim"))
    require_shape(options.function, "v", v, (first, *pages, "nheads_k", "headdim_v"))
    out, lse = attention(
        options,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        block_table=block_table,
    )
    return results(out, lse, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` with K and V in one tensor, as flash-attn's ``flash_attn_varlen_kvpacked_func``.

    Parameters
    ----------
    q : Tensor
        ``[total_q, Hq, D]``
    kv : Tensor
        ``[total_k, 2, Hkv, D]``
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As for `flash_attn_varlen_func`.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As for `flash_attn_func`.

    Returns
    -------
    out, softmax_lse, S_dmask : Tensor
        As of `flash_attn_varlen_func`.

    Raises
    ------
    NotImplementedError, ValueError
        As for `flash_attn_func`.
    """
    function = "flash_attn_varlen_kvpacked_func"
    require_shape(function, "q", q, ("total_q", "nheads", "headdim"))
    require_shape(function, "kv", kv, ("total_k", 2, "nheads_k", "headdim"))
    options = Options(function, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p)
    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return results(*attention(options, q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, **lengths), return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` with Q, K and V in one tensor, as flash-attn's ``flash_attn_varlen_qkvpacked_func``.

    Parameters
    ----------
    qkv : Tensor
        ``[total, 3, H, D]``
    cu_seqlens : Tensor
        ``i32[B + 1]``, on the device: the first row of each sequence and, last, the end.
    max_seqlen : int
        Length of the longest sequence, as `max_seqlen_q` of `flash_attn_varlen_func`.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As for `flash_attn_func`.

    Returns
    -------
    out, softmax_lse, S_dmask : Tensor
        As of `flash_attn_varlen_func`.

    Raises
    ------
    NotImplementedError, ValueError
        As for `flash_attn_func`.
    """
    function = "flash_attn_varlen_qkvpacked_func"
    require_shape(function, "qkv", qkv, ("total", 3, "nheads", "headdim"))
    options = Options(function, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p)
    lengths = {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    return results(*attention(options, *qkv.unbind(1), cu_seqlens, cu_seqlens, **lengths), return_attn_probs)
