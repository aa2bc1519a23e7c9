"""Gradients of eager calls past torch.library's autograd rule.

That rule adds the default arguments to those of every call, for which it reads the schema's arguments twice per
argument (`fill_defaults` in torch/_library/utils.py of torch 2.9). With thirty arguments that takes a quarter of a
millisecond, ten times as long as a planned call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._plan import divide, is_observed, planned


def differentiable(
    operator: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that makes calls of `operator`, which takes all of its arguments by position.

    Eager calls with operands that require a gradient run in a torch.autograd.Function with the given functions, which
    are those of the operator's autograd rule; all other calls go through torch's dispatcher.
    """
    run = planned(lambda *arguments: operator(*arguments))

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:  # noqa: ANN401
            # Gradients are disabled here, so the operator's own rule is not used.
            results = run(*arguments)
            setup_context(ctx, arguments, results)
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ANN401
            return backward(ctx, *gradients)

    def call(*arguments: Any) -> Any:  # noqa: ANN401
        return Differentiable.apply(*arguments) if _is_direct(arguments) else operator(*arguments)

    return call


def _is_direct(arguments: Sequence[Any]) -> bool:
    """Whether some operand requires a gradient, and nothing of torch has to see the operator's call."""
    tensors: list[torch.Tensor] = []
    return (
        torch.is_grad_enabled()
        and not is_observed()
        and divide(arguments, [], tensors, needs_gradient=False)
        and any(tensor.requires_grad for tensor in tensors)
    )
