"""Registration with a runtime that takes some of our handlers, or none."""

import ctypes
import struct

import jax
import pytest

from alone import python
from xla_attention import _library, torch_xla
from xla_attention.jax import _register


def spoken(handler):
    """The version that a handler at an address says, asked as XLA 0.5 asks."""
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
    """A runtime that speaks ``newest``, takes handlers from ``oldest`` on, and notes which it was shown."""

    def __init__(self, oldest, newest):
        self.oldest, self.newest, self.shown, self.taken = oldest, newest, [], {}

    def register(self, name, handlers, platform, *_, **__):
        for capsule in handlers.values():
            version = spoken(address(capsule))
            self.shown.append(version)
            if not self.oldest <= version <= self.newest:
                raise RuntimeError(f"INVALID_ARGUMENT: {name}: API version {version} is incompatible")
            self.taken[name, platform] = version

    def register_ffi_target(self, name, handlers, platform):
        self.register(name, handlers, platform)


@pytest.fixture
def in_runtime(monkeypatch):
    """Makes the installed jaxlib behave as such a runtime."""

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
    ("oldest", "newest", "taken"),
    [
        ((0, 1), (0, 1), (0, 1)),
        ((0, 1), (0, 4), (0, 1)),
        ((0, 1), (0, 5), (0, 5)),
        ((0, 2), (0, 5), (0, 5)),
        ((0, 5), (0, 9), (0, 5)),
    ],
)
def test_a_runtime_gets_the_newest_handlers_that_it_takes_and_is_shown_none_that_are_newer(
    in_runtime, oldest, newest, taken
):
    runtime = in_runtime(oldest, newest)
    _register.register_targets.__wrapped__()
    expected = {(t.name.decode(), t.platform.decode()) for t in _library.targets()}
    assert runtime.taken == dict.fromkeys(expected, taken)
    assert all(version <= newest for version in runtime.shown)


def test_a_runtime_that_refuses_the_new_handlers_gets_the_old_ones(in_runtime, monkeypatch):
    runtime = in_runtime((0, 1), (0, 1))
    monkeypatch.setattr(_register, "runtime_ffi_version", lambda: (0, 9))  # it claims more than it takes
    assert _register.accepted().version == (0, 1)
    assert runtime.shown == [(0, 5), (0, 1)]


def test_a_runtime_that_refuses_both_is_an_import_error_with_its_text(in_runtime):
    in_runtime((0, 6), (0, 9))
    text = r"speaks XLA FFI 0.1 and 0.5, of which jaxlib .* takes none: .*\(INVALID_ARGUMENT: .* \(0, 1\) is incompat"
    with pytest.raises(ImportError, match=text):
        _register.accepted()


def test_the_handlers_of_both_sets_are_for_the_same_targets():
    tables = [{(t.name, t.platform) for t in one.targets} for one in _library.handler_sets()]
    assert [one.version for one in _library.handler_sets()] == [(0, 5), (0, 1)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize(("refused", "taken"), [(None, (0, 1)), ((0, 1), (0, 5))])
def test_a_plugin_whose_version_is_unknown_is_shown_the_oldest_handlers_first(monkeypatch, refused, taken):
    shown = []

    def register(target):
        shown.append(spoken(target.execute))
        if shown[-1] == refused:
            raise RuntimeError("incompatible")

    monkeypatch.setattr(torch_xla, "registered", {})
    torch_xla._register_accepted(_library.handler_sets()[::-1], b"CUDA", register)
    rows = sum(target.platform == b"CUDA" for target in _library.targets())
    assert torch_xla.registered[b"CUDA"].version == taken
    assert shown == [refused] * (refused is not None) + [taken] * rows


def test_a_plugin_that_refuses_both_says_so():
    def register(target):
        raise RuntimeError(f"incompatible {spoken(target.execute)}")

    with pytest.raises(RuntimeError, match=r"incompatible \(0, 5\)"):
        torch_xla._register_accepted(_library.handler_sets()[::-1], b"CUDA", register)


def imported_with(handlers):
    """What the import of our front-end says to handlers that jax does not take; jax is as it was."""
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


def test_a_runtime_that_has_dropped_our_versions_is_an_import_error_and_leaves_jax_as_it_was():
    message = imported_with("(0, 0), [old_handler.TARGET]")
    assert message.startswith(f"xla_attention speaks XLA FFI 0.0, of which jaxlib {jax.lib.__version__} takes none: ")
    assert "install an older jax or a newer xla-attention (INVALID_ARGUMENT: " in message
    assert "API version (0.0) is incompatible with the framework's API version" in message


def test_an_older_runtime_is_refused_before_anything_is_registered():
    assert imported_with("(0, 99), []").startswith("xla_attention speaks XLA FFI 0.99, jaxlib ")


@pytest.mark.parametrize("theirs", [(0, 0), (1, 1)])
def test_a_runtime_of_an_older_or_another_major_version_is_an_import_error(in_runtime, theirs):
    runtime = in_runtime(theirs, theirs)
    with pytest.raises(ImportError, match=f"XLA FFI 0.1 and 0.5, jaxlib .* only {theirs[0]}.{theirs[1]}: upgrade jax"):
        _register.accepted()
    assert runtime.shown == []


def test_a_runtime_that_cannot_be_asked_is_taken_at_its_word(in_runtime, monkeypatch):
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
