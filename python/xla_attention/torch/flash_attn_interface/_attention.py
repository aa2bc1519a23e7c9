"""What the functions share: one call of flash_attn_varlen with flash-attn's conventions."""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..._options import reject_dropout
from .._flash_attn_varlen import flash_attn_varlen

# `out`, or with `return_attn_probs` also `softmax_lse` and an empty tensor.
Results = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# flash-attn pads other head dimensions to a multiple of 8 too.
_HEAD_DIM_MULTIPLE = 8


class Options(NamedTuple):
    """The options of a function, as the caller gave them."""

    function: str
    softmax_scale: float | None
    causal: bool
    window_size: Sequence[int]
    softcap: float
    alibi_slopes: torch.Tensor | None
    deterministic: bool = False
    dropout_p: float = 0.0

    def window(self) -> tuple[int, int]:
        """`window_size` with -1 for every negative number: in flash-attn each of them means no limit."""
        try:
            left, right = (max(operator.index(size), -1) for size in self.window_size)
        except (TypeError, ValueError):
            text = f"{self.function}: window_size is {self.window_size!r}, expected (left, right), two integers"
            raise ValueError(text) from None
        return left, right


def attention(
    options: Options,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    **lengths: torch.Tensor | int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `softmax_lse` of packed queries."""
    reject_dropout(options.function, "dropout_p", options.dropout_p)
    value_dim = v.shape[-1]
    scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    out, lse = flash_attn_varlen(
        *map(padded, (q, k, v)),
        cu_seqlens_q,
        cu_seqlens_k,
        softmax_scale=scale,
        causal=options.causal,
        window=options.window(),
        softcap=max(options.softcap, 0.0),
        alibi_slopes=options.alibi_slopes,
        deterministic=options.deterministic,
        return_lse=True,
        **lengths,
    )
    return out[..., :value_dim], lse


def padded(x: torch.Tensor) -> torch.Tensor:
    """The tensor with zeros up to a head dimension that there is a kernel for."""
    missing = -x.shape[-1] % _HEAD_DIM_MULTIPLE
    return F.pad(x, (0, missing)) if missing else x


def starts(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """`cu_seqlens` of a batch of sequences of one length."""
    if not length:
        return torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)


def returned_lse(lse: torch.Tensor, batch: int | None = None) -> torch.Tensor:
    """`softmax_lse` as flash-attn has it: +inf in rows that attend to no key, and ``[B, Hq, S]`` of a dense batch."""
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    return (
        lse if batch is None else lse.unflatten(1, (batch, lse.shape[1] // max(batch, 1))).transpose(0, 1).contiguous()
    )


def results(out: torch.Tensor, lse: torch.Tensor, return_attn_probs: bool, batch: int | None = None) -> Results:
    """What a function returns. The third tensor is empty: without dropout, flash-attn returns no probabilities."""
    return (out, returned_lse(lse, batch), out.new_empty(0)) if return_attn_probs else out


def require_shape(function: str, name: str, tensor: torch.Tensor, shape: Sequence[int | str]) -> None:
    """Raise ValueError unless the tensor has this shape, where a name stands for any size."""
    fits = tensor.dim() == len(shape) and all(
        isinstance(expected, str) or size == expected for size, expected in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{function}: {name} has shape {list(tensor.shape)}, expected [{expected}]")
