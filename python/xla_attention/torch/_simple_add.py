"""simple_add in torch, the smallest example of an operator."""

import torch

from .._operators import operator
from ._call import Call, Result
from ._define import define
from ._plan import planned

_OPERATOR = operator("xla_gpu_simple_add")


@planned
def simple_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a + b`` of two tensors of one shape and dtype, without broadcasting.

    ``docs/semantics.md#simple_add`` defines the result.

    Parameters
    ----------
    a, b : Tensor
        f16, bf16, f32, f64, i8, u8, i32 or i64, any shape.

    Returns
    -------
    Tensor
        The sum, of the same shape and dtype; integers wrap.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices differ, or there is no kernel for the dtype.

    Examples
    --------
    >>> import torch
    >>> from xla_attention.torch import simple_add
    >>> simple_add(torch.arange(3), torch.ones(3, dtype=torch.int64))
    tensor([1, 2, 3])
    """
    return torch.ops.xla_gpu.simple_add(a, b)


def _lower(a: torch.Tensor, b: torch.Tensor) -> Call:
    return Call(_OPERATOR.target, {"a": a, "b": b}, (Result(a.shape, a.dtype),), {})


define(
    "xla_gpu::simple_add",
    f"({_OPERATOR.required_tensors()}) -> Tensor",
    _lower,
    lambda results: results[0],
    backward=lambda _, gradient: (gradient, gradient),
)
