"""A report of what this installation contains and which front-ends can run."""

import importlib.metadata
import importlib.util

from . import _library, torch_xla


def info() -> str:
    """Versions, targets, kernel variants, devices, and for each front-end whether it can run, or why not.

    Returns
    -------
    str
        Several lines of text for a reader, not to be parsed; ``python -m xla_attention info`` prints them.

    Examples
    --------
    >>> import xla_attention
    >>> print(xla_attention.info().splitlines()[0].split()[0])
    xla-attention
    """
    build = _library.build_info()
    handlers = " and ".join(f"{major}.{minor}" for major, minor in build["handler_sets"])
    if not build["cuda"]:
        cuda = "without CUDA (built with --no-default-features)"
    elif build["cuda_archs"] == "all":
        cuda = "with CUDA"
    else:
        cuda = f"with no CUDA kernels but those of XLA_ATTENTION_CUDA_ARCHS={build['cuda_archs']}"
    lines = [f"xla-attention {build['version']}, {cuda}, handlers of XLA FFI {handlers}"]
    if build["failpoints"]:
        lines.append("for tests only: calls can be made to fail (built with the cargo feature failpoints)")
    if build["check"]:
        lines.append("every call is checked and waited for: XLA_ATTENTION_CHECK=1, for debugging only")
    platforms: dict[str, list[str]] = {}
    for name, platform in build["targets"]:
        platforms.setdefault(name, []).append(platform)
    lines += ["targets:", *(f"  {name} ({', '.join(names)})" for name, names in platforms.items())]
    lines += [
        "kernel variants, and their registers on each GPU for which there is machine code (SASS):",
        *_variants(build["variants"]),
    ]
    lines += ["front-ends:", f"  jax: {_jax()}", f"  torch: {_torch()}"]
    return "\n".join(lines)


def _variants(variants: list[dict]) -> list[str]:
    if not variants:
        return ["  none"]
    lines = []
    for variant in variants:
        archs = ", ".join(f"sm_{arch} {registers}" for arch, (registers, *_) in variant["sass"].items())
        lines.append(f"  {variant['name']}: {archs}")
    # A cubin also runs on later minor versions of its GPU's compute capability.
    return [*lines, "  sm_80 serves 8.6 and 8.9 too, sm_100 10.3; for GPUs that are not listed the driver compiles PTX"]


def _jax() -> str:
    """Whether JAX can use the library, its version and devices."""
    if importlib.util.find_spec("jax") is None:
        return "not installed (pip install jax)"
    try:
        import jax

        from .jax import _register

        handlers, runtime = _register.accepted(), _register.runtime_ffi_version()
        devices = ", ".join(f"{device.platform}:{device.device_kind}" for device in jax.devices())
    except (ImportError, RuntimeError) as error:
        return f"cannot run: {error}"
    return (
        f"ready, jax {jax.__version__}, devices {devices}; handlers of XLA FFI {handlers} "
        f"(the runtime has {runtime[0]}.{runtime[1]})"
    )


def _torch() -> str:
    """Whether torch and torch_xla can use the library, and their versions."""
    if importlib.util.find_spec("torch") is None:
        return "not installed (pip install torch)"
    try:
        import torch

        from . import torch as _  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return f"cannot run: {error}"
    cuda = "CUDA" if torch.cuda.is_available() else "no CUDA"
    if importlib.util.find_spec("torch_xla") is None:
        return f"ready, torch {torch.__version__} on CPU, {cuda}; torch_xla is not installed"
    registered = [f"{handler_set} ({platform.decode()})" for platform, handler_set in torch_xla.registered.items()]
    handlers = f"; handlers of XLA FFI {', '.join(registered)}" if registered else ""
    return (
        f"ready, torch {torch.__version__} on CPU, {cuda}; torch_xla {importlib.metadata.version('torch_xla')} with "
        f"PJRT_DEVICE=CPU, or on CUDA by xla_attention.torch.use_cuda_plugin(){handlers}"
    )
