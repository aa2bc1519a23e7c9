"""Eager calls, on the CPU or on the current stream of a CUDA device."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

import torch

from .._library import Action, Request, ShapeAndDtype, View
from ._call import DTYPES, Call, Result

_LOG = logging.getLogger("xla_attention.torch")
_CACHE_SIZE = 256


# The number of bytes between the start of a tensor's first element and the end of its last, and whether it is dense;
# None for a tensor without elements.
Extent = tuple[int, bool] | None


class _RequestCache(threading.local):
    """The requests of a thread by all that they depend on, most recently used last.

    Creating a request takes longer than a small kernel. Each is stored with the extents of its operands, if some of
    them are written.
    """

    def __init__(self) -> None:
        self.requests: dict[tuple, tuple[Request, list[Extent]]] = {}


_CACHE = _RequestCache()


def run(call: Call, *, in_place: bool = False) -> list[torch.Tensor | None]:
    """Run a call on the device of its operands.

    Parameters
    ----------
    call
        Operands, the shapes of results, and attributes.
    in_place
        Whether results that alias an operand are written to the operand's memory, or to new memory.

    Returns
    -------
    list of Tensor
        One per ``call.results``; on CUDA, the work is enqueued on the current stream.

    Raises
    ------
    ValueError
        The call is invalid, or an operand that is written overlaps itself or another.
    """
    device = call.device()
    written = call.aliases.values() if in_place else ()
    operands = [t if i in written else _readable(call, i, name, t) for i, (name, t) in enumerate(call.operands.items())]
    layouts = [None if t is None else (t.shape, t.stride(), t.dtype) for t in operands]
    key = (call.target, device, in_place, *layouts, *call.results, call.workspace, *call.attributes.values())
    # The request leaves the cache while it is in use, because a signal handler, a finaliser or a trace function may
    # make the same call meanwhile.
    request, extents = _CACHE.requests.pop(key, (None, []))
    is_new = request is None
    if is_new:
        call.validate()
        extents = [_extent(t) for t in operands] if written else []
    addresses = _addresses(operands)
    for index in written:
        if is_new:
            _reject_internal_overlap(call, index, operands[index])
        _reject_overlap(call, index, addresses, extents)
    results = [
        operands[call.aliases[i]] if in_place and i in call.aliases else _new(result, device)
        for i, result in enumerate(call.results)
    ]
    # The CPU ignores the workspace.
    has_workspace = call.workspace is not None and device.type == "cuda"
    outputs = [*results, _new(call.workspace.result(call.target), device)] if has_workspace else results
    if is_new:
        request = Request(call.target, _views(operands), _views(outputs), call.attributes)
    request.set_addresses(addresses, _addresses(outputs))
    with _current_stream(device) as stream:
        if stream is None:
            request.run(Action.RUN_ON_CPU)
        else:
            if is_new:
                request.run(Action.PREPARE_CUDA)
            request.run(Action.LAUNCH_CUDA, stream)
    for index in written:
        if not operands[index].is_inference():
            # Autograd then detects that a tensor which it saved for the backward pass has been modified.
            torch.autograd.graph.increment_version(operands[index])
    _CACHE.requests[key] = request, extents
    while len(_CACHE.requests) > _CACHE_SIZE:
        # A call of a signal handler cannot interrupt `list(dict)`. It can interrupt an OrderedDict, which then crashes.
        _CACHE.requests.pop(list(_CACHE.requests)[0], None)  # noqa: RUF015
    return results


@contextlib.contextmanager
def _current_stream(device: torch.device) -> Iterator[int | None]:
    """Make a CUDA device current; yields its current stream, None on the CPU."""
    if device.type != "cuda":
        yield None
        return
    with torch.cuda.device(device):
        # Any query of the driver makes the context current, which it is not on a new thread such as autograd's.
        torch.cuda.is_current_stream_capturing()
        yield torch.cuda.current_stream().cuda_stream


def _readable(call: Call, index: int, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The operand, or a dense copy where the operator does not support its strides."""
    if tensor is None or tensor.is_contiguous():
        return tensor
    if index in call.strided and tensor.stride(-1) == 1 and not _has_internal_overlap(tensor):
        return tensor
    _LOG.debug("%s: %s has strides %s and is copied to be dense", call.target, name, tensor.stride())
    return tensor.contiguous()


def _has_internal_overlap(tensor: torch.Tensor) -> bool:
    """Whether an expanded dimension gives several elements one address."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _extent(tensor: torch.Tensor | None) -> Extent:
    if tensor is None or not tensor.numel():
        return None
    if tensor.is_contiguous():
        return tensor.nbytes, True
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size(), False


def _reject_internal_overlap(call: Call, index: int, written: torch.Tensor) -> None:
    """Raise ValueError for a written tensor in which several elements share an address, as torch's operators do."""
    if written.numel() and not written.is_contiguous() and _has_internal_overlap(written):
        raise ValueError(
            f"{call.target}: {list(call.operands)[index]} is written to and has strides {written.stride()}, with "
            "several elements in one place; expected each in its own: clone() it first"
        )


def _reject_overlap(call: Call, index: int, addresses: Sequence[int], extents: Sequence[Extent]) -> None:
    """Raise ValueError for a written operand that shares memory with another, as torch's operators do.

    Strided tensors may interleave, such as ``kv[:, 0]`` and ``kv[:, 1]``.
    """
    if extents[index] is None:
        return
    first, (size, is_dense) = addresses[index], extents[index]
    end = first + size
    for i, (begin, extent) in enumerate(zip(addresses, extents, strict=True)):
        if extent is None or i == index:
            continue
        stop = begin + extent[0]
        if stop <= first or end <= begin:
            continue
        # As in torch, an overlap of two strided tensors is found only where they begin or end at one address.
        if (
            (is_dense and (first <= begin or stop <= end))
            or (extent[1] and (begin <= first or end <= stop))
            or (begin == first or stop == end)
        ):
            names = list(call.operands)
            raise ValueError(
                f"{call.target}: {names[index]} is written to and overlaps {names[i]}; clone() one of them first"
            )


def _new(result: Result | None, device: torch.device) -> torch.Tensor | None:
    return None if result is None else torch.empty(result.shape, dtype=result.dtype, device=device)


def _views(tensors: Sequence[torch.Tensor | None]) -> list[ShapeAndDtype | View | None]:
    return [None if t is None else _view(t) for t in tensors]


def _view(tensor: torch.Tensor) -> ShapeAndDtype | View:
    """The tensor without its address. A contiguous one has no strides, since those of size 1 may be anything."""
    if tensor.is_contiguous():
        return tensor.shape, DTYPES[tensor.dtype]
    return View(tensor.shape, DTYPES[tensor.dtype], tensor.stride())


def _addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]
