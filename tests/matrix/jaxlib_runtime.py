"""jaxlib 0.4.38 to today, below JAX's own lowering: its FFI version, registration, programs from text."""

import ctypes
import pathlib
import re

import jax
import numpy as np
from jax._src import xla_bridge
from jax._src.lib import xla_client

from xla_attention import _library

try:
    ffi = jax.ffi
except AttributeError:  # before jax 0.5
    import jax.extend.ffi as ffi


def ffi_version():
    header = pathlib.Path(ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    return ".".join(re.search(rf"#define XLA_FFI_API_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR"))


def register_targets():
    """Every row of the library's own table; what our JAX front-end does, for a jax that it refuses."""
    for target in _library.targets():
        stages = {"initialize": target.initialize, "execute": target.execute}
        capsules = {name: ffi.pycapsule(ctypes.c_void_p(address)) for name, address in stages.items() if address}
        ffi.register_ffi_target(target.name.decode(), capsules, platform=target.platform.decode())


def registered_targets():
    """Names that the runtime's own registry holds for the CPU."""
    xla_bridge.get_backend("cpu")  # until there is a backend, registrations wait
    return set(xla_client.custom_call_targets("Host"))


class Program:
    """A compiled program on the CPU.

    Examples
    --------
    >>> (out,) = Program(text)(np.ones(4, np.float32), np.ones(4, np.float32))
    """

    def __init__(self, text):
        backend = xla_bridge.get_backend("cpu")
        self._device = backend.local_devices()[0]
        options = xla_client.CompileOptions()
        if not hasattr(backend, "compile_and_load"):  # to 0.5
            self._executable = backend.compile(text, options)
            return
        try:
            self._executable = backend.compile_and_load(text, [self._device], options)
        except TypeError:  # 0.6, 0.7
            self._executable = backend.compile_and_load(text, xla_client.DeviceList((self._device,)), options)

    def on_device(self, array):
        """A buffer that the program may take over: JAX's own memory, never that of a NumPy array."""
        return jax.block_until_ready(jax.device_put(array, self._device).copy())

    def run(self, buffers):
        """Device buffers to device buffers."""
        results = self._executable.execute_sharded(buffers)
        return [jax.block_until_ready(one[0]) for one in results.disassemble_into_single_device_arrays()]

    def __call__(self, *arrays):
        return [np.asarray(x) for x in self.run([self.on_device(x) for x in arrays])]
