"""flash_attn_func and its forms with packed operands: batches of sequences of one length."""

import torch

from ._attention import Options, Results, attention, require_shape, results, starts


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Attention of a batch of sequences, as ``flash_attn.flash_attn_func`` of flash-attn 2.8.3 computes it.

    Query i of a sequence stands at the position ``i + Sk - S`` of the keys: causal masks and windows are aligned to the
    bottom right corner. ``docs/semantics.md#attention`` defines the result; there are gradients of q, k and v.

    Parameters
    ----------
    q : Tensor
        ``[B, S, Hq, D]``, f16, bf16 or f32, with any strides; D up to 512.
    k, v : Tensor
        ``[B, Sk, Hkv, D]`` and ``[B, Sk, Hkv, Dv]``, where Hkv divides Hq: query head h reads the KV head
        ``h // (Hq / Hkv)``. flash-attn has only ``Dv = D``.
    dropout_p : float
        Has to be 0: there is no dropout.
    softmax_scale : float, optional
        The factor of ``q . k``, greater than 0; ``D ** -0.5`` by default.
    causal : bool
        Whether a query attends to no key after its own position.
    window_size : (int, int)
        How many keys before and after its own position a query attends to; a negative number is no limit.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``; 0 or less switches it off.
    alibi_slopes : Tensor, optional
        ``[Hq]`` or ``[B, Hq]``: slopes of ALiBi, ``-slope * distance`` is added to a score. They have no gradient.
    deterministic : bool
        Whether the gradients have to have the same bits in every run; the results always have.
    return_attn_probs : bool
        Whether to return `softmax_lse` and an empty tensor too.

    Returns
    -------
    out : Tensor
        ``[B, S, Hq, Dv]``; 0 in rows that attend to no key.
    softmax_lse : Tensor
        ``f32[B, Hq, S]``: natural logarithm of the softmax denominators, +inf in rows that attend to no key. It has a
        gradient, which flash-attn leaves out. Only with ``return_attn_probs=True``.
    S_dmask : Tensor
        Empty, as in flash-attn without dropout. Only with ``return_attn_probs=True``.

    Raises
    ------
    NotImplementedError
        `dropout_p` other than 0, or a dtype or head dimension that there is no kernel for.
    ValueError
        Shapes, dtypes, devices or options do not fit together; the text names the argument and what was expected.

    Examples
    --------
    >>> import torch
    >>> from xla_attention.torch.flash_attn_interface import flash_attn_func
    >>> q, k, v = torch.randn(2, 3, 8, 64), torch.randn(2, 5, 2, 64), torch.randn(2, 5, 2, 64)
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 3, 8, 64])
    """
    options = Options(
        "flash_attn_func", softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p
    )
    return _dense(options, q, k, v, return_attn_probs)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` with K and V in one tensor, as ``flash_attn.flash_attn_kvpacked_func`` of flash-attn 2.8.3.

    Parameters
    ----------
    q : Tensor
        ``[B, S, Hq, D]``
    kv : Tensor
        ``[B, Sk, 2, Hkv, D]``
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As for `flash_attn_func`.

    Returns
    -------
    out, softmax_lse, S_dmask : Tensor
        As of `flash_attn_func`.

    Raises
    ------
    NotImplementedError, ValueError
        As for `flash_attn_func`.
    """
    options = Options(
        "flash_attn_kvpacked_func", softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p
    )
    require_shape(options.function, "kv", kv, ("batch", "seqlen", 2, "nheads_k", "headdim"))
    return _dense(options, q, *kv.unbind(2), return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` with Q, K and V in one tensor, as ``flash_attn.flash_attn_qkvpacked_func`` of flash-attn 2.8.3.

    Parameters
    ----------
    qkv : Tensor
        ``[B, S, 3, H, D]``
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
        As for `flash_attn_func`.

    Returns
    -------
    out, softmax_lse, S_dmask : Tensor
        As of `flash_attn_func`.

    Raises
    ------
    NotImplementedError, ValueError
        As for `flash_attn_func`.
    """
    options = Options(
        "flash_attn_qkvpacked_func", softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, dropout_p
    )
    require_shape(options.function, "qkv", qkv, ("batch", "seqlen", 3, "nheads", "headdim"))
    return _dense(options, *qkv.unbind(2), return_attn_probs)


def _dense(options: Options, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_attn_probs: bool) -> Results:
    require_shape(options.function, "q", q, ("batch", "seqlen", "nheads", "headdim"))
    batch, length_q = q.shape[:2]
    require_shape(options.function, "k", k, (batch, "seqlen_k", "nheads_k", "headdim"))
    length_k = k.shape[1]
    require_shape(options.function, "v", v, (batch, length_k, "nheads_k", "headdim_v"))
    cu_seqlens_q = starts(batch, length_q, q.device)
    cu_seqlens_k = cu_seqlens_q if length_k == length_q else starts(batch, length_k, q.device)
    packed = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = attention(options, *packed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=length_q, max_seqlen_k=length_k)
    return results(out.unflatten(0, (batch, length_q)), lse, return_attn_probs, batch)
