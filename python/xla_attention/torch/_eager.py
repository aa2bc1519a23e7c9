"""Calls on torch's own tensors, on the CPU and on CUDA's current stream."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

import torch

from .._library import Action, Request, ShapeAndDtype, View
from ._call import DTYPES, Call, Result

_LOG = logging.getLogger("xla_attention.torch")
_MOST_KNOWN = 256


# The bytes from a tensor's first to its last, and whether all of them are its own; None where it has none.
Extent = tuple[int, bool] | None


class _Known(threading.local):
    """Requests by all that they describe, the last used one last: making one takes longer than a small kernel.

    With each the extents of its operands, if it writes to some.
    """

    def __init__(self) -> None:
        self.requests: dict[tuple, tuple[Request, list[Extent]]] = {}


_KNOWN = _Known()


def run(call: Call, *, in_place: bool = False) -> list[torch.Tensor | None]:
    """Carry a call out.

    Parameters
    ----------
    call
        What to compute.
    in_place
        Results that alias an operand are written to the operand's own memory; otherwise to new memory.

    Returns
    -------
    list of Tensor
        As ``call.results``; on CUDA they are ready when the current stream is.

    Raises
    ------
    ValueError
        As `Call.check` says; or an operand that is written to overlaps itself or another.
    """
    device = call.device()
    written = call.aliases.values() if in_place else ()
    operands = [t if i in written else _readable(call, i, name, t) for i, (name, t) in enumerate(call.operands.items())]
    places = [None if t is None else (t.shape, t.stride(), t.dtype) for t in operands]
    key = (call.target, device, in_place, *places, *call.results, call.workspace, *call.attributes.values())
    # Taken out while it is in use: a signal handler, a finaliser or a trace function may make the same call meanwhile.
    request, extents = _KNOWN.requests.pop(key, (None, []))
    is_new = request is None
    if is_new:
        call.check()
        extents = [_extent(t) for t in operands] if written else []
    addresses = _addresses(operands)
    for index in written:
        if is_new:
            _refuse_repeats(call, index, operands[index])
        _refuse_overlap(call, index, addresses, extents)
    results = [
        operands[call.aliases[i]] if in_place and i in call.aliases else _new(result, device)
        for i, result in enumerate(call.results)
    ]
    # The CPU uses no workspace.
    wants_workspace = call.workspace is not None and device.type == "cuda"
    outputs = [*results, _new(call.workspace.result(call.target), device)] if wants_workspace else results
    if is_new:
        request = Request(call.target, _views(operands), _views(outputs), call.attributes)
    request.place(addresses, _addresses(outputs))
    with _on(device) as stream:
        if stream is None:
            request.take(Action.RUN_ON_CPU)
        else:
            if is_new:
                request.take(Action.PREPARE_CUDA)
            request.take(Action.LAUNCH_CUDA, stream)
    for index in written:
        if not operands[index].is_inference():
            # If some gradient needs the tensor as it was, torch then says that it has been changed.
            torch.autograd.graph.increment_version(operands[index])
    _KNOWN.requests[key] = request, extents
    while len(_KNOWN.requests) > _MOST_KNOWN:
        # `list` is one step, into which no other call of this thread can come; an OrderedDict crashes when one does.
        _KNOWN.requests.pop(list(_KNOWN.requests)[0], None)  # noqa: RUF015
    return results


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[int | None]:
    """On CUDA, make the device current; gives its current stream."""
    if device.type != "cuda":
        yield None
        return
    with torch.cuda.device(device):
        # Anything that asks the driver makes the device's context current on a thread that is new, such as autograd's.
        torch.cuda.is_current_stream_capturing()
        yield torch.cuda.current_stream().cuda_stream


def _readable(call: Call, index: int, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The operand, or a dense copy where its strides are not what the operator reads."""
    if tensor is None or tensor.is_contiguous():
        return tensor
    if index in call.strided and tensor.stride(-1) == 1 and not _repeats(tensor):
        return tensor
    _LOG.debug("%s: %s has strides %s and is copied to be dense", call.target, name, tensor.stride())
    return tensor.contiguous()


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether an expanded dimension has several elements in one place."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _extent(tensor: torch.Tensor | None) -> Extent:
    if tensor is None or not tensor.numel():
        return None
    if tensor.is_contiguous():
        return tensor.nbytes, True
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size(), False


def _refuse_repeats(call: Call, index: int, written: torch.Tensor) -> None:
    """Refuse to write to a tensor that has several elements in one place, as torch's own operators do."""
    if written.numel() and not written.is_contiguous() and _repeats(written):
        raise ValueError(
            f"{call.target}: {list(call.operands)[index]} is written to and has strides {written.stride()}, with "
            "several elements in one place; expected each in its own: clone() it first"
        )


def _refuse_overlap(call: Call, index: int, addresses: Sequence[int], extents: Sequence[Extent]) -> None:
    """Refuse to write to an operand that has elements of another, as torch's own operators do.

    Tensors with gaps that lie between one another's elements, such as ``kv[:, 0]`` and ``kv[:, 1]``, are allowed.
    """
    if extents[index] is None:
        return
    first, (size, is_dense) = addresses[index], extents[index]
    end = first + size
    for other, (begin, extent) in enumerate(zip(addresses, extents, strict=True)):
        if extent is None or other == index:
            continue
        stop = begin + extent[0]
        if stop <= first or end <= begin:
            continue
        # Of two with gaps, torch does not find out either.
        if (
            (is_dense and (first <= begin or stop <= end))
            or (extent[1] and (begin <= first or end <= stop))
            or (begin == first or stop == end)
        ):
            names = list(call.operands)
            raise ValueError(
                f"{call.target}: {names[index]} is written to and overlaps {names[other]}; clone() one of them first"
            )


def _new(result: Result | None, device: torch.device) -> torch.Tensor | None:
    return None if result is None else torch.empty(result.shape, dtype=result.dtype, device=device)


def _views(tensors: Sequence[torch.Tensor | None]) -> list[ShapeAndDtype | View | None]:
    return [None if t is None else _view(t) for t in tensors]


def _view(tensor: torch.Tensor) -> ShapeAndDtype | View:
    """The tensor's description. Strides that torch gives a contiguous one mean nothing where there is one element."""
    if tensor.is_contiguous():
        return tensor.shape, DTYPES[tensor.dtype]
    return View(tensor.shape, DTYPES[tensor.dtype], tensor.stride())


def _addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]
