"""flash_attn_varlen in torch."""

import torch

from .._documentation import documented
from .._library import bias_sizes
from .._operators import operator
from .._options import (
    kv_layout_number,
    length_hint,
    reject_dropout,
    require_key_lengths,
    validate_values,
    window_pair,
)
from ._call import Call, Result, Workspace, f32_operand, index_operand, output_dtype, scale_operand
from ._define import define, scale_tensor
from ._differentiable import differentiable
from ._flash_attn_varlen_bwd import backward, setup_context
from ._plan import planned

_OPERATOR = operator("xla_gpu_flash_attn_varlen")
_NEWER = ("q_offset", "k_start", "k_end", "bias")  # operands that are newer than torch's operator


@documented("xla_gpu_flash_attn_varlen")
@planned
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
    q_offset: torch.Tensor | None = None,
    k_start: torch.Tensor | None = None,
    k_end: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    top_left: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a ragged batch of query rows over packed keys, or over the pages of a cache.

    Sequence b has the query rows ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]`` and, with packed keys, the key rows
    ``cu_seqlens_k[b] : cu_seqlens_k[b + 1]``. Names and meaning follow ``flash_attn_varlen_func`` of flash-attn;
    ``docs/semantics.md#flash_attn_varlen`` defines the results, and ``docs/semantics.md#flash_attn_varlen_bwd`` the
    gradients. The operator is ``torch.ops.xla.flash_attn_varlen_op``, which always returns `softmax_lse` too.

    Parameters
    ----------
    q : Tensor
    k, v : Tensor
        ``[Tk, Hkv, D]`` and ``[Tk, Hkv, Dv]``; with a `block_table` ``[P, page_size, Hkv, D]`` and
        ``[P, page_size, Hkv, Dv]``, or with `kv_layout` the one buffer as k, and None as v. Their dtype is that of q;
        for f16 and bf16 queries it may also be f8e4m3fn or f8e5m2. On CPU and CUDA they may be strided, so that
        ``kv[0], kv[1]`` of one buffer are not copied.
    cu_seqlens_q, cu_seqlens_k : Tensor
        ``i32[B + 1]``: the first row of each sequence and, last, the end. `cu_seqlens_k` defaults to `cu_seqlens_q`
        for packed keys. With a `block_table`, `seqused_k` has the number of keys per sequence; without `seqused_k` it
        is ``cu_seqlens_k[b + 1] - cu_seqlens_k[b]``.
    max_seqlen_q, max_seqlen_k : int
        Lengths of the longest sequences, 0 for unknown, rounded up to a power of two. They choose kernels and tile
        sizes, never which rows or keys count.
    softmax_scale : float, optional
        ... ``D ** -0.5`` by default.
    causal : bool
    window : (int, int)
        How many keys before and after its own position a query attends to; -1 for no limit.
    softcap : float
        ... 0 switches it off.
    seqused_q : Tensor, optional
    seqused_k : Tensor, optional
    block_table : Tensor, optional
    kv_layout : str, optional
        The layout of a cache with K and V in one buffer: ``"interleaved"`` ``[P, page_size, 2*Hkv, D]`` with K of head
        h at 2h and V at 2h+1, ``"stacked"`` ``[2, P, page_size, Hkv, D]``, ``"per_page"``
        ``[P, 2, page_size, Hkv, D]``. Needs a `block_table`.
    leftpad_k : Tensor, optional
    alibi_slopes : Tensor, optional
    sinks : Tensor, optional
    q_scale : Tensor or float, optional
    k_scale : Tensor or float, optional
    v_scale : Tensor or float, optional
    q_offset : Tensor, optional
        ``i32[B]``: query i of sequence b stands at key ``i + q_offset[b]``, for causal masks, windows and slopes. Any
        sign; for shards of longer sequences.
    k_start : Tensor, optional
    k_end : Tensor, optional
    bias : Tensor, optional
        ... It has a gradient. A bias of -inf hides a key; ``docs/semantics.md#bias`` has more.
    top_left : bool
    deterministic : bool
        Whether the gradients have to be deterministic; the results always are.
    batch_invariant : bool
    return_lse : bool
        Whether to return `softmax_lse` too.
    out_dtype : torch.dtype, optional
        bf16 (the default) or f16 for f8e4m3fn queries; otherwise q's dtype (the default) or f32, for partial results
        that are merged. The gradients round a cotangent of f32 to q's dtype. For long f8e4m3fn sequences with D 128 or
        256, Hopper multiplies 8-bit numbers on tensor cores: the error of `out` is then about 2 %, that of
        `softmax_lse` up to 5e-4 (``docs/semantics.md#fp8-queries``).
    dropout_p : float
        Has to be 0, there is no dropout; flash-attn has this argument.

    Returns
    -------
    out : Tensor
        ``[Tq, Hq, Dv]``. Rows that attend to no key, and rows that belong to no sequence, are 0.
    softmax_lse : Tensor
        ``f32[Hq, Tq]``: natural logarithm of the softmax denominators, sinks included; -inf for rows that attend to
        neither a key nor a sink. Only with ``return_lse=True``.

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
    reject_dropout("xla_gpu_flash_attn_varlen", "dropout_p", dropout_p)
    validate_values(v, kv_layout, "a tensor")
    if cu_seqlens_k is None:
        require_key_lengths(block_table, seqused_k)
        cu_seqlens_k = cu_seqlens_q if block_table is None else cu_seqlens_q.new_empty(0)
    out, lse = _call_operator(
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
        q_offset,
        k_start,
        k_end,
        bias,
    )
    return (out, lse) if return_lse else out


def _lower(
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
    q_offset: torch.Tensor | None = None,
    k_start: torch.Tensor | None = None,
    k_end: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Call:
    value_dim = v.shape[-1] if v.dim() > 1 else k.shape[-1]
    workspace = None
    if q.dim() == 3 and k.dim() >= 3 and cu_seqlens_q.dim() == 1:
        heads = k.shape[-2] // 2 if kv_layout == "interleaved" else k.shape[-2]
        dims = (q.shape[2], value_dim)
        rows = (q.shape[0], cu_seqlens_q.shape[0] - 1)
        mask = is_causal, (window_left, window_right)
        sizes = bias_sizes(bias, q.dtype, softcap, alibi_slopes, *mask)
        workspace = Workspace(q.shape[1], heads, *dims, q.dtype, batch_invariant, *rows, sizes)
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
            "q_offset": index_operand("q_offset", q_offset),
            "k_start": index_operand("k_start", k_start),
            "k_end": index_operand("k_end", k_end),
            "bias": bias,
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
                "max_seqlen_k": length_hint(max_seqlen_k),
                "max_seqlen_q": length_hint(max_seqlen_q),
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


_is_ours = define(
    "xla::flash_attn_varlen_op",
    f"({_OPERATOR.required_tensors()}, int max_seqlen_q, int max_seqlen_k, float softmax_scale, bool is_causal, "
    # An option that is newer than the operator is its last parameter, because programs pass options by position.
    f"int window_left, int window_right, float softcap, {_OPERATOR.optional_tensors(without=_NEWER)}, "
    "bool top_left=False, bool deterministic=False, bool batch_invariant=False, str? kv_layout=None, "
    "ScalarType? out_dtype=None, Tensor? q_offset=None, Tensor? k_start=None, Tensor? k_end=None, Tensor? bias=None) "
    "-> (Tensor, Tensor)",
    _lower,
    tuple,
    backward=backward,
    setup_context=setup_context,
)
_call_operator = torch.ops.xla.flash_attn_varlen_op
if _is_ours:
    _call_operator = differentiable(_call_operator, setup_context, backward)
