"""`Program`: StableHLO text, compiled and run by jaxlib without JAX; works from jaxlib 0.4.38 on."""

import jax
import numpy as np
from jax._src import xla_bridge
from jax._src.lib import xla_client


class Program:
    """A compiled program on the first device of a platform.

    Examples
    --------
    >>> (out,) = Program(text)(np.ones(4, np.float32), np.ones(4, np.float32))
    """

    def __init__(self, text, platform="cpu"):
        backend = xla_bridge.get_backend(platform)
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
        """A buffer that may be donated: a copy in memory that JAX allocated, not that of a NumPy array."""
        return jax.block_until_ready(jax.device_put(array, self._device).copy())

    def run(self, buffers):
        """Run on device buffers; returns device buffers."""
        results = self._executable.execute_sharded(buffers)
        return [jax.block_until_ready(shards[0]) for shards in results.disassemble_into_single_device_arrays()]

    def __call__(self, *arrays):
        return [np.asarray(x) for x in self.run([jax.device_put(x, self._device) for x in arrays])]
