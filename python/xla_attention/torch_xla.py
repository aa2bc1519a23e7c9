"""Registration of the handlers with torch_xla's runtime, and CUDA for torch_xla through JAX's PJRT plugin.

torch_xla has no interface for typed handlers, but the runtimes below it have. The XLA client in torch_xla's extension
module (``PJRT_DEVICE=CPU``) has the FFI's function table, which a local symbol of the wheel returns; a PJRT plugin has
an extension for registration. Importing this module defines no operator and does not import torch.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
import mmap
import os
import pathlib
import re
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping

from . import _library

_TESTED = "2.9"
_SYMBOL = b"_ZN3xla3ffi12GetXlaFfiApiEv"  # const XLA_FFI_Api* xla::ffi::GetXlaFfiApi()
_INIT = b"PyInit__XLAC"
_API_SIZE = 192  # of XLA_FFI_Api, version 0.1
_GET_MESSAGE, _DESTROY, _REGISTER = 56, 64, 72  # offsets of its function pointers


class _Span(ctypes.Structure):
    _fields_ = (("ptr", ctypes.c_char_p), ("len", ctypes.c_size_t))


class _Register(ctypes.Structure):
    """XLA_FFI_Handler_Register_Args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("name", _Span),
        ("platform", _Span),
        ("instantiate", ctypes.c_void_p),
        ("prepare", ctypes.c_void_p),
        ("initialize", ctypes.c_void_p),
        ("execute", ctypes.c_void_p),
        ("traits", ctypes.c_uint32),
    )


class _RegisterWithPlugin(ctypes.Structure):
    """PJRT_Gpu_Register_Custom_Call_Args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("name_size", ctypes.c_size_t),
        ("api_version", ctypes.c_int),
        ("instantiate", ctypes.c_void_p),
        ("prepare", ctypes.c_void_p),
        ("initialize", ctypes.c_void_p),
        ("execute", ctypes.c_void_p),
    )


class _PluginError(ctypes.Structure):
    """PJRT_Error_Message_Args, which begins with the fields of PJRT_Error_Destroy_Args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
        ("message_size", ctypes.c_size_t),
    )


class _Error(ctypes.Structure):
    """XLA_FFI_Error_GetMessage_Args, which begins with the fields of XLA_FFI_Error_Destroy_Args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
    )


@functools.cache
def register_targets() -> None:
    """Register every target of the library with torch_xla's runtime; further calls do nothing.

    `xla_attention.torch` does this when both it and torch_xla are imported, and `use_cuda_plugin` for the plugin. Call
    it to use the targets in custom calls that you build without our operators; ``docs/torch.md`` has the caveats.

    Raises
    ------
    ImportError
        torch_xla is not installed, or its runtime does not support registration.
    RuntimeError
        The runtime rejected a handler.

    Examples
    --------
    >>> import xla_attention.torch_xla
    >>> xla_attention.torch_xla.register_targets()
    """
    _torch_xla()
    from torch_xla import runtime

    device = runtime.device_type()
    if _plugin is not None:
        return
    if device != "CPU":
        raise ImportError(
            f"xla_attention: torch_xla runs on {device}; there are handlers for PJRT_DEVICE=CPU, and for CUDA after "
            "xla_attention.torch.use_cuda_plugin()"
        )
    register_with_cpu_client()


@functools.cache
def register_with_cpu_client() -> None:
    """Register the CPU handlers with the XLA client in torch_xla's extension module, which has to be loaded.

    This does not create the client, so that torch_xla may still use another device. Raises as `register_targets` does.
    """
    api = _ffi_api(importlib.metadata.version("torch_xla"))
    _register_accepted(_library.compatible_sets(_version(api)), b"cpu", functools.partial(_register, api))


def use_cuda_plugin(path: str | os.PathLike | None = None, **options: str | bool | int | float) -> None:
    """Run torch_xla on NVIDIA GPUs, through the PJRT plugin that JAX uses. Call it before the first XLA tensor.

    torch_xla 2.9 does not support CUDA itself. Our library is loaded as a proxy of the plugin, because torch_xla aborts
    when a client's platform is named "cuda", and passes execute options of an older version. ``PJRT_DEVICE`` becomes
    ``GPU``, unless it is ``CUDA``. Tested with torch_xla 2.9.0 and jax-cuda13-pjrt 0.11.2.

    Parameters
    ----------
    path
        The plugin's ``xla_cuda_plugin.so``; by default that of the installed jax-cuda13-pjrt or jax-cuda12-pjrt.
    options
        Options of the PJRT client, see JAX's documentation. The defaults are ``preallocate=False`` and
        ``allocator="default"``.

    Raises
    ------
    ImportError
        torch_xla or the plugin is not installed.
    RuntimeError
        The plugin cannot be used, or torch_xla has initialised its runtime already.

    Examples
    --------
    >>> import xla_attention.torch_xla
    >>> xla_attention.torch_xla.use_cuda_plugin("/nowhere/xla_cuda_plugin.so")
    Traceback (most recent call last):
    ImportError: xla_attention: /nowhere/xla_cuda_plugin.so is not there; pip install jax-cuda13-pjrt==0.11.2
    """
    path = _find_plugin() if path is None else pathlib.Path(path)
    if not path.is_file():
        raise ImportError(f"xla_attention: {path} is not there; pip install jax-cuda13-pjrt==0.11.2")
    before = os.environ.get("PJRT_DEVICE")
    device = "CUDA" if before == "CUDA" else "GPU"
    # Set before torch_xla is imported, which otherwise chooses a device and warns.
    os.environ["PJRT_DEVICE"] = device
    try:
        _use_plugin(path.resolve(), device, options)
    except BaseException:
        if before is None and "torch_xla" not in sys.modules:
            del os.environ["PJRT_DEVICE"]
        else:
            os.environ["PJRT_DEVICE"] = before or "CPU"  # which torch_xla would have chosen
        raise


def _use_plugin(path: pathlib.Path, device: str, options: Mapping[str, str | bool | int | float]) -> None:
    """Load our library as a proxy of the plugin, register the handlers, and make the proxy torch_xla's plugin."""
    global _plugin
    _torch_xla()
    import _XLAC
    from torch_xla.experimental import plugins

    if _XLAC._xla_runtime_is_initialized():
        raise RuntimeError("xla_attention: torch_xla has made its device already; call use_cuda_plugin() before that")
    message = ctypes.create_string_buffer(1024)
    if _library.library().xa_stand_before_pjrt_plugin(os.fsencode(path), message, len(message)):
        raise RuntimeError(f"xla_attention: {message.value.decode()}")
    _register_with_plugin(path)

    class Plugin(plugins.DevicePlugin):
        def library_path(self) -> str:
            return str(_library.library_path())

        def client_create_options(self) -> dict[str, str | bool | int | float]:
            return {"platform_name": "gpu", "preallocate": False, "allocator": "default", **options}

        def physical_chip_count(self) -> int:
            return 1

    plugins.use_dynamic_plugins()
    plugins.register_plugin(device, Plugin())
    _plugin = path


# The plugin of a successful use_cuda_plugin.
_plugin: pathlib.Path | None = None


def _torch_xla() -> types.ModuleType:
    try:
        import torch_xla
    except ImportError as error:
        text = f"xla_attention: torch_xla cannot be imported ({error}); pip install torch_xla==2.9.0"
        raise ImportError(text) from error
    return torch_xla


def _find_plugin() -> pathlib.Path:
    """The CUDA plugin of the installed jax-cuda13-pjrt or jax-cuda12-pjrt."""
    for name in ("xla_cuda13", "xla_cuda12"):
        try:
            spec = importlib.util.find_spec(f"jax_plugins.{name}")
        except ImportError:
            break
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (file := pathlib.Path(folder, "xla_cuda_plugin.so")).is_file():
                return file
    raise ImportError("xla_attention: no CUDA plugin is installed; pip install jax-cuda13-pjrt==0.11.2")


def _register_with_plugin(path: pathlib.Path) -> None:
    """Register every CUDA target through the plugin's extension for custom calls."""
    plugin = ctypes.CDLL(str(path))  # loaded already, by the proxy
    plugin.GetPjrtApi.restype = ctypes.c_void_p
    api = plugin.GetPjrtApi()
    extension = _pointer(api, 8)
    # An extension begins with its size, its type and the next extension; type 0 is PJRT_Gpu_Custom_Call.
    while extension and ctypes.c_int.from_address(extension + 8).value != 0:
        extension = _pointer(extension, 16)
    if not extension:
        raise RuntimeError(f"xla_attention: {path} takes no custom calls; pip install jax-cuda13-pjrt==0.11.2")

    def register(target: _library.Target) -> None:
        arguments = _RegisterWithPlugin(
            struct_size=ctypes.sizeof(_RegisterWithPlugin),
            name=target.name,
            name_size=len(target.name),
            api_version=1,  # typed
            initialize=target.initialize,
            execute=target.execute,
        )
        error = _function(extension, 24, ctypes.c_void_p)(ctypes.byref(arguments))
        if error:
            text = _PluginError(struct_size=ctypes.sizeof(_PluginError), error=error)
            _function(api, 48, None)(ctypes.byref(text))
            message = ctypes.string_at(text.message, text.message_size).decode()
            _function(api, 40, None)(ctypes.byref(_PluginError(struct_size=_PluginError.message.offset, error=error)))
            raise RuntimeError(f"xla_attention: {path} refuses the handler of {target.name.decode()}: {message}")

    # The plugin does not report its FFI version, and only the oldest handlers are safe to try in every runtime.
    _register_accepted(_library.handler_sets()[::-1], b"CUDA", register)


def _register_accepted(
    candidates: list[_library.HandlerSet], platform: bytes, register: Callable[[_library.Target], None]
) -> None:
    """Register every target of the first set that the runtime accepts; the first target of each set probes it."""
    for candidate in candidates:
        first, *others = (target for target in candidate.targets if target.platform == platform)
        try:
            register(first)
        except RuntimeError:
            if candidate is candidates[-1]:
                raise
            continue
        for target in others:
            register(target)
        registered[platform] = candidate
        return


# The set of handlers that is registered with torch_xla's runtime, by platform.
registered: dict[bytes, _library.HandlerSet] = {}


def _register(api: int, target: _library.Target) -> None:
    arguments = _Register(
        struct_size=_Register.traits.offset + 4,
        name=_Span(target.name, len(target.name)),
        platform=_Span(b"Host", 4),
        initialize=target.initialize,
        execute=target.execute,
    )
    error = _function(api, _REGISTER, ctypes.c_void_p)(ctypes.byref(arguments))
    if error:
        text = _Error(struct_size=ctypes.sizeof(_Error), error=error)
        _function(api, _GET_MESSAGE, None)(ctypes.byref(text))
        message = text.message.decode()
        _function(api, _DESTROY, None)(ctypes.byref(_Error(struct_size=_Error.message.offset, error=error)))
        raise RuntimeError(f"xla_attention: torch_xla refuses the handler of {target.name.decode()}: {message}")


def _function(table: int, offset: int, returns: type | None) -> ctypes._CFuncPtr:
    """The function at an offset of a table, which takes a pointer to its arguments."""
    return ctypes.CFUNCTYPE(returns, ctypes.c_void_p)(_pointer(table, offset))


def _pointer(address: int, offset: int) -> int:
    return ctypes.c_size_t.from_address(address + offset).value


def _ffi_api(version: str) -> int:
    """The address of the XLA_FFI_Api of torch_xla's CPU client."""
    import _XLAC

    path = pathlib.Path(_XLAC.__file__).resolve()
    values = _symbols(path, (_SYMBOL, _INIT))
    if len(values) == 2:
        base = ctypes.cast(ctypes.CDLL(str(path)).PyInit__XLAC, ctypes.c_void_p).value - values[_INIT]
        api = ctypes.CFUNCTYPE(ctypes.c_void_p)(base + values[_SYMBOL])()
    else:
        api = _scan_memory(path)
    if not api:
        raise ImportError(f"xla_attention: no XLA FFI is found in torch_xla {version}; tested with {_TESTED}")
    if _pointer(api, 0) < _API_SIZE or not _library.compatible_sets(_version(api)):
        major, minor = _version(api)
        supported = _library.join_versions(_library.handler_sets())
        raise ImportError(
            f"xla_attention has handlers of XLA FFI {supported}, torch_xla {version} has {major}.{minor}; "
            f"tested with {_TESTED}"
        )
    return api


def _version(api: int) -> tuple[int, int]:
    """The version of an XLA_FFI_Api, whose fields are size, extension, and then size, extension, major, minor."""
    return struct.unpack("<2i", ctypes.string_at(api + 32, 8))


def _symbols(path: pathlib.Path, names: tuple[bytes, ...]) -> dict[bytes, int]:
    """The values of those symbols that an ELF file has, local ones included."""
    values: dict[bytes, int] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
        if elf[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
            return values
        (table,), (size, count) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<HH", elf, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
        for _, kind, _, _, offset, length, link, *_ in sections:
            if kind not in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
                continue
            strings, strings_len = sections[link][4], sections[link][5]
            name_offsets = {
                elf.find(b"\0" + name + b"\0", strings, strings + strings_len) + 1 - strings: name for name in names
            }
            for name, _, _, section, value, _ in struct.iter_unpack("<IBBHQQ", elf[offset : offset + length]):
                if name in name_offsets and section and value:
                    values.setdefault(name_offsets[name], value)
    return values


def _scan_memory(path: pathlib.Path) -> int | None:
    """The XLA_FFI_Api in a module without symbols: the only static object that begins with its header."""
    header = struct.pack("<4Q2i", _API_SIZE, 0, 24, 0, 0, 1)
    hits = []
    for start, end in _writable_mappings(path):
        memory = ctypes.string_at(start, end - start)
        hits += [start + m.start() for m in re.finditer(re.escape(header), memory) if m.start() % 8 == 0]
    return hits[0] if len(hits) == 1 else None


def _writable_mappings(path: pathlib.Path) -> Iterator[tuple[int, int]]:
    """The start and end of each writable mapping of a loaded file."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and "w" in fields[1] and os.path.realpath(fields[5]) == str(path):
            start, end = fields[0].split("-")
            yield int(start, 16), int(end, 16)
