"""The gradients of flash_attn_varlen in torch: an operator of its own, which autograd calls."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .._operators import operator
from .._options import gradient_refusal, length_advice
from ._call import Call, Result, Workspace, f32_operand, index_operand
from ._define import define

_OPERATOR = operator("xla_gpu_flash_attn_varlen_bwd")
_TENSORS = (
    "q",
    "k",
    "v",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_k",
    "seqused_q",
    "leftpad_k",
    "alibi_slopes",
    "sinks",
)


@functools.cache
def _arguments() -> tuple[str, ...]:
    """Of torch.ops.xla.flash_attn_varlen_op, in its order."""
    return tuple(argument.name for argument in torch.ops.xla.flash_attn_varlen_op.default._schema.arguments)


def remember(ctx: Any, inputs: Sequence[Any], output: Sequence[torch.Tensor]) -> None:  # noqa: ANN401
    """Put into the context what `gradients` needs."""
    given = dict(zip(_arguments(), inputs, strict=False))
    ctx.set_materialize_grads(False)
    ctx.given = {name: x for name, x in given.items() if not isinstance(x, torch.Tensor)}
    ctx.refused = _refusal(given)
    ctx.save_for_backward(*(given.get(name) for name in _TENSORS), *output)


def _refusal(given: dict[str, Any]) -> str | None:
    """What of a call has no gradient."""
    refused = gradient_refusal(
        in_pages=given.get("block_table") is not None or given.get("kv_layout") is not None,
        is_scaled=any(given.get(name) is not None for name in ("q_scale", "k_scale", "v_scale")),
    )
    if refused is not None:
        return refused
    if given["q"].dtype.itemsize == 1 or given["k"].dtype.itemsize == 1:
        return "of 8-bit floats; there are gradients of f32, f16 and bf16"
    slopes = given.get("alibi_slopes")
    return "of alibi_slopes; detach them" if slopes is not None and slopes.requires_grad else None


def gradients(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
    """The gradients of all arguments of flash_attn_varlen_op."""
    if ctx.refused:
        raise NotImplementedError(f"flash_attn_varlen: there is no gradient {ctx.refused}")
    *tensors, out, lse = ctx.saved_tensors
    saved = dict(zip(_TENSORS, tensors, strict=True))
    at = _arguments().index("sinks")
    # Arguments at the end that were not given are not counted.
    if not any(ctx.needs_input_grad[at : at + 1]):
        saved["sinks"] = None  # the log-sum-exps hold them
    names = ("max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal", "window_left", "window_right", "softcap")
    dq, dk, dv, dsinks = torch.ops.xla_gpu.flash_attn_varlen_bwd(
        torch.zeros_like(out) if dout is None else dout,
        *(saved[name] for name in ("q", "k", "v")),
        out,
        lse,
        *(saved[name] for name in ("cu_seqlens_q", "cu_seqlens_k")),
        *(ctx.given[name] for name in names),
        *(saved[name] for name in ("seqused_k", "seqused_q", "leftpad_k", "alibi_slopes", "sinks")),
        dlse,
        ctx.given.get("top_left", False),
        ctx.given.get("deterministic", False),
    )
    found: list[torch.Tensor | None] = [dq, dk, dv] + [None] * (len(_arguments()) - 3)
    if saved["sinks"] is not None:
        found[at] = dsinks.to(saved["sinks"].dtype)
    return tuple(found[: len(ctx.needs_input_grad)])


def _describe(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
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
    seqused_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    top_left: bool = False,
    deterministic: bool = False,
) -> Call:
    workspace = None
    if q.dim() == k.dim() == v.dim() == 3 and cu_seqlens_q.dim() == 1:
        rows = (q.shape[0], cu_seqlens_q.shape[0] - 1)
        workspace = Workspace(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, False, *rows)
    return Call(
        _OPERATOR.target,
        {
            "dout": dout,
            "q": q,
            "k": k,
            "v": v,
            "out": out,
            "softmax_lse": softmax_lse,
            "cu_seqlens_q": index_operand("cu_seqlens_q", cu_seqlens_q),
            "cu_seqlens_k": index_operand("cu_seqlens_k", cu_seqlens_k),
            "seqused_k": index_operand("seqused_k", seqused_k),
            "seqused_q": index_operand("seqused_q", seqused_q),
            "leftpad_k": index_operand("leftpad_k", leftpad_k),
            "alibi_slopes": f32_operand(alibi_slopes),
            "sinks": f32_operand(sinks),
            "dlse": dlse,
        },
        (
            *(Result(tuple(x.shape), x.dtype) for x in (q, k, v)),
            Result((0,) if sinks is None else tuple(sinks.shape), torch.float32),
        ),
        _OPERATOR.typed(
            {
                "causal": is_causal,
                "deterministic": deterministic,
                "max_seqlen_k": length_advice(max_seqlen_k),
                "max_seqlen_q": length_advice(max_seqlen_q),
                "softcap": softcap,
                "softmax_scale": softmax_scale,
                "top_left": top_left,
                "window_left": window_left,
                "window_right": window_right,
            }
        ),
        strided=(0, 1, 2, 3, 4),
        workspace=workspace,
    )


define(
    "xla_gpu::flash_attn_varlen_bwd",
    f"({_OPERATOR.required_tensors()}, int max_seqlen_q, int max_seqlen_k, float softmax_scale, bool is_causal, "
    f"int window_left, int window_right, float softcap, {_OPERATOR.optional_tensors()}, bool top_left=False, "
    "bool deterministic=False) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _describe,
    tuple,
)
