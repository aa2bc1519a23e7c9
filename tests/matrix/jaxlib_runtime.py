"""The FFI version and the target registry of jaxlib, from 0.4.38 on, without JAX's front-end."""

import ctypes
import pathlib
import re

import jax
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
    """Register every row of the library's table, as xla_attention.jax does, for a JAX that it does not support."""
    for target in _library.targets():
        stages = {"initialize": target.initialize, "execute": target.execute}
        capsules = {name: ffi.pycapsule(ctypes.c_void_p(address)) for name, address in stages.items() if address}
        ffi.register_ffi_target(target.name.decode(), capsules, platform=target.platform.decode())


def registered_targets():
    """The names in the runtime's registry for the CPU."""
    xla_bridge.get_backend("cpu")  # registrations are queued until it exists
    return set(xla_client.custom_call_targets("Host"))
