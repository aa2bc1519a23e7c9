"""simple_add in torch: the example of an operator."""

import torch

from .._operators import operator
from ._call import Call, Result
from ._define import define

_OPERATOR = operator("xla_gpu_simple_add")


def simple_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a + b`` of two tensors of one shape and dtype, without broadcasting.

    Parameters
    ----------
    a, b : Tensor
        f16, bf16, f32, f64, i8, u8, i32 or i64, any shape.

    Returns
    -------
    Tensor
        Of the same shape and dtype; integers wrap.

    Examples
    --------
    >>> import torch
    >>> from xla_attention.torch import simple_add
    >>> simple_add(torch.arange(3), torch.ones(3, dtype=torch.int64))
    tensor([1, 2, 3])
    """
    return torch.ops.xla_gpu.simple_add(a, b)


def _describe(a: torch.Tensor, b: torch.Tensor) -> Call:
    return Call(_OPERATOR.target, {"a": a, "b": b}, (Result(a.shape, a.dtype),), {})


define(
    "xla_gpu::simple_add",
    f"({_OPERATOR.required_tensors()}) -> Tensor",
    _describe,
    lambda results: results[0],
    backward=lambda _, gradient: (gradient, gradient),
)
