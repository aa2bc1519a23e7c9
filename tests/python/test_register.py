"""Registration with runtimes that accept some of our handlers, or none."""

import ctypes
import struct

import jax
import pytest

from subprocesses import python
from xla_attention import _library, torch_xla
from xla_attention.jax import _register


def handler_version(handler):
    """The FFI version of the handler at an address, queried as FFI 0.5 does."""
    metadata = (ctypes.c_size_t * 6)(36)
    extension = (ctypes.c_size_t * 4)(32, 1, 0, ctypes.addressof(metadata))
    frame = (ctypes.c_size_t * 22)(168, ctypes.addressof(extension))
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(handler)
    assert function(ctypes.addressof(frame)) is None
    return struct.unpack_from("<2i", metadata, 24)


def address(capsule):
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return pointer(capsule, None)


class Runtime:
    """A fake runtime of version ``newest`` that accepts handlers from ``oldest`` on and records those it is given."""

    def __init__(self, oldest, newest):
        self.oldest, self.newest, self.tried, self.accepted = oldest, newest, [], {}

    def register(self, name, handlers, platform, *_, **__):
        for capsule in handlers.values():
            version = handler_version(address(capsule))
            self.tried.append(version)
            if not self.oldest <= version <= self.newest:
                raise RuntimeError(f"INVALID_ARGUMENT: {name}: API version {version} is incompatible")
            self.accepted[name, platform] = version

    def register_ffi_target(self, name, handlers, platform):
        self.register(name, handlers, platform)


@pytest.fixture
def in_runtime(monkeypatch):
    """Replaces the registration of the installed jaxlib by such a runtime's."""

    def install(oldest, newest):
        from jaxlib import xla_client

        runtime = Runtime(oldest, newest)
        monkeypatch.setattr(_register, "runtime_ffi_version", lambda: newest)
        monkeypatch.setattr(xla_client._xla, "register_custom_call_target", runtime.register)
        monkeypatch.setattr(jax.ffi, "register_ffi_target", runtime.register_ffi_target)
        _register.accepted.cache_clear()
        return runtime

    yield install
    _register.accepted.cache_clear()


@pytest.mark.parametrize(
    ("oldest", "newest", "accepted"),
    [
        ((0, 1), (0, 1), (0, 1)),
        ((0, 1), (0, 4), (0, 1)),
        ((0, 1), (0, 5), (0, 5)),
        ((0, 2), (0, 5), (0, 5)),
        ((0, 5), (0, 9), (0, 5)),
    ],
)
def test_the_newest_accepted_handlers_are_registered_and_no_newer_ones_are_tried(in_runtime, oldest, newest, accepted):
    runtime = in_runtime(oldest, newest)
    _register.register_targets.__wrapped__()
    expected = {(t.name.decode(), t.platform.decode()) for t in _library.targets()}
    assert runtime.accepted == dict.fromkeys(expected, accepted)
    assert all(version <= newest for version in runtime.tried)


def test_a_runtime_that_rejects_the_new_handlers_gets_the_old_ones(in_runtime, monkeypatch):
    runtime = in_runtime((0, 1), (0, 1))
    monkeypatch.setattr(_register, "runtime_ffi_version", lambda: (0, 9))  # it claims a newer version than it accepts
    assert _register.accepted().version == (0, 1)
    assert runtime.tried == [(0, 5), (0, 1)]


def test_a_runtime_that_rejects_both_sets_is_an_import_error_with_its_text(in_runtime):
    in_runtime((0, 6), (0, 9))
    text = "has handlers of XLA FFI 0.1 and 0.5, and jaxlib .* accepts none of them: .*"
    text += r"\(INVALID_ARGUMENT: .* \(0, 1\) is incompatible"
    with pytest.raises(ImportError, match=text):
        _register.accepted()


def test_the_handlers_of_both_sets_are_for_the_same_targets():
    tables = [{(t.name, t.platform) for t in handlers.targets} for handlers in _library.handler_sets()]
    assert [handlers.version for handlers in _library.handler_sets()] == [(0, 5), (0, 1)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize(("rejected", "accepted"), [(None, (0, 1)), ((0, 1), (0, 5))])
def test_the_oldest_handlers_are_tried_first_with_a_plugin_of_unknown_version(monkeypatch, rejected, accepted):
    tried = []

    def register(target):
        tried.append(handler_version(target.execute))
        if tried[-1] == rejected:
            raise RuntimeError("incompatible")

    monkeypatch.setattr(torch_xla, "registered", {})
    torch_xla._register_accepted(_library.handler_sets()[::-1], b"CUDA", register)
    rows = sum(target.platform == b"CUDA" for target in _library.targets())
    assert torch_xla.registered[b"CUDA"].version == accepted
    assert tried == [rejected] * (rejected is not None) + [accepted] * rows


def test_a_plugin_that_rejects_both_sets_is_an_error():
    def register(target):
        raise RuntimeError(f"incompatible {handler_version(target.execute)}")

    with pytest.raises(RuntimeError, match=r"incompatible \(0, 5\)"):
        torch_xla._register_accepted(_library.handler_sets()[::-1], b"CUDA", register)


def imported_with(handlers):
    """The error of importing xla_attention.jax with other handlers; asserts that JAX still works."""
    code = f"""
import jax, old_handler
from xla_attention import _library
_library.handler_sets = lambda: [_library.HandlerSet({handlers})]
try:
    import xla_attention.jax
except ImportError as error:
    print(error)
print(jax.numpy.ones(2).sum())
"""
    message, number = python("-c", code, JAX_PLATFORMS="cpu").stdout.splitlines()
    assert number == "2.0"
    return message


def test_a_runtime_that_rejects_our_version_is_an_import_error_and_jax_still_works():
    message = imported_with("(0, 0), [old_handler.TARGET]")
    jaxlib = f"jaxlib {jax.lib.__version__}"
    assert message.startswith(f"xla_attention has handlers of XLA FFI 0.0, and {jaxlib} accepts none of them: ")
    assert "install an older jax or a newer xla-attention (INVALID_ARGUMENT: " in message
    assert "API version (0.0) is incompatible with the framework's API version" in message


def test_an_older_runtime_is_an_import_error_before_registration():
    assert imported_with("(0, 99), []").startswith("xla_attention has handlers of XLA FFI 0.99, jaxlib ")


@pytest.mark.parametrize("theirs", [(0, 0), (1, 1)])
def test_a_runtime_of_an_older_or_another_major_version_is_an_import_error(in_runtime, theirs):
    runtime = in_runtime(theirs, theirs)
    with pytest.raises(ImportError, match=f"XLA FFI 0.1 and 0.5, jaxlib .* has {theirs[0]}.{theirs[1]}: upgrade jax"):
        _register.accepted()
    assert runtime.tried == []


def test_the_version_decides_where_a_runtime_cannot_be_probed(in_runtime, monkeypatch):
    from jaxlib import xla_client

    in_runtime((0, 1), (0, 3))
    monkeypatch.delattr(xla_client._xla, "register_custom_call_target")
    assert _register.accepted().version == (0, 1)


def test_without_jax_the_error_says_what_to_install():
    code = """
import sys
sys.modules["jax"] = None
try:
    import xla_attention.jax
except ImportError as error:
    print(type(error).__name__, error)
"""
    assert (
        python("-c", code, JAX_PLATFORMS="cpu").stdout
        == "ImportError xla_attention.jax needs jax, which is not installed: pip install jax\n"
    )
