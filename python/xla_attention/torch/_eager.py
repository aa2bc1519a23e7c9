"""Calls on torch's own tensors, on the CPU and on CUDA's current stream."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

import torch

from .._library import Action, Request, View
from ._call import DTYPES, Call, Result

_LOG = logging.getLogger("xla_attention.torch")
_MOST_KNOWN = 4096


class _Known(threading.local):
    """Requests by all that they describe: making one takes longer than a small kernel."""

    def __init__(self) -> None:
        self.requests: dict[tuple, Request] = {}


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
    """
    device = call.device()
    kept = call.aliases.values() if in_place else ()
    operands = [t if i in kept else _readable(call, i, t) for i, t in enumerate(call.operands)]
    places = [None if t is None else (t.shape, t.stride(), t.dtype) for t in operands]
    key = (call.target, device, in_place, *places, *call.results, call.workspace, *call.attributes.values())
    request = _KNOWN.requests.get(key)
    if request is None:
        call.check()
    results = [
        operands[call.aliases[i]] if in_place and i in call.aliases else _new(result, device)
        for i, result in enumerate(call.results)
    ]
    # The CPU uses no workspace.
    wants_workspace = call.workspace is not None and device.type == "cuda"
    outputs = [*results, _new(call.workspace.result(), device)] if wants_workspace else results
    is_new = request is None
    if is_new:
        request = Request(call.target, _views(operands), _views(outputs), call.attributes)
    request.place(_addresses(operands), _addresses(outputs))
    with _on(device) as stream:
        if stream is None:
            request.take(Action.RUN_ON_CPU)
        else:
            if is_new:
                request.take(Action.PREPARE_CUDA)
            request.take(Action.LAUNCH_CUDA, stream)
    if is_new:
        if len(_KNOWN.requests) >= _MOST_KNOWN:
            _KNOWN.requests.clear()
        _KNOWN.requests[key] = request
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


def _readable(call: Call, index: int, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The operand, or a dense copy where its strides are not what the operator reads."""
    if tensor is None or tensor.is_contiguous():
        return tensor
    if index in call.strided and tensor.stride(-1) == 1 and not _overlaps(tensor):
        return tensor
    _LOG.debug("%s: operand %d has strides %s and is copied to be dense", call.target, index, tensor.stride())
    return tensor.contiguous()


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _new(result: Result | None, device: torch.device) -> torch.Tensor | None:
    return None if result is None else torch.empty(result.shape, dtype=result.dtype, device=device)


def _views(tensors: Sequence[torch.Tensor | None]) -> list[View | None]:
    return [None if t is None else View(t.shape, DTYPES[t.dtype], t.stride()) for t in tensors]


def _addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]
