"""Plans of eager calls: what is left to do when a call's shapes, strides, dtypes, devices and options are known.

Torch's dispatcher and our lowering take 50 to 100 microseconds, more than most kernels. A plan has their outcome: a
call with a plan allocates its results and launches, and checks nothing again. A plan has no tensor, so it keeps no
memory alive.
"""

import functools
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from .._library import Action, Request
from ._cache import put
from ._call import Result, put_workspace
from ._in_place import increment_versions
from ._layouts import MAX_TENSORS, Memory
from ._overlap import Extent, reject_overlap

# Keys with other objects might compare them by identity, or keep their memory alive.
_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_OPTION_TYPES = frozenset({int, float, bool, str, type(None), torch.dtype})

# The plan of calls that have not been made.
_UNKNOWN = object()

# Each is one look-up in a call.
_is_compiling = torch.compiler.is_dynamo_compiling
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_num_function_modes = torch._C._len_torch_function_stack
_functorch_interpreter = torch._C._functorch.peek_interpreter_stack
_is_tracing = torch._C._is_tracing
_is_profiling = torch.autograd._profiler_enabled
# A build of torch without CUDA has none of these.
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
# Torch's own allocator: what `torch.cuda.caching_allocator_alloc` and `caching_allocator_delete` call.
_allocate = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)
_free = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)

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
        self.free: list[Memory] = []
        self.devices: set[int] = set()  # whose contexts this thread has made current


_STATE = _ThreadState()


class _Plan:
    """A request, where the addresses of its tensors come from, and what the function returns."""

    def __init__(
        self,
        call: EagerCall,
        tensors: Sequence[torch.Tensor],
        sources: Sequence[int | None],
        returned: Any,  # noqa: ANN401
    ) -> None:
        """Make the plan of a call.

        Parameters
        ----------
        call
            The call; the plan keeps none of its tensors.
        tensors
            The tensors of the function.
        sources
            The index of each operand among them.
        returned
            What the function returned.
        """
        self._request, self._names, self._extents = call.request, call.names, call.extents
        self._sources = sources
        self._written = [(index, sources[index]) for index in call.written.values()]
        # Torch negates parts of complex numbers when they are read. There are complex numbers of these dtypes.
        parts = (torch.float16, torch.float32, torch.float64)
        self._parts = [i for i, tensor in enumerate(tensors) if tensor.dtype in parts]
        device = next(tensor.device for tensor in call.operands if tensor is not None)
        self._is_cuda, self._index = device.type == "cuda", device.index
        self._action = Action.LAUNCH_CUDA if self._is_cuda else Action.RUN_ON_CPU
        self._new = _allocator(device)
        # The place of each result in `tensors` followed by the new results, as which `run` has them.
        places: list[int] = []
        self._results = []
        for i, result in enumerate(call.results):
            if i in call.written:
                places.append(sources[call.written[i]])
            elif result is None:
                places.append(0)
            else:
                places.append(len(tensors) + len(self._results))
                self._results.append((places[-1], tuple(result.shape), result.stride(), result.dtype))
        count = len(tensors) + len(self._results)
        self._workspace = None
        if call.workspace is not None:
            (self._workspace,) = call.workspace.shape
            self._workspace_place = count
            all_places = put_workspace(call.request.target, places, count)
        else:
            all_places = places
        call.request.set_indices((s or 0 for s in sources), all_places, count + 1)
        self._select = _selection(returned, [places[i] for i in _indices(returned, call.results)])

    def serves(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it can run with these tensors, whose layouts are right: as they are, on the current device."""
        for index in self._parts:
            if tensors[index].is_neg():
                return False
        return not self._is_cuda or _current_device() == self._index

    def run(self, tensors: list[torch.Tensor], memory: Memory) -> Any:  # noqa: ANN401
        """Run the call with tensors of another call that has the same key; their addresses are in `memory`.

        The list of tensors gets the new results too.
        """
        if self._written:
            self._reject_overlap(memory)
        for place, shape, strides, dtype in self._results:
            result = self._new(shape, strides, dtype)
            memory.addresses[place] = result.data_ptr()
            tensors.append(result)
        stream = 0
        if self._is_cuda:
            if self._index not in _STATE.devices:
                # Any query of the driver makes the context current, which it is not on a new thread. Later changes of
                # the device change the context too.
                _is_capturing()
                _STATE.devices.add(self._index)
            stream = _current_stream(self._index)
        if self._workspace is None:
            self._request.run(self._action, stream, memory)
        else:
            # A tensor would take twice as long.
            workspace = memory.addresses[self._workspace_place] = _allocate(self._workspace, stream)
            try:
                self._request.run(self._action, stream, memory)
            finally:
                _free(workspace)
        if self._written:
            increment_versions(tensors[source] for _, source in self._written)
        return self._select(tensors)

    def _reject_overlap(self, memory: Memory) -> None:
        addresses = [0 if source is None else memory.addresses[source] or 0 for source in self._sources]
        for index, _ in self._written:
            reject_overlap(self._request.target, self._names, index, addresses, self._extents)


def _selection(returned: Any, places: Sequence[int]) -> Callable[[Sequence[torch.Tensor]], Any]:  # noqa: ANN401
    """A function that puts the tensors at these places together as a function returned them."""
    if returned is None:
        return lambda _: None
    if isinstance(returned, tuple) and len(returned) < 2:
        return lambda tensors: tuple(tensors[i] for i in places)
    return operator.itemgetter(*places)


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
        if is_observed():
            return function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        key = [function, *kwargs]
        values = (*args, *kwargs.values()) if kwargs else args
        if not divide(values, key, tensors, torch.is_grad_enabled()):
            return function(*args, **kwargs)
        free = _STATE.free
        # It leaves the list while it is in use, because a signal handler, a finaliser or a trace function may make
        # another call meanwhile.
        memory = free.pop() if free else Memory()
        try:
            layouts = memory.describe(tensors)
            if layouts is None:
                return function(*args, **kwargs)
            key.append(layouts)
            return _run(function, args, kwargs, tuple(key), tensors, memory)
        finally:
            free.append(memory)

    return call


def is_observed() -> bool:
    """Whether torch.compile, a mode or a transform of torch has to see operator calls."""
    return bool(
        _is_compiling()
        or _num_dispatch_modes()
        or _num_function_modes()
        or _functorch_interpreter() is not None
        or _is_tracing()
        or forward_ad._current_level >= 0
        or _is_profiling()
    )


def divide(values: Iterable[Any], options: list[Any], tensors: list[torch.Tensor], needs_gradient: bool) -> bool:
    """Append tensors among `values` to `tensors`, and to `options` the others, each after the number of tensors so far.

    False for values that no plan supports: other subclasses of tensors, tensors on other devices than the CPU and CUDA,
    tensors that require a gradient, and objects of other types.
    """
    for value in values:
        kind = type(value)
        if kind in _TENSOR_TYPES:
            # A tensor on another device may have no memory, and asking an XLA tensor for its address may crash.
            if not (value.is_cuda or value.is_cpu) or (needs_gradient and value.requires_grad):
                return False
            tensors.append(value)
        elif kind in _OPTION_TYPES:
            options += (len(tensors), value)
        elif kind is tuple:
            options += (kind, len(value))
            if not divide(value, options, tensors, needs_gradient):
                return False
        else:
            return False
    return True


def _run(
    function: Callable, args: tuple, kwargs: dict[str, Any], key: tuple, tensors: list[torch.Tensor], memory: Memory
) -> Any:  # noqa: ANN401
    plans = _STATE.plans
    # The plan leaves the cache while it is in use, as the memory leaves its list.
    plan = plans.pop(key, _UNKNOWN)
    if plan is _UNKNOWN:
        if any(tensor.is_neg() for tensor in tensors):
            return function(*args, **kwargs)
        result, plan = _first_run(function, args, kwargs, tensors)
        put(plans, key, plan)
        return result
    serves = plan is not None and plan.serves(tensors)
    result = plan.run(tensors, memory) if serves else function(*args, **kwargs)
    # It was one of them, so there are not too many, apart from those of nested calls.
    plans[key] = plan
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
    addresses = [tensor.data_ptr() for tensor in tensors]
    # Of tensors that begin at one address the first will do, because they do in every call with the same key.
    sources = [None if t is None else _index(addresses, t.data_ptr()) for t in operands]
    is_complete = all(t is None or source is not None for t, source in zip(operands, sources, strict=True))
    is_complete &= all(sources[i] is not None for i in call.written.values())
    is_complete &= _indices(result, call.results) is not None
    is_complete &= len(tensors) + len(call.results) < MAX_TENSORS
    return result, _Plan(call, tensors, sources, result) if is_complete else None


def _indices(result: Any, results: Sequence[torch.Tensor | None]) -> tuple[int, ...] | None:  # noqa: ANN401
    """The indices among `results` of what a function returned; None if it returned something else."""
    parts = () if result is None else result if isinstance(result, tuple) else (result,)
    found = [next((i for i, x in enumerate(results) if x is part), None) for part in parts]
    return None if None in found else tuple(found)


def _index(addresses: Sequence[int], address: int) -> int | None:
    """The place of an address; None for that of a copy, which is not among them."""
    return addresses.index(address) if address in addresses else None
