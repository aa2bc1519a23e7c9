"""The shared library, loaded through ctypes: handler tables, validation of calls, and calls without XLA."""

import ctypes
import enum
import functools
import importlib.metadata
import json
import os
import pathlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

VERSION = importlib.metadata.version("xla-attention")

# XLA's numbers of the element types (xla_data.proto PrimitiveType) by their numpy names.
DTYPES = {
    "bool": 1,
    "int8": 2,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "complex64": 15,
    "complex128": 18,
    "bfloat16": 16,
    "float8_e5m2": 19,
    "float8_e4m3fn": 20,
}
# Stands for element types that no operator supports.
_OTHER_DTYPE = -1

_INVALID_ARGUMENT, _UNIMPLEMENTED = 3, 12
_ATTRIBUTE_KINDS = {np.bool_: 0, np.int64: 1, np.float32: 2}


class Target(ctypes.Structure):
    """A row of the library's handler table; a stage without a handler is None."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("platform", ctypes.c_char_p),
        ("initialize", ctypes.c_void_p),
        ("execute", ctypes.c_void_p),
    )


class _Targets(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("api_major", ctypes.c_int32),
        ("api_minor", ctypes.c_int32),
        ("count", ctypes.c_size_t),
        ("rows", ctypes.POINTER(Target)),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class _Attribute(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("real", ctypes.c_float), ("integer", ctypes.c_int64))


class _Call(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("op", ctypes.c_int32),
        ("action", ctypes.c_int32),
        ("operands", ctypes.POINTER(_Tensor)),
        ("num_operands", ctypes.c_size_t),
        ("results", ctypes.POINTER(_Tensor)),
        ("num_results", ctypes.c_size_t),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("addresses", ctypes.c_void_p),
        ("num_addresses", ctypes.c_size_t),
    )


class Layouts(ctypes.Structure):
    """What ``xa_layouts`` describes, and where it writes."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("list", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("item", ctypes.c_void_p),
        ("describe", ctypes.c_void_p),
        ("addresses", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("capacity", ctypes.c_size_t),
    )


def library_path() -> pathlib.Path:
    """The path of the shared library: ``XLA_ATTENTION_LIBRARY`` if it is set, otherwise the file in this package."""
    given = os.environ.get("XLA_ATTENTION_LIBRARY")
    here = pathlib.Path(__file__).parent
    return pathlib.Path(given) if given else next(iter(sorted(here.glob("*xla_attention.*"))), here / "missing")


def include_dir() -> pathlib.Path:
    """The folder that contains ``xla_attention.h``, the C interface of the shared library.

    Examples
    --------
    >>> import xla_attention
    >>> (xla_attention.include_dir() / "xla_attention.h").is_file()
    True
    """
    return pathlib.Path(__file__).parent / "include"


@functools.cache
def library() -> ctypes.CDLL:
    """The library at `library_path`, loaded once and never unloaded; ImportError if it is missing or does not fit."""
    path = library_path()
    if not path.is_file():
        raise ImportError(
            f"xla_attention: the shared library {path} is not there; install the wheel (`pip install .`), or point "
            "XLA_ATTENTION_LIBRARY at libxla_attention.so"
        )
    lib = ctypes.CDLL(str(path))
    if not hasattr(lib, "xa_handler_set"):
        raise ImportError(f"xla_attention: {path} is of another version than the Python files beside it")
    lib.xa_handler_set.restype = ctypes.POINTER(_Targets)
    lib.xa_handler_set.argtypes = [ctypes.c_size_t]
    lib.xa_info.restype = ctypes.c_char_p
    lib.xa_op.argtypes = [ctypes.c_char_p]
    # Conversions by argtypes take half of the time of a call, so `xa_call` gets references and a c_size_t.
    lib.xa_stand_before_pjrt_plugin.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    sizes = [ctypes.c_int64] * 4
    coefficients = ctypes.POINTER(ctypes.c_int64 * 3)
    lib.xa_workspace.argtypes = [ctypes.c_int32, *sizes, ctypes.c_int32, ctypes.c_bool, coefficients]
    lib.xa_workspace.restype = None
    bias_coefficients = ctypes.POINTER(ctypes.c_int64 * 2)
    sizes = [ctypes.c_int64] * 3
    rows = [ctypes.c_int64] * 2
    options = [ctypes.c_int64, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool, ctypes.c_bool, *rows]
    lib.xa_bias_workspace.argtypes = [
        *(ctypes.c_int32, *sizes, ctypes.c_int32, ctypes.c_bool, *options),
        bias_coefficients,
    ]
    lib.xa_bias_workspace.restype = None
    return lib


def build_info() -> dict[str, Any]:
    """The library's description of itself as JSON; `xa_info` in ``src/c_api.rs`` lists the keys."""
    return json.loads(library().xa_info())


class HandlerSet(NamedTuple):
    """The handlers of every target on every platform, compiled for one version of the XLA FFI."""

    version: tuple[int, int]
    targets: list[Target]

    def __str__(self) -> str:
        """The version."""
        return f"{self.version[0]}.{self.version[1]}"


def handler_sets() -> list[HandlerSet]:
    """The library's sets of handlers, from the newest version of the FFI to the oldest."""
    sets, number = [], 0
    while table := library().xa_handler_set(number):
        contents = table.contents
        sets.insert(0, HandlerSet((contents.api_major, contents.api_minor), contents.rows[: contents.count]))
        number += 1
    return sets


def compatible_sets(runtime: tuple[int, int]) -> list[HandlerSet]:
    """The sets that a runtime of this FFI version can register, from the newest to the oldest.

    Later versions must not be tried: when the runtime queries the metadata of such a handler, the handler writes more
    than the runtime's struct has room for.
    """
    return [x for x in handler_sets() if x.version[0] == runtime[0] and x.version <= runtime]


def join_versions(sets: Iterable[HandlerSet]) -> str:
    """The versions of sets for an error text, the oldest first."""
    return " and ".join(str(x) for x in sorted(sets, key=lambda x: x.version))


def targets() -> list[Target]:
    """Every target of the library on every platform, with the handlers of the oldest FFI version."""
    return handler_sets()[-1].targets


ShapeAndDtype = tuple[Sequence[int], Any]


class View(NamedTuple):
    """A strided tensor whose address `Request.set_addresses` gives."""

    shape: Sequence[int]
    dtype: Any  # a numpy dtype, or XLA's number
    strides: Sequence[int]  # in elements


class Action(enum.IntEnum):
    """What `xa_call` does with a call."""

    CHECK = 0
    RUN_ON_CPU = 1
    PREPARE_CUDA = 2
    LAUNCH_CUDA = 3


_ERROR_BYTES = 1024
_ERROR_CAPACITY = ctypes.c_size_t(_ERROR_BYTES)


class CallMemory:
    """Memory that a call uses, and no other call meanwhile: addresses of its tensors, and an error text."""

    def __init__(self, num_addresses: int = 0) -> None:
        self.addresses = (ctypes.c_void_p * num_addresses)()
        self.address = ctypes.addressof(self.addresses) if num_addresses else 0
        self.text = ctypes.create_string_buffer(_ERROR_BYTES)
        self.message = ctypes.byref(self.text)


class _FreeMemory(threading.local):
    """Memory of no call: one per thread, and more where calls of a thread are nested."""

    def __init__(self) -> None:
        self.free: list[CallMemory] = []


_MEMORY = _FreeMemory()


class Request:
    """A call of an operator, described once and run any number of times, by one thread at a time.

    Parameters
    ----------
    target
        The custom call's target name.
    operands, results
        In the order of the target's signature; None for one that is left out.
    attributes
        numpy scalars of type ``bool_``, ``int64`` or ``float32`` by name.
    """

    def __init__(
        self,
        target: str,
        operands: Sequence[ShapeAndDtype | View | None],
        results: Sequence[ShapeAndDtype | View | None],
        attributes: Mapping[str, Any],
    ) -> None:
        self._lib = library()
        self.target = target
        values = [_attribute(attributes[name]) for name in sorted(attributes)]
        self._operands, self._results = _tensors(operands), _tensors(results)
        self._request = _Call(
            struct_size=ctypes.sizeof(_Call),
            op=self._lib.xa_op(target.encode()),
            operands=self._operands,
            num_operands=len(operands),
            results=self._results,
            num_results=len(results),
            attributes=(_Attribute * len(values))(*values),
            num_attributes=len(values),
        )
        self._call, self._reference = self._lib.xa_call, ctypes.byref(self._request)

    def set_addresses(self, operands: Iterable[int], results: Iterable[int]) -> None:
        """Set the addresses of all tensors, 0 for those that are left out."""
        for tensors, addresses in ((self._operands, operands), (self._results, results)):
            for tensor, address in zip(tensors, addresses, strict=True):
                tensor.data = address

    def set_indices(self, operands: Iterable[int], results: Iterable[int], count: int) -> None:
        """Give the tensors the addresses at these indices of the `count` addresses in the memory of each `run`."""
        self.set_addresses(operands, results)
        self._request.num_addresses = count

    def run(self, action: Action, stream: int = 0, memory: CallMemory | None = None) -> None:
        """Take an action. `RUN_ON_CPU` returns when the results are written, `LAUNCH_CUDA` when the work is enqueued.

        Raises
        ------
        ValueError
            The call is invalid; the text names the operand, what it is and what was expected.
        NotImplementedError
            The call is valid, but there is no kernel for it.
        RuntimeError
            The call is valid, but running it failed.
        """
        if memory is None:
            free = _MEMORY.free
            # The memory leaves the list while it is in use, because a signal handler may make another call meanwhile.
            memory = free.pop() if free else CallMemory()
            try:
                self.run(action, stream, memory)
            finally:
                free.append(memory)
            return
        request = self._request
        request.action = action
        request.stream = stream
        request.addresses = memory.address
        code = self._call(self._reference, memory.message, _ERROR_CAPACITY)
        if code:
            error = {_INVALID_ARGUMENT: ValueError, _UNIMPLEMENTED: NotImplementedError}.get(code, RuntimeError)
            raise error(memory.text.value.decode())


def check(
    target: str,
    operands: Sequence[ShapeAndDtype | None],
    results: Sequence[ShapeAndDtype | None],
    attributes: Mapping[str, Any],
) -> None:
    """Validate shapes, dtypes and attributes against the operator's definition, without data; see `Request`."""
    Request(target, operands, results, attributes).run(Action.CHECK)


class BiasSizes(NamedTuple):
    """A bias that kernels may copy to the workspace of a call, or beside which they may store dS there."""

    shape: tuple[Any, ...]  # [B or 1, Hq or 1, Sq, Sk], may be symbolic
    is_masked: bool  # whether the call has a causal mask or a window
    has_gradient: bool = False  # whether the call has the gradient of the bias
    is_f32: bool = False  # whether it is of f32 beside operands of another type


def workspace(
    target: str,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: Any,  # noqa: ANN401
    batch_invariant: bool,
    rows: Any,  # noqa: ANN401
    sequences: Any,  # noqa: ANN401
    bias: BiasSizes | None = None,
) -> Any:  # noqa: ANN401
    """The workspace size of an attention call or its gradients, in bytes.

    `rows` of the query, `sequences` and the shape of the `bias` may be symbolic; `batch_invariant` is ignored for the
    gradients. There is no room for a copy of a bias with a symbolic number of keys, nor for dS of a symbolic number of
    rows.
    """
    static = (target, q_heads, kv_heads, head_dim, value_dim, dtype, batch_invariant)
    constant, per_row, per_sequence = _workspace_coefficients(*static)
    size = constant + per_row * rows + per_sequence * sequences
    if bias is not None and isinstance(bias.shape[3], int):
        is_shared = not (bias.shape[0] == sequences and bias.shape[1] == q_heads)
        static = (target, q_heads, head_dim, value_dim, dtype, batch_invariant)
        of_bias = (bias.shape[3], "float32" if bias.is_f32 else dtype, is_shared, bias.is_masked, bias.has_gradient)
        bias_rows = bias.shape[0] * bias.shape[1] * bias.shape[2]
        known_rows = (count if isinstance(count, int) else 0 for count in (rows, bias_rows))
        fixed, per_bias_row = _bias_coefficients(*static, *of_bias, *known_rows)
        size += fixed
        if per_bias_row > 0:
            size += per_bias_row * bias_rows
    return size


def bias_sizes(
    bias: Any,  # noqa: ANN401
    query_dtype: Any,  # noqa: ANN401
    softcap: float,
    alibi_slopes: Any,  # noqa: ANN401
    causal: bool,
    windows: tuple[int, int],
    has_gradient: bool = False,
) -> BiasSizes | None:
    """What `workspace` needs to know of a call's bias; None without one, and if it adds nothing."""
    if bias is None or bias.ndim != 4 or softcap > 0 or alibi_slopes is not None:
        return None
    return BiasSizes(tuple(bias.shape), bool(causal) or max(windows) >= 0, has_gradient, bias.dtype != query_dtype)


@functools.lru_cache(maxsize=1024)
def _workspace_coefficients(
    target: str,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: Any,  # noqa: ANN401
    batch_invariant: bool,
) -> tuple[int, int, int]:
    coefficients, lib = (ctypes.c_int64 * 3)(), library()
    sizes = (q_heads, kv_heads, head_dim, value_dim, _dtype_number(dtype), batch_invariant)
    lib.xa_workspace(lib.xa_op(target.encode()), *sizes, ctypes.byref(coefficients))
    return tuple(coefficients)


@functools.lru_cache(maxsize=1024)
def _bias_coefficients(
    target: str,
    q_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: Any,  # noqa: ANN401
    batch_invariant: bool,
    keys: int,
    bias_dtype: Any,  # noqa: ANN401
    is_shared: bool,
    is_masked: bool,
    has_gradient: bool,
    rows: int,
    bias_rows: int,
) -> tuple[int, int]:
    coefficients, lib = (ctypes.c_int64 * 2)(), library()
    options = (_dtype_number(bias_dtype), is_shared, is_masked, has_gradient, rows, bias_rows)
    sizes = (q_heads, head_dim, value_dim, _dtype_number(dtype), batch_invariant, keys, *options)
    lib.xa_bias_workspace(lib.xa_op(target.encode()), *sizes, ctypes.byref(coefficients))
    return tuple(coefficients)


def _tensors(tensors: Sequence[ShapeAndDtype | View | None]) -> ctypes.Array:
    return (_Tensor * len(tensors))(*map(_tensor, tensors))


def _tensor(tensor: ShapeAndDtype | View | None) -> _Tensor:
    if tensor is None:
        return _Tensor()
    shape, dtype, *strides = tensor
    sizes = ctypes.c_int64 * len(shape)
    return _Tensor(None, sizes(*shape), sizes(*strides[0]) if strides else None, len(shape), _dtype_number(dtype))


def _dtype_number(dtype: Any) -> int:  # noqa: ANN401
    return dtype if isinstance(dtype, int) else DTYPES.get(np.dtype(dtype).name, _OTHER_DTYPE)


def _attribute(value: Any) -> _Attribute:  # noqa: ANN401
    kind = _ATTRIBUTE_KINDS[type(value)]
    return _Attribute(kind=kind, real=float(value) if kind == 2 else 0.0, integer=0 if kind == 2 else int(value))
