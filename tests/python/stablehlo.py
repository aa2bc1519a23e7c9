"""StableHLO text: compiled and run without JAX's own lowering in between, and the text that XLA makes of a lowering."""

import jax
import numpy as np
from jax._src import xla_bridge
from jax._src.lib import xla_client


def run_stablehlo(text: str, *arguments, platform: str = "cpu") -> list[np.ndarray]:
    """The results of ``@main`` in ``text``."""
    backend = xla_bridge.get_backend(platform)
    device = backend.local_devices()[0]
    options = xla_client.CompileOptions()
    if hasattr(backend, "compile_and_load"):
        try:
            executable = backend.compile_and_load(text, [device], options)
        except TypeError:  # jax 0.6 and 0.7
            executable = backend.compile_and_load(text, xla_client.DeviceList((device,)), options)
    else:  # jax 0.5
        executable = backend.compile(text, options)
    results = executable.execute_sharded([jax.device_put(a, device) for a in arguments])
    return [np.asarray(one[0]) for one in results.disassemble_into_single_device_arrays()]


def stablehlo_of(lowered: jax.stages.Lowered) -> str:
    """The program as XLA reads it, as StableHLO text.

    JAX holds the attributes of a typed custom call in ``mhlo.backend_config`` of an op that still says
    ``api_version = 1``; XLA reads both as version 4, which this text shows.
    """
    return xla_client._xla.mlir.xla_computation_to_mlir_module(lowered.compiler_ir("hlo"))
