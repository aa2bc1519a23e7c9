"""Registration with a runtime that does not take our handlers."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from xla_attention.jax import _register


def run_alone(code):
    """The output of a program that finds the modules of this folder."""
    paths = os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_runtime_that_has_dropped_our_version_is_an_import_error_and_leaves_jax_as_it_was():
    code = """
import jax, old_handler
from xla_attention import _library
_library.targets = lambda: [old_handler.TARGET]
try:
    import xla_attention.jax
except ImportError as error:
    print(error)
print(jax.numpy.ones(2).sum())
"""
    message, number = run_alone(code).splitlines()
    assert message.startswith(f"xla_attention speaks XLA FFI 0.1, which jaxlib {jax.lib.__version__} does not take: ")
    assert "install an older jax or a newer xla-attention (INVALID_ARGUMENT: " in message
    assert "API version (0.0) is incompatible with the framework's API version" in message
    assert number == "2.0"


@pytest.mark.parametrize("theirs", [(0, 0), (1, 1)])
def test_a_runtime_of_an_older_or_another_major_version_is_an_import_error(monkeypatch, theirs):
    monkeypatch.setattr(_register, "runtime_ffi_version", lambda: theirs)
    with pytest.raises(ImportError, match=f"XLA FFI 0.1, jaxlib .* only {theirs[0]}.{theirs[1]}: upgrade jax"):
        _register.check_runtime()


def test_a_runtime_that_cannot_be_asked_is_taken_at_its_word(monkeypatch):
    from jaxlib import xla_client

    monkeypatch.delattr(xla_client._xla, "register_custom_call_target")
    _register.check_runtime()


def test_without_jax_the_error_says_what_to_install():
    code = """
import sys
sys.modules["jax"] = None
try:
    import xla_attention.jax
except ImportError as error:
    print(type(error).__name__, error)
"""
    assert run_alone(code) == "ImportError xla_attention.jax needs jax, which is not installed: pip install jax\n"
