"""Definition of torch.library operators from a schema and a lowering to a `Call`."""

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _eager, _in_place, _xla
from ._call import Call

_LOG = logging.getLogger("xla_attention.torch")

Lowering = Callable[..., Call]
Tensors = Sequence[torch.Tensor | None]


@functools.cache
def fragment(namespace: str) -> torch.library.Library:
    """Our fragment of a namespace; other libraries may define operators in it too."""
    return torch.library.Library(namespace, "FRAGMENT")


def exists(namespace: str, name: str, overload: str = "default") -> bool:
    """Whether the operator is defined already."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet is not None and overload in packet.overloads()


def define(
    name: str,
    schema: str,
    lower: Lowering,
    wrap_results: Callable[[Tensors], Any],
    *,
    in_place: bool = False,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    alternative: str = "",
) -> bool:
    """Define an operator for the CPU, CUDA, XLA and tracing, unless it is defined already; whether it does.

    Parameters
    ----------
    name
        ``namespace::operator`` or ``namespace::operator.overload``.
    schema
        The arguments and results, which follow the name.
    lower
        The `Call` of the operator's arguments.
    wrap_results
        What the operator returns, from the call's results.
    in_place
        Whether it mutates the operands that results alias. torch_xla supports no such operator outside compiled code,
        and torch.library no `backward` of one.
    backward
        The gradients of all arguments, see torch.library.register_autograd; without it, backward raises
        NotImplementedError.
    setup_context
        Saves in the context what `backward` needs.
    alternative
        An operator that has a gradient, for the error of one without `backward`.
    """
    namespace, _, operator = name.partition("::")
    base, _, overload = operator.partition(".")
    if exists(namespace, base, overload or "default"):
        _LOG.warning("%s is defined already and kept; ours is not used", name)
        return False
    library = fragment(namespace)
    library.define(operator + schema)

    def eager(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return wrap_results(_eager.run(lower(*arguments, **options), in_place=in_place))

    def xla(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return wrap_results(_xla.run(lower(*arguments, **options)))

    def fake(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        call = lower(*arguments, **options)
        device = call.device()
        _reject_openxla(call.target, device)
        call.validate()
        results = [None if r is None else torch.empty(r.shape, dtype=r.dtype, device=device) for r in call.results]
        return wrap_results(results)

    library.impl(operator, eager, "CPU")
    library.impl(operator, eager, "CUDA")
    no_gradient = _no_gradient(name, alternative)
    if in_place and not schema.endswith("-> ()"):
        packet = getattr(getattr(torch.ops, namespace), base)
        _in_place.reject_gradients(library, operator, getattr(packet, overload or "default"), no_gradient)
    elif not in_place:
        library.impl(operator, xla, "XLA")
        setup_context = setup_context or _save_device
        torch.library.register_autograd(name, backward or no_gradient, setup_context=setup_context, lib=library)
    torch.library.register_fake(name, fake, lib=library)
    return True


def _reject_openxla(target: str, device: torch.device) -> None:
    """Raise ValueError for CUDA tensors under ``backend="openxla"``: torch_xla would warn and compile nothing."""
    if device.type != "cuda" or "torch_xla" not in sys.modules:
        return
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        # Dynamo is not tracing.
        return
    if getattr(backend, "_compiler_name", None) == "openxla":
        raise ValueError(
            f"{target}: its tensors are on {device}, and backend='openxla' compiles for the XLA device alone; move "
            "them there (tensor.to('xla')), or use backend='inductor', which calls the CUDA kernels"
        )


def _save_device(ctx: Any, inputs: Sequence[Any], output: Any) -> None:  # noqa: ANN401
    ctx.device = next(x.device for x in inputs if isinstance(x, torch.Tensor))


def _no_gradient(name: str, alternative: str) -> Callable[..., Any]:
    """A backward function that raises NotImplementedError."""
    advice = "detach the operands, or use torch.no_grad()"
    if alternative:
        advice = f"use {alternative}, {advice}"

    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ANN401
        raise NotImplementedError(f"{name}: its gradient is not built yet on {ctx.device}; {advice}")

    return backward


def scale_tensor(scale: torch.Tensor | float | None, like: torch.Tensor) -> torch.Tensor | None:
    """A scale as a tensor on the device of `like`."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale
    return torch.full((1,), scale, dtype=torch.float32, device=like.device)
