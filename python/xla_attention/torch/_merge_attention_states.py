"""merge_attention_states in torch."""

import torch

from .._documentation import documented
from .._operators import operator
from ._call import Call, Result
from ._define import define
from ._plan import planned

_OPERATOR = operator("xla_gpu_merge_attention_states")


@documented("xla_gpu_merge_attention_states")
@planned
def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention of the same queries over two disjoint sets of keys into that over both.

    ``docs/semantics.md#merge_attention_states`` defines the result.

    Parameters
    ----------
    out_a : Tensor
    out_b : Tensor
    lse_a : Tensor
    lse_b : Tensor

    Returns
    -------
    out : Tensor
        ``[n, h, d]``, of the parts' dtype; 0 where neither part attended to a key.
    lse : Tensor
        ``f32[h, n]``; -inf where neither part attended to a key.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices do not fit together; the text names the operand.

    Examples
    --------
    >>> import torch
    >>> from xla_attention.torch import merge_attention_states
    >>> ones, even = torch.ones(3, 2, 64), torch.zeros(2, 3)
    >>> out, lse = merge_attention_states(ones, even, 3 * ones, even)
    >>> out[0, 0, 0].item(), round(lse[0, 0].exp().item(), 5)
    (2.0, 2.0)
    """
    return torch.ops.xla_gpu.merge_attention_states(out_a, lse_a, out_b, lse_b)


def _lower(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> Call:
    results = (Result(out_a.shape, out_a.dtype), Result(lse_a.shape, torch.float32))
    operands = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    return Call(_OPERATOR.target, operands, results, {})


define(
    "xla_gpu::merge_attention_states",
    f"({_OPERATOR.required_tensors()}) -> (Tensor, Tensor)",
    _lower,
    tuple,
    alternative="one flash_attn_varlen over all keys",
)
