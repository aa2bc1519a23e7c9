"""The gradients of flash_attn_varlen in torch: the backward operator, and the autograd rule that calls it."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .._library import bias_sizes
from .._operators import operator
from .._options import length_hint, unsupported_gradient
from ._call import Call, Result, Workspace, f32_operand, index_operand
from ._define import define
from ._plan import planned

_OPERATOR = operator("xla_gpu_flash_attn_varlen_bwd")
_NEWER = ("q_offset", "k_start", "k_end", "bias")  # operands that are newer than torch's operator
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
    "q_offset",
    "k_start",
    "k_end",
    "bias",
)


@functools.cache
def _arguments() -> tuple[str, ...]:
    """The argument names of torch.ops.xla.flash_attn_varlen_op, in order."""
    return tuple(argument.name for argument in torch.ops.xla.flash_attn_varlen_op.default._schema.arguments)


def setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[torch.Tensor]) -> None:  # noqa: ANN401
    """Save in the context what `backward` needs."""
    arguments = dict(zip(_arguments(), inputs, strict=False))
    ctx.set_materialize_grads(False)
    ctx.options = {name: x for name, x in arguments.items() if not isinstance(x, torch.Tensor)}
    ctx.unsupported = _unsupported_gradient(arguments)
    ctx.save_for_backward(*(arguments.get(name) for name in _TENSORS), *output)


def _unsupported_gradient(arguments: dict[str, Any]) -> str | None:
    """Why the call has no gradient, see `unsupported_gradient`."""
    unsupported = unsupported_gradient(
        in_pages=arguments.get("block_table") is not None or arguments.get("kv_layout") is not None,
        is_scaled=any(arguments.get(name) is not None for name in ("q_scale", "k_scale", "v_scale")),
    )
    if unsupported is not None:
        return unsupported
    if arguments["q"].dtype.itemsize == 1 or arguments["k"].dtype.itemsize == 1:
        return "of 8-bit floats; there are gradients of f32, f16 and bf16"
    slopes = arguments.get("alibi_slopes")
    return "of alibi_slopes; detach them" if slopes is not None and slopes.requires_grad else None


def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
    """The gradients of all arguments of flash_attn_varlen_op."""
    if ctx.unsupported:
        raise NotImplementedError(f"flash_attn_varlen: there is no gradient {ctx.unsupported}")
    *tensors, out, lse = ctx.saved_tensors
    saved = dict(zip(_TENSORS, tensors, strict=True))
    sinks, bias = map(_arguments().index, ("sinks", "bias"))
    # `needs_input_grad` ends with the last argument that was given.
    if not any(ctx.needs_input_grad[sinks : sinks + 1]):
        saved["sinks"] = None  # the log-sum-exps include them
    has_bias_gradient = any(ctx.needs_input_grad[bias : bias + 1])
    names = ("max_seqlen_q", "max_seqlen_k", "softmax_scale", "is_causal", "window_left", "window_right", "softcap")
    out = out.to(saved["q"].dtype)
    arguments = (
        torch.zeros_like(out) if dout is None else dout.to(out.dtype),
        *(saved[name] for name in ("q", "k", "v")),
        out,
        lse,
        *(saved[name] for name in ("cu_seqlens_q", "cu_seqlens_k")),
        *(ctx.options[name] for name in names),
        *(saved[name] for name in ("seqused_k", "seqused_q", "leftpad_k", "alibi_slopes", "sinks")),
        dlse,
        ctx.options.get("top_left", False),
        ctx.options.get("deterministic", False),
        saved["q_offset"],
        None,
        saved["k_start"],
        saved["k_end"],
    )
    dbias = None
    if saved["bias"] is None:
        dq, dk, dv, dsinks = _gradients(*arguments)
    else:
        dq, dk, dv, dsinks, dbias = _gradients_with_bias(*arguments, saved["bias"], has_bias_gradient)
    grads: list[torch.Tensor | None] = [dq, dk, dv] + [None] * (len(_arguments()) - 3)
    if saved["sinks"] is not None:
        grads[sinks] = dsinks.to(saved["sinks"].dtype)
    if has_bias_gradient:
        grads[bias] = dbias
    return tuple(grads[: len(ctx.needs_input_grad)])


@planned
def _gradients(*arguments: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
    return torch.ops.xla_gpu.flash_attn_varlen_bwd(*arguments)


@planned
def _gradients_with_bias(*arguments: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
    return torch.ops.xla_gpu.flash_attn_varlen_bias_bwd(*arguments)


def _lower(
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
    q_offset: torch.Tensor | None = None,
    grad_dtype: torch.dtype | None = None,
    k_start: torch.Tensor | None = None,
    k_end: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_gradient: bool = False,
) -> Call:
    workspace = None
    if q.dim() == k.dim() == v.dim() == 3 and cu_seqlens_q.dim() == 1:
        rows = (q.shape[0], cu_seqlens_q.shape[0] - 1)
        mask = is_causal, (window_left, window_right)
        sizes = bias_sizes(bias, q.dtype, softcap, alibi_slopes, *mask, bias_gradient)
        workspace = Workspace(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, False, *rows, sizes)
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
            "q_offset": index_operand("q_offset", q_offset),
            "k_start": index_operand("k_start", k_start),
            "k_end": index_operand("k_end", k_end),
            "bias": bias,
        },
        (
            *(Result(tuple(x.shape), grad_dtype or x.dtype) for x in (q, k, v)),
            Result((0,) if sinks is None else tuple(sinks.shape), torch.float32),
            # The None is the place of the workspace.
            *([] if bias is None else [None, _bias_result(bias, bias_gradient, grad_dtype)]),
        ),
        _OPERATOR.typed(
            {
                "causal": is_causal,
                "deterministic": deterministic,
                "max_seqlen_k": length_hint(max_seqlen_k),
                "max_seqlen_q": length_hint(max_seqlen_q),
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


def _bias_result(bias: torch.Tensor, has_gradient: bool, grad_dtype: torch.dtype | None) -> Result:
    """`dbias`, empty where it is not asked for."""
    return Result(tuple(bias.shape) if has_gradient else (0,), grad_dtype or bias.dtype)


def _without_workspace(results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return (*results[:4], results[5])


_PARAMETERS = (
    f"{_OPERATOR.required_tensors()}, int max_seqlen_q, int max_seqlen_k, float softmax_scale, bool is_causal, "
    f"int window_left, int window_right, float softcap, {_OPERATOR.optional_tensors(without=_NEWER)}, "
    "bool top_left=False, bool deterministic=False, Tensor? q_offset=None, ScalarType? grad_dtype=None, "
    "Tensor? k_start=None, Tensor? k_end=None"
)
define(
    "xla_gpu::flash_attn_varlen_bwd",
    f"({_PARAMETERS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _lower,
    tuple,
)
# The same with one more result: exported programs have the operator above.
define(
    "xla_gpu::flash_attn_varlen_bias_bwd",
    f"({_PARAMETERS}, Tensor? bias=None, bool bias_gradient=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _lower,
    _without_workspace,
)
