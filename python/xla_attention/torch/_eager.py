"""Eager calls, on the CPU or on the current stream of a CUDA device."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

import torch

from .._library import Action, Request, ShapeAndDtype, View
from . import _plan
from ._cache import put
from ._call import DTYPES, Call, Result, put_workspace
from ._in_place import increment_versions
from ._overlap import Extent, extent_of, has_internal_overlap, reject_internal_overlap, reject_overlap

_LOG = logging.getLogger("xla_attention.torch")


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
    aliases = call.aliases if in_place else {}
    written = aliases.values()
    operands = [t if i in written else _readable(call, i, name, t) for i, (name, t) in enumerate(call.operands.items())]
    layouts = [None if t is None else (t.shape, t.stride(), t.dtype) for t in operands]
    key = (call.target, device, in_place, *layouts, *call.results, call.workspace, *call.attributes.values())
    # The request leaves the cache while it is in use, because a signal handler, a finaliser or a trace function may
    # make the same call meanwhile.
    request, extents = _CACHE.requests.pop(key, (None, []))
    is_new = request is None
    if is_new:
        call.validate()
        extents = [extent_of(t) for t in operands] if written else []
    addresses, names = _addresses(operands), list(call.operands)
    for index in written:
        if is_new:
            reject_internal_overlap(call.target, names[index], operands[index])
        reject_overlap(call.target, names, index, addresses, extents)
    results = [operands[aliases[i]] if i in aliases else _new(result, device) for i, result in enumerate(call.results)]
    # The CPU ignores the workspace.
    takes_workspace = call.workspace is not None and device.type == "cuda"
    workspace = call.workspace.result(call.target) if takes_workspace else None
    outputs = results if workspace is None else put_workspace(call.target, results, _new(workspace, device))

    def make_request() -> Request:
        return Request(call.target, _views(operands), _views(outputs), call.attributes)

    if is_new:
        request = make_request()
    request.set_addresses(addresses, _addresses(outputs))
    with _current_stream(device) as stream:
        if stream is None:
            request.run(Action.RUN_ON_CPU)
        else:
            if is_new:
                request.run(Action.PREPARE_CUDA)
            request.run(Action.LAUNCH_CUDA, stream)
    increment_versions(operands[index] for index in written)
    put(_CACHE.requests, key, (request, extents))
    _plan.record(lambda: _plan.EagerCall(make_request(), names, operands, extents, aliases, results, workspace))
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
    if index in call.strided and tensor.stride(-1) == 1 and not has_internal_overlap(tensor):
        return tensor
    _LOG.debug("%s: %s has strides %s and is copied to be dense", call.target, name, tensor.stride())
    return tensor.contiguous()


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
