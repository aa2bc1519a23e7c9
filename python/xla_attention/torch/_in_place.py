"""What autograd has to know of an operator that writes to operands; torch.library offers nothing for such operators."""

from collections.abc import Callable
from typing import Any

import torch

# A gradient function as torch.library takes it: the context, then the gradients of the results.
Backward = Callable[..., Any]


def refuse_gradients(
    library: torch.library.Library, operator: str, op: torch._ops.OpOverload, refuse: Backward
) -> None:
    """Let `refuse` raise where a gradient is asked for through the results.

    What is written carries no gradient: after the call the operand requires one if it did before.
    """

    def autograd(keyset: torch._C.DispatchKeySet, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        with torch._C._AutoDispatchBelowAutograd():
            results = op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments, **options)
        if results is None or not torch.is_grad_enabled() or not torch._C._any_requires_grad(*arguments):
            return results
        operand = next(x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad)
        return _Refusing.apply(refuse, operand, *(results if isinstance(results, tuple) else (results,)))

    library.impl(operator, autograd, "Autograd", with_keyset=True)


class _Refusing(torch.autograd.Function):
    """The results, whose gradient is that of `refuse`."""

    @staticmethod
    def forward(ctx: Any, refuse: Backward, operand: torch.Tensor, *results: torch.Tensor) -> Any:  # noqa: ANN401
        ctx.device, ctx.refuse = operand.device, refuse
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # noqa: ANN401
        return ctx.refuse(ctx, *gradients)
