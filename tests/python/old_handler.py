"""A handler of XLA FFI 0.0, which no runtime takes: what ours will be to one that has dropped 0.1."""

import ctypes

from xla_attention import _library

_METADATA = 24  # where the metadata extension, after its base of three words, points to the metadata
_MAJOR, _MINOR, _TRAITS = 24, 28, 32  # of the metadata: its size, then size and extension of the version come before


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def _handler(frame):
    """Answer the call that asks for the version; the frame has its first extension after its size."""
    extension = ctypes.c_size_t.from_address(frame + 8).value
    metadata = ctypes.c_size_t.from_address(extension + _METADATA).value
    for offset in (_MAJOR, _MINOR, _TRAITS):
        ctypes.c_int32.from_address(metadata + offset).value = 0


TARGET = _library.Target(b"of_xla_ffi_0_0", b"cpu", None, ctypes.cast(_handler, ctypes.c_void_p).value)
