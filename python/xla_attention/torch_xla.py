"""Our handlers in torch_xla's runtime, at run time and without a patch; and CUDA for torch_xla, through JAX's plugin.

torch_xla has no interface for typed handlers, but the runtimes below it have: the XLA client inside of torch_xla's own
extension module, for ``PJRT_DEVICE=CPU``, keeps a table of the FFI's functions, a local symbol of the wheel; a PJRT
plugin offers registration as an extension of its interface. Importing this module defines no operator and does not
import torch; `xla_attention.torch` uses it.
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
_GET_MESSAGE, _DESTROY, _REGISTER = 56, 64, 72  # where its functions are


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
    """PJRT_Error_Message_Args, of which PJRT_Error_Destroy_Args is the beginning."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
        ("message_size", ctypes.c_size_t),
    )


class _Error(ctypes.Structure):
    """XLA_FFI_Error_GetMessage_Args, of which XLA_FFI_Error_Destroy_Args is the beginning."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
    )


@functools.cache
def register_targets() -> None:
    """Register every target of the library with torch_xla's runtime; further calls do nothing.

    `xla_attention.torch` does this by itself as soon as both it and torch_xla are imported, and `use_cuda_plugin` does
    it for the plugin. It is of use for a custom call that one builds oneself, without our operators, with the caution
    that ``docs/torch.md`` gives.

    Raises
    ------
    ImportError
        torch_xla is not installed, or its runtime is not one that this can register with.
    RuntimeError
        The runtime refused a handler.

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
    """Register the CPU handlers with the XLA client inside of torch_xla's extension module, which is loaded already.

    The client is not made, and torch_xla may go on to use another device. Raises what `register_targets` raises.
    """
    api = _ffi_api(importlib.metadata.version("torch_xla"))
    _register_accepted(_library.known_to(_version(api)), b"cpu", functools.partial(_register, api))


def use_cuda_plugin(path: str | os.PathLike | None = None, **options: str | bool | int | float) -> None:
    """Run torch_xla on NVIDIA GPUs, through the PJRT plugin that JAX uses; before the first XLA tensor.

    torch_xla 2.9 has no CUDA of its own. Our library stands before the plugin, because torch_xla aborts at a client
    that calls itself "cuda", and is too old for the plugin's execute options. ``PJRT_DEVICE`` becomes ``GPU``, or stays
    ``CUDA`` where it is that. Tried: torch_xla 2.9.0 with jax-cuda13-pjrt 0.11.2.

    Parameters
    ----------
    path
        The plugin's ``xla_cuda_plugin.so``; by default that of the installed jax-cuda13-pjrt or jax-cuda12-pjrt.
    options
        For the client, over ``preallocate=False`` and ``allocator="default"``; see JAX's documentation.

    Raises
    ------
    ImportError
        torch_xla or the plugin is not installed.
    RuntimeError
        The plugin cannot be used, or torch_xla has made its device already.

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
    # Where none is named, importing torch_xla chooses one and warns of it.
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
    """Put our library before the plugin, register our handlers with it, and make it torch_xla's."""
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


# What use_cuda_plugin has chosen.
_plugin: pathlib.Path | None = None


def _torch_xla() -> types.ModuleType:
    try:
        import torch_xla
    except ImportError as error:
        text = f"xla_attention: torch_xla cannot be imported ({error}); pip install torch_xla==2.9.0"
        raise ImportError(text) from error
    return torch_xla


def _find_plugin() -> pathlib.Path:
    """The CUDA plugin of the installed JAX."""
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
    plugin = ctypes.CDLL(str(path))  # the copy that is loaded already
    plugin.GetPjrtApi.restype = ctypes.c_void_p
    api = plugin.GetPjrtApi()
    extension = _word(api, 8)
    # Extensions begin with their size, type and successor; type 0 is PJRT_Gpu_Custom_Call.
    while extension and ctypes.c_int.from_address(extension + 8).value != 0:
        extension = _word(extension, 16)
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

    # The plugin does not tell its version, and only the oldest handlers may be shown to every runtime.
    _register_accepted(_library.handler_sets()[::-1], b"CUDA", register)


def _register_accepted(
    candidates: list[_library.HandlerSet], platform: bytes, register: Callable[[_library.Target], None]
) -> None:
    """Register every target of the first set that the runtime takes, which is asked with the set's first target."""
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


# The set of handlers that torch_xla's runtime has for a platform.
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


def _function(api: int, offset: int, returns: type | None) -> ctypes._CFuncPtr:
    return ctypes.CFUNCTYPE(returns, ctypes.c_void_p)(_word(api, offset))


def _word(address: int, offset: int) -> int:
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
        api = _scan(path)
    if not api:
        raise ImportError(f"xla_attention: no XLA FFI is found in torch_xla {version}; tested with {_TESTED}")
    if _word(api, 0) < _API_SIZE or not _library.known_to(_version(api)):
        major, minor = _version(api)
        raise ImportError(
            f"xla_attention speaks XLA FFI {_library.versions(_library.handler_sets())}, torch_xla {version} speaks "
            f"{major}.{minor}; tested with {_TESTED}"
        )
    return api


def _version(api: int) -> tuple[int, int]:
    """That of an XLA_FFI_Api: struct_size, extension_start, then struct_size, extension_start, major, minor."""
    return struct.unpack("<2i", ctypes.string_at(api + 32, 8))


def _symbols(path: pathlib.Path, names: tuple[bytes, ...]) -> dict[bytes, int]:
    """Values of symbols of an ELF file, local ones included; those that are there."""
    found: dict[bytes, int] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
        if elf[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
            return found
        (table,), (size, count) = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<HH", elf, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
        for _, kind, _, _, offset, length, link, *_ in sections:
            if kind not in (2, 11):  # SHT_SYMTAB, SHT_DYNSYM
                continue
            strings, strings_len = sections[link][4], sections[link][5]
            places = {
                elf.find(b"\0" + name + b"\0", strings, strings + strings_len) + 1 - strings: name for name in names
            }
            for name, _, _, section, value, _ in struct.iter_unpack("<IBBHQQ", elf[offset : offset + length]):
                if name in places and section and value:
                    found.setdefault(places[name], value)
    return found


def _scan(path: pathlib.Path) -> int | None:
    """The table in a module without symbols: a static object, found by its first words if just one place has them."""
    header = struct.pack("<4Q2i", _API_SIZE, 0, 24, 0, 0, 1)
    hits = []
    for start, end in _writable(path):
        memory = ctypes.string_at(start, end - start)
        hits += [start + m.start() for m in re.finditer(re.escape(header), memory) if m.start() % 8 == 0]
    return hits[0] if len(hits) == 1 else None


def _writable(path: pathlib.Path) -> Iterator[tuple[int, int]]:
    """The writable mappings of a loaded file."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        words = line.split(None, 5)
        if len(words) == 6 and "w" in words[1] and os.path.realpath(words[5]) == str(path):
            start, end = words[0].split("-")
            yield int(start, 16), int(end, 16)
