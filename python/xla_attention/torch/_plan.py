"""Plans of eager calls: what is left to do when a call's shapes, strides, dtypes, devices and options are known.

Torch's dispatcher and our lowering take 50 to 100 microseconds, more than most kernels. A plan has their outcome: a
call with a plan allocates its results and launches, and checks nothing again. A plan has no tensor, so it keeps no
memory alive.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from .._library import Action, Request
from ._cache import put
from ._call import Result
from ._in_place import increment_versions
from ._overlap import Extent, reject_overlap

# Keys with other objects might compare them by identity, or keep their memory alive.
_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_OPTION_TYPES = frozenset({int, float, bool, str, type(None), torch.dtype})

P = ParamSpec("P")
R = TypeVar("R")


class EagerCall(NamedTuple):
    """An eager call that has run."""

    request: Request  # not used by any other call
    names: Sequence[str]  # of the operands
    operands: Sequence[torch.Tensor | None]
    extents: Sequence[Extent]  # of the operands, where some are written
    written: Mapping[int, int]  # the operand that a result is written to
    results: Sequence[torch.Tensor | None]
    workspace: Result | None


class _ThreadState(threading.local):
    """The plans of a thread, most recently used last, and the calls of the function that it makes a plan of."""

    def __init__(self) -> None:
        self.plans: dict[tuple, _Plan | None] = {}  # None for a call that has no plan
        self.calls: list[EagerCall] | None = None


_STATE = _ThreadState()


class _Plan:
    """A request, where the addresses of its tensors come from, and what the function returns."""

    def __init__(self, call: EagerCall, sources: Sequence[int | None], returned: int | Sequence[int] | None) -> None:
        """Make the plan of a call.

        Parameters
        ----------
        call
            The call; the plan keeps none of its tensors.
        sources
            The index of each operand among the tensors of the function.
        returned
            The index of the result, or the indices of those, that the function returns; None if it returns nothing.
        """
        self._request, self._names, self._extents, self._written = call.request, call.names, call.extents, call.written
        self._sources, self._returned = sources, returned
        self._device = next(tensor.device for tensor in call.operands if tensor is not None)
        self._is_cuda = self._device.type == "cuda"
        operands, results = call.request.tensors()
        self._operands = [(operands[i], source) for i, source in enumerate(sources) if source is not None]
        self._new = _allocator(self._device)
        outputs = [None if tensor is None else Result(tensor.shape, tensor.dtype) for tensor in call.results]
        if call.workspace is not None:
            outputs.append(call.workspace)
        self._outputs = [
            (i, results[i], tuple(shape), torch.empty(shape, device="meta").stride(), dtype)
            for i, (shape, dtype) in ((i, output) for i, output in enumerate(outputs) if output is not None)
        ]

    def is_on_current_device(self) -> bool:
        """Whether a launch needs no change of the current device."""
        return not self._is_cuda or torch._C._cuda_getDevice() == self._device.index

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:  # noqa: ANN401
        """Run the call with tensors of another call that has the same key."""
        for operand, source in self._operands:
            operand.data = tensors[source].data_ptr()
        outputs = {i: tensors[self._sources[operand]] for i, operand in self._written.items()}
        if outputs:
            self._reject_overlap(tensors)
        written = list(outputs.values())
        for index, output, shape, strides, dtype in self._outputs:
            if index not in outputs:
                outputs[index] = self._new(shape, strides, dtype)
            output.data = outputs[index].data_ptr()
        if self._is_cuda:
            # Any query of the driver makes the context current, which it is not on a new thread.
            torch._C._cuda_isCurrentStreamCapturing()
            self._request.run(Action.LAUNCH_CUDA, torch._C._cuda_getCurrentRawStream(self._device.index))
        else:
            self._request.run(Action.RUN_ON_CPU)
        increment_versions(written)
        if self._returned is None:
            return None
        if isinstance(self._returned, int):
            return outputs[self._returned]
        return tuple(outputs[i] for i in self._returned)

    def _reject_overlap(self, tensors: Sequence[torch.Tensor]) -> None:
        addresses = [0 if source is None else tensors[source].data_ptr() for source in self._sources]
        for index in self._written.values():
            reject_overlap(self._request.target, self._names, index, addresses, self._extents)


def _allocator(device: torch.device) -> Callable[[tuple, tuple, torch.dtype], torch.Tensor]:
    """A function of shape, strides and dtype that makes a dense tensor on the current device."""
    # What inductor's code calls takes a third of the time of torch.empty.
    guards = getattr(torch._C._dynamo, "guards", None)
    fallback = functools.partial(_empty, device)
    return getattr(guards, f"_empty_strided_{device.type}", fallback)


def _empty(device: torch.device, shape: tuple, _strides: tuple, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def record(make: Callable[[], EagerCall]) -> None:
    """Give an eager call to the plan that this thread makes, if it makes one."""
    if _STATE.calls is not None:
        _STATE.calls.append(make())


def planned(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that makes one operator call: its calls with known shapes and options run their plan.

    Calls that more than the kernel has to see go through torch's dispatcher: under torch.compile, torch.func,
    torch.jit.trace, a dispatch or function mode, forward-mode gradients or the profiler, and with operands that require
    a gradient.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling() or _is_observed():
            return function(*args, **kwargs)
        key: list[Any] = [function]
        tensors: list[torch.Tensor] = []
        needs_gradient = torch.is_grad_enabled()
        key += kwargs
        if not _extend_key((*args, *kwargs.values()), key, tensors, needs_gradient):
            return function(*args, **kwargs)
        if len(set(map(id, tensors))) < len(tensors):
            # An operand is found by its identity: the plan holds where the same arguments are one tensor.
            key.extend(next(i for i, other in enumerate(tensors) if other is tensor) for tensor in tensors)
        return _run(function, args, kwargs, tuple(key), tensors)

    return call


def _is_observed() -> bool:
    """Whether a mode or a transform of torch has to see operator calls."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch.autograd._profiler_enabled()
    )


def _extend_key(values: Iterable[Any], key: list[Any], tensors: list[torch.Tensor], needs_gradient: bool) -> bool:
    """Append to `key` all of `values` that a plan depends on, and to `tensors` those among them.

    False for values that no plan supports: other subclasses of tensors, tensors that require a gradient or whose
    elements are negated when they are read, and objects of other types.
    """
    for value in values:
        kind = type(value)
        if kind in _TENSOR_TYPES:
            if (needs_gradient and value.requires_grad) or value.is_neg():
                return False
            tensors.append(value)
            key += (value.shape, value.stride(), value.dtype, value.device)
        elif kind in _OPTION_TYPES:
            key.append(value)
        elif kind is tuple:
            key.append(len(value))
            if not _extend_key(value, key, tensors, needs_gradient):
                return False
        else:
            return False
    return True


def _run(function: Callable, args: tuple, kwargs: dict[str, Any], key: tuple, tensors: list[torch.Tensor]) -> Any:  # noqa: ANN401
    plans = _STATE.plans
    # The plan leaves the cache while it is in use, because a signal handler, a finaliser or a trace function may make
    # the same call meanwhile.
    is_new = key not in plans
    plan = plans.pop(key, None)
    if plan is not None and plan.is_on_current_device():
        result = plan.run(tensors)
    elif is_new:
        result, plan = _first_run(function, args, kwargs, tensors)
    else:
        result = function(*args, **kwargs)
    put(plans, key, plan)
    return result


def _first_run(
    function: Callable, args: tuple, kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> tuple[Any, _Plan | None]:
    """The function's result, and its plan if it made one eager call of the tensors that it was given."""
    outer, _STATE.calls = _STATE.calls, []
    try:
        result = function(*args, **kwargs)
        calls = _STATE.calls
    finally:
        _STATE.calls = outer
    if len(calls) != 1:
        return result, None
    (call,) = calls
    operands = [t if t is not None and t.numel() else None for t in call.operands]
    sources = [None if t is None else _source(t, tensors) for t in operands]
    returned = _indices(result, call.results)
    is_complete = all(t is None or source is not None for t, source in zip(operands, sources, strict=True))
    is_complete &= all(sources[i] is not None for i in call.written.values())
    return result, _Plan(call, sources, returned) if is_complete and returned != () else None


def _indices(result: Any, results: Sequence[torch.Tensor | None]) -> int | tuple[int, ...] | None:  # noqa: ANN401
    """The indices among `results` of what a function returned; an empty tuple if it returned something else."""
    if result is None:
        return None
    parts = result if isinstance(result, tuple) else (result,)
    found = [next((i for i, x in enumerate(results) if x is part), None) for part in parts]
    if None in found:
        return ()
    return tuple(found) if isinstance(result, tuple) else found[0]


def _source(operand: torch.Tensor, tensors: Sequence[torch.Tensor]) -> int | None:
    """The index of the tensor that the operand is, or is a view of from the first element on; None if it is a copy."""
    same = [i for i, tensor in enumerate(tensors) if tensor is operand]
    views = {id(tensor): i for i, tensor in enumerate(tensors) if tensor.data_ptr() == operand.data_ptr()}
    return same[0] if same else next(iter(views.values())) if len(views) == 1 else None
