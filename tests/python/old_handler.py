"""A handler of XLA FFI 0.0, which every runtime rejects, as a future runtime may reject ours of 0.1."""

import ctypes

from xla_attention import _library

_METADATA = 24  # offset of the pointer to the metadata in the metadata extension
_MAJOR, _MINOR, _TRAITS = 24, 28, 32  # offsets in the metadata


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def _handler(frame):
    """Write version 0.0 into the metadata, which the frame's first extension points to."""
    extension = ctypes.c_size_t.from_address(frame + 8).value
    metadata = ctypes.c_size_t.from_address(extension + _METADATA).value
    for offset in (_MAJOR, _MINOR, _TRAITS):
        ctypes.c_int32.from_address(metadata + offset).value = 0


TARGET = _library.Target(b"of_xla_ffi_0_0", b"cpu", None, ctypes.cast(_handler, ctypes.c_void_p).value)
