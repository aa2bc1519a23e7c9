"""flash_attn_varlen in torch."""

import torch

from .._documentation import documented
from .._operators import operator
from .._options import (
    kv_layout_number,
    length_advice,
    refuse_dropout,
    refuse_untold_lengths,
    refuse_values,
    window_pair,
)
from ._call import Call, Result, Workspace, f32_operand, index_operand, output_dtype, scale_operand
from ._define import define, scale_tensor
from ._flash_attn_varlen_bwd import gradients, remember

_OPERATOR = operator("xla_gpu_flash_attn_varlen")


@documented("xla_gpu_flash_attn_varlen")
def flash_attn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    kv_layout: str | None = None,
    leftpad_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    top_left: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a ragged batch of query rows over packed keys, or over the pages of a cache.

    Sequence b has the query rows ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]`` and, with packed keys, the key rows
    ``cu_seqlens_k[b] : cu_seqlens_k[b + 1]``. Names and meaning follow ``flash_attn_varlen_func`` of flash-attn. The
    operator is ``torch.ops.xla.flash_attn_varlen_op``, which also returns the lse.

    Parameters
    ----------
    q : Tensor
    k, v : Tensor
        ``[Tk, Hkv, D]`` and ``[Tk, Hkv, Dv]``; with a `block_table` ``[P, page_size, Hkv, D]`` and
        ``[P, page_size, Hkv, Dv]``, or with `kv_layout` one buffer as k, and v None. Of q's dtype; f16 and bf16 queries
        may also have f8e4m3fn or f8e5m2 keys and values, f8e4m3fn queries have f8e4m3fn ones. On CPU and CUDA pages,
        rows and heads may be apart, so that ``kv[0], kv[1]`` of one buffer are not copied.
    cu_seqlens_q, cu_seqlens_k : Tensor
        ``i32[B + 1]``: where each sequence starts and, last, the end. Without `cu_seqlens_k`, keys are packed like the
        queries, or, with a `block_table`, `seqused_k` tells how many there are. With both, it is not read.
    max_seqlen_q, max_seqlen_k : int
        Lengths of the longest sequences, 0 for unknown: advice that chooses tile sizes, rounded up to a power of two.
    softmax_scale : float, optional
        ... ``D ** -0.5`` by default.
    causal : bool
    window : (int, int)
        How many keys before and after its own position a query sees; -1 is all of them.
    softcap : float
        ... 0 is off.
    seqused_q : Tensor, optional
    seqused_k : Tensor, optional
    block_table : Tensor, optional
    kv_layout : str, optional
        One buffer holds K and V: ``"interleaved"`` ``[P, page_size, 2*Hkv, D]``, ``"stacked"``
        ``[2, P, page_size, Hkv, D]``, ``"per_page"`` ``[P, 2, page_size, Hkv, D]``. Needs a `block_table`.
    leftpad_k : Tensor, optional
    alibi_slopes : Tensor, optional
    sinks : Tensor, optional
    q_scale : Tensor or float, optional
    k_scale : Tensor or float, optional
    v_scale : Tensor or float, optional
    top_left : bool
    deterministic : bool
        Asks for a deterministic gradient; the result itself always is.
    batch_invariant : bool
    return_lse : bool
        Return the logarithm of the softmax denominators as well.
    out_dtype : torch.dtype, optional
        bf16 (the default) or f16 with f8e4m3fn queries; otherwise q's dtype and nothing else.
        Hopper multiplies long f8e4m3fn sequences of D 128 and 256 as they are, weights included: `out` is off by some
        2 % then, a log-sum-exp by up to 5e-4.
    dropout_p : float
        0.0; there is no dropout.

    Returns
    -------
    out : Tensor
        ``[Tq, Hq, Dv]``. Rows that see no key, and rows that belong to no sequence, are 0.
    softmax_lse : Tensor
        ``f32[Hq, Tq]``, natural logarithm; -inf for such rows (the sink's logit where a row of a sequence sees only
        that). Only with ``return_lse=True``.

    Raises
    ------
    ValueError
        Shapes, dtypes, devices or options do not fit together; the text names the operand and what was expected.
    NotImplementedError
        A combination of dtypes, or a head dimension, that there is no kernel for; dropout.

    Examples
    --------
    >>> import torch
    >>> from xla_attention.torch import flash_attn_varlen
    >>> q, k, v = (torch.randn(5, 4, 64) for _ in range(3))
    >>> flash_attn_varlen(q, k, v, torch.tensor([0, 3, 5]), causal=True).shape
    torch.Size([5, 4, 64])
    """
    refuse_dropout(dropout_p)
    refuse_values(v, kv_layout, "a tensor")
    if cu_seqlens_k is None:
        refuse_untold_lengths(block_table, seqused_k)
        cu_seqlens_k = cu_seqlens_q if block_table is None else cu_seqlens_q.new_empty(0)
    out, lse = torch.ops.xla.flash_attn_varlen_op(
        q,
        k,
        k.new_empty(0) if v is None else v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal,
        *window_pair(window),
        softcap,
        seqused_k,
        block_table,
        seqused_q,
        leftpad_k,
        alibi_slopes,
        sinks,
        *(scale_tensor(s, q) for s in (q_scale, k_scale, v_scale)),
        top_left,
        deterministic,
        batch_invariant,
        kv_layout,
        out_dtype,
    )
    return (out, lse) if return_lse else out


def _describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    top_left: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    kv_layout: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Call:
    value_dim = v.shape[-1] if v.dim() > 1 else k.shape[-1]
    workspace = None
    if q.dim() == 3 and k.dim() >= 3 and cu_seqlens_q.dim() == 1:
        heads = k.shape[-2] // 2 if kv_layout == "interleaved" else k.shape[-2]
        dims = (q.shape[2], value_dim)
        rows = (q.shape[0], cu_seqlens_q.shape[0] - 1)
        workspace = Workspace(q.shape[1], heads, *dims, q.dtype, batch_invariant, *rows)
    return Call(
        _OPERATOR.target,
        {
            "q": q,
            "k": k,
            "v": v,
            "cu_seqlens_q": index_operand("cu_seqlens_q", cu_seqlens_q),
            "cu_seqlens_k": index_operand("cu_seqlens_k", cu_seqlens_k),
            "seqused_k": index_operand("seqused_k", seqused_k),
            "block_table": index_operand("block_table", block_table),
            "seqused_q": index_operand("seqused_q", seqused_q),
            "leftpad_k": index_operand("leftpad_k", leftpad_k),
            "alibi_slopes": f32_operand(alibi_slopes),
            "sinks": f32_operand(sinks),
            "q_scale": scale_operand(q_scale),
            "k_scale": scale_operand(k_scale),
            "v_scale": scale_operand(v_scale),
        },
        (
            Result((*q.shape[:-1], value_dim), output_dtype(q, out_dtype)),
            Result((*q.shape[1:2], *q.shape[:1]), torch.float32),
        ),
        _OPERATOR.typed(
            {
                "batch_invariant": batch_invariant,
                "causal": is_causal,
                "kv_layout": kv_layout_number(kv_layout),
                "max_seqlen_k": length_advice(max_seqlen_k),
                "max_seqlen_q": length_advice(max_seqlen_q),
                "softcap": softcap,
                "softmax_scale": softmax_scale,
                "top_left": top_left,
                "window_left": window_left,
                "window_right": window_right,
            }
        ),
        strided=(0, 1, 2),
        workspace=workspace,
    )


define(
    "xla::flash_attn_varlen_op",
    f"({_OPERATOR.required_tensors()}, int max_seqlen_q, int max_seqlen_k, float softmax_scale, bool is_causal, "
    f"int window_left, int window_right, float softcap, {_OPERATOR.optional_tensors()}, bool top_left=False, "
    "bool deterministic=False, bool batch_invariant=False, str? kv_layout=None, ScalarType? out_dtype=None) "
    "-> (Tensor, Tensor)",
    _describe,
    tuple,
    backward=gradients,
    remember=remember,
)
