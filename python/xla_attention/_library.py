"""The shared library through ctypes: its tables, and the shape check that every front-end makes at trace time."""

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

# XLA's numbers of the element types (xla_data.proto PrimitiveType), by numpy's names for them.
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
# An element type that XLA has and no operator takes; the check then names it by number.
_OTHER_DTYPE = -1

_INVALID_ARGUMENT, _UNIMPLEMENTED = 3, 12
_KINDS = {np.bool_: 0, np.int64: 1, np.float32: 2}


class Target(ctypes.Structure):
    """A row of the library's table of targets; a stage that is None does not exist."""

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
    )


def library_path() -> pathlib.Path:
    """The file of the shared library: the one beside this file, or the one that ``XLA_ATTENTION_LIBRARY`` names."""
    given = os.environ.get("XLA_ATTENTION_LIBRARY")
    here = pathlib.Path(__file__).parent
    return pathlib.Path(given) if given else next(iter(sorted(here.glob("*xla_attention.*"))), here / "missing")


def include_dir() -> pathlib.Path:
    """The folder of ``xla_attention.h``, the C interface of the shared library.

    Examples
    --------
    >>> import xla_attention
    >>> (xla_attention.include_dir() / "xla_attention.h").is_file()
    True
    """
    return pathlib.Path(__file__).parent / "include"


@functools.cache
def library() -> ctypes.CDLL:
    """The library at `library_path`. Loaded once, never unloaded."""
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
    lib.xa_call.argtypes = [ctypes.POINTER(_Call), ctypes.c_char_p, ctypes.c_size_t]
    lib.xa_stand_before_pjrt_plugin.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    sizes = [ctypes.c_int64] * 4
    coefficients = ctypes.POINTER(ctypes.c_int64 * 3)
    lib.xa_workspace.argtypes = [ctypes.c_int32, *sizes, ctypes.c_int32, ctypes.c_bool, coefficients]
    lib.xa_workspace.restype = None
    return lib


def build_info() -> dict[str, Any]:
    """What the library holds; `xa_info` in ``src/c_api.rs`` lists it."""
    return json.loads(library().xa_info())


class HandlerSet(NamedTuple):
    """Handlers of every target, for each platform, that speak one version of the XLA FFI."""

    version: tuple[int, int]
    targets: list[Target]

    def __str__(self) -> str:
        """The version."""
        return f"{self.version[0]}.{self.version[1]}"


def handler_sets() -> list[HandlerSet]:
    """The library's sets of handlers, from the newest version of the FFI to the oldest."""
    sets, number = [], 0
    while table := library().xa_handler_set(number):
        found = table.contents
        sets.insert(0, HandlerSet((found.api_major, found.api_minor), found.rows[: found.count]))
        number += 1
    return sets


def known_to(runtime: tuple[int, int]) -> list[HandlerSet]:
    """The sets that may be shown to a runtime of this version, from the newest to the oldest.

    A handler of a later version must not even be asked for its version: it writes more into its answer than an older
    runtime has room for.
    """
    return [one for one in handler_sets() if one.version[0] == runtime[0] and one.version <= runtime]


def versions(sets: Iterable[HandlerSet]) -> str:
    """The versions of sets in words, the oldest first."""
    return " and ".join(str(one) for one in sorted(sets, key=lambda one: one.version))


def targets() -> list[Target]:
    """Every target of the library, for each platform, with the handlers of the oldest version."""
    return handler_sets()[-1].targets


ShapeAndDtype = tuple[Sequence[int], Any]


class View(NamedTuple):
    """A tensor in memory that is given later: rows may be apart."""

    shape: Sequence[int]
    dtype: Any  # numpy's, or XLA's number of it
    strides: Sequence[int]  # in elements


class Action(enum.IntEnum):
    """What a call of the library is to do."""

    CHECK = 0
    RUN_ON_CPU = 1
    PREPARE_CUDA = 2
    LAUNCH_CUDA = 3


class _Messages(threading.local):
    """Buffers for the texts of errors: one for each thread, and more where calls of a thread are nested."""

    def __init__(self) -> None:
        self.free: list[ctypes.Array] = []


_MESSAGES = _Messages()


class Request:
    """A call of an operator, described once and taken as often as wanted; by one thread at a time.

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

    def place(self, operands: Iterable[int], results: Iterable[int]) -> None:
        """Set the addresses, 0 for what is left out."""
        for tensors, addresses in ((self._operands, operands), (self._results, results)):
            for tensor, address in zip(tensors, addresses, strict=True):
                tensor.data = address

    def take(self, action: Action, stream: int = 0) -> None:
        """Do something; running on the CPU waits for the end, launching on CUDA does not.

        Raises
        ------
        ValueError
            Something is wrong; the text names the operand, what it is and what was expected.
        NotImplementedError
            Allowed by the definition, but not built.
        RuntimeError
            It could not be run.
        """
        self._request.action, self._request.stream = action, stream
        # Taken out of the list while it is in use: a signal handler may make a call of its own meanwhile.
        message = _MESSAGES.free.pop() if _MESSAGES.free else ctypes.create_string_buffer(1024)
        code = self._lib.xa_call(ctypes.byref(self._request), message, len(message))
        text = message.value.decode() if code else ""
        _MESSAGES.free.append(message)
        if code:
            error = {_INVALID_ARGUMENT: ValueError, _UNIMPLEMENTED: NotImplementedError}.get(code, RuntimeError)
            raise error(text)


def check(
    target: str,
    operands: Sequence[ShapeAndDtype | None],
    results: Sequence[ShapeAndDtype | None],
    attributes: Mapping[str, Any],
) -> None:
    """Hold shapes, dtypes and attributes against the operator's definition, without any data; see `Request`."""
    Request(target, operands, results, attributes).take(Action.CHECK)


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
) -> Any:  # noqa: ANN401
    """How many bytes of workspace a call of attention or its gradients wants.

    `rows` of the query and `sequences` may be symbolic; `batch_invariant` has no meaning for the gradients.
    """
    static = (target, q_heads, kv_heads, head_dim, value_dim, dtype, batch_invariant)
    constant, per_row, per_sequence = _workspace_coefficients(*static)
    return constant + per_row * rows + per_sequence * sequences


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
    sizes = (q_heads, kv_heads, head_dim, value_dim, _number(dtype), batch_invariant)
    lib.xa_workspace(lib.xa_op(target.encode()), *sizes, ctypes.byref(coefficients))
    return tuple(coefficients)


def _tensors(tensors: Sequence[ShapeAndDtype | View | None]) -> ctypes.Array:
    return (_Tensor * len(tensors))(*map(_tensor, tensors))


def _tensor(tensor: ShapeAndDtype | View | None) -> _Tensor:
    if tensor is None:
        return _Tensor()
    shape, dtype, *strides = tensor
    sizes = ctypes.c_int64 * len(shape)
    return _Tensor(None, sizes(*shape), sizes(*strides[0]) if strides else None, len(shape), _number(dtype))


def _number(dtype: Any) -> int:  # noqa: ANN401
    return dtype if isinstance(dtype, int) else DTYPES.get(np.dtype(dtype).name, _OTHER_DTYPE)


def _attribute(value: Any) -> _Attribute:  # noqa: ANN401
    kind = _KINDS[type(value)]
    return _Attribute(kind=kind, real=float(value) if kind == 2 else 0.0, integer=0 if kind == 2 else int(value))
