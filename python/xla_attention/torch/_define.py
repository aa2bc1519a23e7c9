"""Operators of torch.library, out of a schema and a function that describes the call."""

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _eager, _in_place, _xla
from ._call import Call

_LOG = logging.getLogger("xla_attention.torch")

Describe = Callable[..., Call]
Tensors = Sequence[torch.Tensor | None]


@functools.cache
def fragment(namespace: str) -> torch.library.Library:
    """Our part of a namespace, which others may add to."""
    return torch.library.Library(namespace, "FRAGMENT")


def exists(namespace: str, name: str, overload: str = "default") -> bool:
    """Whether somebody has defined the operator."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return packet is not None and overload in packet.overloads()


def define(
    name: str,
    schema: str,
    describe: Describe,
    answer: Callable[[Tensors], Any],
    *,
    in_place: bool = False,
    backward: Callable[..., Any] | None = None,
    remember: Callable[..., None] | None = None,
    instead: str = "",
) -> None:
    """Define an operator for the CPU, CUDA, XLA and tracing, unless it exists.

    Parameters
    ----------
    name
        ``namespace::operator`` or ``namespace::operator.overload``.
    schema
        What follows the name.
    describe
        The call that the operator's arguments stand for.
    answer
        What the operator returns of the call's results.
    in_place
        It changes operands, which the call's results alias. torch_xla takes no such operator outside of compiled code,
        and torch no `backward`.
    backward
        The gradients of all arguments, from the contexts and gradients that torch gives; otherwise asking for one is a
        NotImplementedError.
    remember
        What puts into the context, of the arguments and results, what `backward` needs.
    instead
        What has a gradient, where this has no `backward`; the error names it.
    """
    namespace, _, operator = name.partition("::")
    base, _, overload = operator.partition(".")
    if exists(namespace, base, overload or "default"):
        _LOG.warning("%s is defined already and kept; ours is not used", name)
        return
    library = fragment(namespace)
    library.define(operator + schema)

    def eager(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return answer(_eager.run(describe(*arguments, **options), in_place=in_place))

    def xla(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        return answer(_xla.run(describe(*arguments, **options)))

    def fake(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        call = describe(*arguments, **options)
        device = call.device()
        _refuse_openxla(call.target, device)
        call.check()
        return answer([None if r is None else torch.empty(r.shape, dtype=r.dtype, device=device) for r in call.results])

    library.impl(operator, eager, "CPU")
    library.impl(operator, eager, "CUDA")
    refuse = _no_gradient(name, instead)
    if in_place and not schema.endswith("-> ()"):
        packet = getattr(getattr(torch.ops, namespace), base)
        _in_place.refuse_gradients(library, operator, getattr(packet, overload or "default"), refuse)
    elif not in_place:
        library.impl(operator, xla, "XLA")
        context = remember or _remember_device
        torch.library.register_autograd(name, backward or refuse, setup_context=context, lib=library)
    torch.library.register_fake(name, fake, lib=library)


def _refuse_openxla(target: str, device: torch.device) -> None:
    """CUDA tensors under ``backend="openxla"``: torch_xla would compile nothing, and only warn."""
    if device.type != "cuda" or "torch_xla" not in sys.modules:
        return
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        # Nothing is traced by Dynamo now.
        return
    if getattr(backend, "_compiler_name", None) == "openxla":
        raise ValueError(
            f"{target}: its tensors are on {device}, and backend='openxla' compiles for the XLA device alone; move "
            "them there (tensor.to('xla')), or use backend='inductor', which calls the CUDA kernels"
        )


def _remember_device(ctx: Any, inputs: Sequence[Any], output: Any) -> None:  # noqa: ANN401
    ctx.device = next(x.device for x in inputs if isinstance(x, torch.Tensor))


def _no_gradient(name: str, instead: str) -> Callable[..., Any]:
    ways = "detach the operands, or use torch.no_grad()"
    if instead:
        ways = f"use {instead}, {ways}"

    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ANN401
        raise NotImplementedError(f"{name}: its gradient is not built yet on {ctx.device}; {ways}")

    return backward


def scale_tensor(scale: torch.Tensor | float | None, like: torch.Tensor) -> torch.Tensor | None:
    """A scale as a tensor beside `like`."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale
    return torch.full((1,), scale, dtype=torch.float32, device=like.device)
