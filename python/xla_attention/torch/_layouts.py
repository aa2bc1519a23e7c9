"""The layouts of a call's tensors: a key that is equal for tensors with one plan, and their addresses."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from .. import _library

# Calls with more tensors, results included, or with more bytes of layouts have no plan.
MAX_TENSORS, _MAX_BYTES = 64, 4096

_Key = ctypes.c_char * _MAX_BYTES


class _Exchange:
    """Functions that describe tensors to C: `xa_layouts` and, as addresses, those that it calls."""

    def __init__(self, describe: int) -> None:
        # PyDLL, because the functions ask for Python's lock.
        self.layouts = ctypes.PyDLL(str(_library.library_path())).xa_layouts
        self.item = ctypes.cast(ctypes.pythonapi.PyList_GetItem, ctypes.c_void_p).value
        self.describe = describe


def _exchange() -> _Exchange | None:
    """The functions, where torch has DLPack's exchange interface (from 2.10 on), version 1."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    try:
        address = pointer(capsule, b"dlpack_exchange_api")
    except ValueError:
        # It is another version of the interface, which an extension has given to an older torch.
        return None
    major_version = ctypes.c_uint32.from_address(address).value
    # After two numbers of a version and the address of an older interface come the functions, this one as the fourth.
    describe = (ctypes.c_void_p * 6).from_address(address)[5]
    return _Exchange(describe) if major_version == 1 and describe else None


_EXCHANGE = _exchange()


class Memory(_library.CallMemory):
    """Memory of a call; the addresses of its tensors are followed by those of its new results."""

    def __init__(self) -> None:
        super().__init__(MAX_TENSORS)
        if _EXCHANGE is None:
            return
        self._key = _Key()
        self._layouts = _library.Layouts(
            struct_size=ctypes.sizeof(_library.Layouts),
            item=_EXCHANGE.item,
            describe=_EXCHANGE.describe,
            addresses=self.address,
            key=ctypes.addressof(self._key),
            capacity=_MAX_BYTES,
        )
        self._reference = ctypes.byref(self._layouts)

    def describe(self, tensors: list[torch.Tensor]) -> Any:  # noqa: ANN401
        """Fill in the addresses of tensors; returns what is equal for other tensors with the same layouts.

        These are dtypes, devices, shapes and strides, and which of the tensors begin at one address. None for tensors
        without such a layout.
        """
        count = len(tensors)
        if count > MAX_TENSORS:
            return None
        try:
            if _EXCHANGE is None:
                return self._describe_in_python(tensors, count)
            layouts = self._layouts
            layouts.list = id(tensors)
            layouts.count = count
            size = _EXCHANGE.layouts(self._reference)
        except (BufferError, RuntimeError, NotImplementedError):
            # Not dense, or on a device of another kind: the operator knows what to do with it.
            return None
        return self._key[:size] if size >= 0 else None

    def _describe_in_python(self, tensors: Sequence[torch.Tensor], count: int) -> tuple:
        addresses = [tensor.data_ptr() for tensor in tensors]
        self.addresses[:count] = addresses
        key = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors]
        if len(set(addresses)) < count:
            key.append(tuple(map(addresses.index, addresses)))
        return tuple(key)
