"""Autograd of operators that mutate operands, for which torch.library has no registration."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

# A gradient function as torch.library takes it: the context, then the gradients of the results.
Backward = Callable[..., Any]


def increment_versions(written: Iterable[torch.Tensor]) -> None:
    """Let autograd detect that tensors which it may have saved for the backward pass have been modified."""
    for tensor in written:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def reject_gradients(
    library: torch.library.Library, operator: str, op: torch._ops.OpOverload, no_gradient: Backward
) -> None:
    """Register an autograd kernel whose results call `no_gradient`, which raises, in the backward pass.

    A mutated operand has no gradient of the call: it requires a gradient afterwards if it did before.
    """

    def autograd(keyset: torch._C.DispatchKeySet, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        with torch._C._AutoDispatchBelowAutograd():
            results = op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments, **options)
        operand = next((x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad), None)
        if results is None or operand is None or not torch.is_grad_enabled():
            return results
        return _NoGradient.apply(no_gradient, operand, *(results if isinstance(results, tuple) else (results,)))

    library.impl(operator, autograd, "Autograd", with_keyset=True)


class _NoGradient(torch.autograd.Function):
    """The identity of the results, whose backward function is `no_gradient`."""

    @staticmethod
    def forward(ctx: Any, no_gradient: Backward, operand: torch.Tensor, *results: torch.Tensor) -> Any:  # noqa: ANN401
        ctx.device, ctx.no_gradient = operand.device, no_gradient
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # noqa: ANN401
        return ctx.no_gradient(ctx, *gradients)
