"""DLPack's exchange interface of torch 2.10 and newer; for an older torch, as much of it as we use."""

import ctypes

import torch

NAME = b"dlpack_exchange_api"
DTYPES = [x for x in vars(torch).values() if isinstance(x, torch.dtype)]
# The numbers of DLPack.
CPU, CUDA = 1, 2


class View(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("sizes", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
    )


# The sizes and strides that views point to, by their values.
NUMBERS = {}


def numbers(values):
    return ctypes.addressof(NUMBERS.setdefault(tuple(values), (ctypes.c_int64 * len(values))(*values)))


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(View))
def describe(tensor, view):
    """Do what `dltensor_from_py_object_no_sync` does, without the error that it sets."""
    if tensor.layout != torch.strided:
        return -1
    to = view.contents
    to.data, to.rank, to.dtype, to.offset = tensor.data_ptr(), tensor.dim(), DTYPES.index(tensor.dtype), 0
    to.device[:] = (CUDA, tensor.device.index) if tensor.is_cuda else (CPU, 0)
    to.sizes, to.strides = numbers(tensor.shape), numbers(tensor.stride())
    return 0


# Capsules keep no table alive.
TABLES = []


def capsule(major_version=1):
    """The attribute ``__dlpack_c_exchange_api__`` of torch's tensors, torch's own where it has the version."""
    own = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if own and major_version == 1:
        return own
    # The version, no older interface, and five functions.
    function = ctypes.cast(describe, ctypes.c_void_p).value
    TABLES.append((ctypes.c_void_p * 7)(major_version | 3 << 32, None, None, None, None, function))
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(("PyCapsule_New", ctypes.pythonapi))(ctypes.addressof(TABLES[-1]), NAME, None)
