"""Registration of the custom-call targets with JAX's runtime."""

import ctypes
import functools
import pathlib
import re
from typing import TYPE_CHECKING

import jax

from .. import _library

if TYPE_CHECKING:
    import jax.export


def runtime_ffi_version() -> tuple[int, int]:
    """The XLA FFI version of the installed jaxlib, read from the header that it ships."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", header) for part in ("MAJOR", "MINOR"))
    if major is None or minor is None:
        raise ImportError(f"xla_attention: no XLA FFI version in the headers of jaxlib {jax.lib.__version__}")
    return int(major[1]), int(minor[1])


@functools.cache
def accepted() -> _library.HandlerSet:
    """The newest set of handlers that this jaxlib accepts.

    JAX queues handlers until the backend starts, and one that the backend rejects then breaks it. Each set is therefore
    probed with one of its handlers first.

    Raises
    ------
    ImportError
        This jaxlib accepts none: it is older than all handlers, or too new.
    """
    if not hasattr(jax, "ffi"):
        raise ImportError(f"xla_attention needs jax >= 0.5, this is {jax.__version__}")
    runtime = runtime_ffi_version()
    candidates = _library.compatible_sets(runtime)
    ours = f"xla_attention has handlers of XLA FFI {_library.join_versions(_library.handler_sets())}"
    if not candidates:
        raise ImportError(f"{ours}, jaxlib {jax.lib.__version__} has {runtime[0]}.{runtime[1]}: upgrade jax")
    for candidate in candidates:
        target = next(target for target in candidate.targets if target.platform == b"cpu")
        if (error := rejection(target)) is None:
            return candidate
    raise ImportError(
        f"{ours}, and jaxlib {jax.lib.__version__} accepts none of them: install an older jax or a newer "
        f"xla-attention ({error})"
    )


def rejection(target: _library.Target) -> str | None:
    """The error with which the runtime rejects a CPU handler; None if it accepts the handler or cannot be probed.

    ``jax.ffi.register_ffi_target`` only queues a handler. The jaxlib function below it registers at once, but is not
    public: an error of another type means that the function has changed, not that it rejects the handler.
    """
    try:
        from jaxlib import xla_client

        register, traits = xla_client._xla.register_custom_call_target, xla_client.CustomCallTargetTraits.DEFAULT
        register(target.name.decode(), _handlers(target), "cpu", 1, traits)
    except (ImportError, AttributeError, TypeError):
        return None
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _handlers(target: _library.Target) -> dict[str, object]:
    """The handlers of a target by stage, as `jax.ffi.register_ffi_target` takes them."""
    stages = {"initialize": target.initialize, "execute": target.execute}
    return {name: jax.ffi.pycapsule(ctypes.c_void_p(address)) for name, address in stages.items() if address}


@functools.cache
def register_targets() -> None:
    """Register every target of the library for the platforms ``cpu`` and ``CUDA``; further calls do nothing.

    Raises
    ------
    ImportError
        The installed jaxlib has another version of the FFI; nothing has been registered.
    """
    for target in accepted().targets:
        jax.ffi.register_ffi_target(target.name.decode(), _handlers(target), platform=target.platform.decode())


def export_disabled_checks() -> "list[jax.export.DisabledSafetyCheck]":
    """The `disabled_checks` with which `jax.export.export` accepts programs with our custom calls.

    JAX guarantees compatibility of its own custom calls only. Ours are stable
    (`docs/dev/architecture.md#compatibility`): an exported program runs in another process, on another machine and with
    a later version of this package, once that process has imported ``xla_attention.jax``.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from jax import export
    >>> from xla_attention.jax import export_disabled_checks, simple_add
    >>> one = jax.ShapeDtypeStruct((4,), jnp.float32)
    >>> exported = export.export(jax.jit(simple_add), disabled_checks=export_disabled_checks())(one, one)
    >>> exported.call(jnp.ones(4), jnp.ones(4))
    Array([2., 2., 2., 2.], dtype=float32)
    """
    # `import jax` does not import it in every version, and some versions need a further package for it.
    from jax import export

    names = sorted({target.name.decode() for target in _library.targets()})
    return [export.DisabledSafetyCheck.custom_call(name) for name in names]
