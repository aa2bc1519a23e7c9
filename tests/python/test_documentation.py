"""The examples in docstrings and documents run."""

import doctest
import importlib.util
import pathlib
import pkgutil
import re
import types

import pytest

import xla_attention.jax
from subprocesses import python_with_torch

PACKAGES = [xla_attention.jax]
MODULES = ["xla_attention._info"]
if importlib.util.find_spec("torch"):
    import xla_attention.torch

    PACKAGES.append(xla_attention.torch)
if importlib.util.find_spec("torch_xla"):
    MODULES.append("xla_attention.torch_xla")
MODULES += [f"{package.__name__}.{m.name}" for package in PACKAGES for m in pkgutil.iter_modules(package.__path__)]
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


@pytest.mark.parametrize("public", [getattr(package, name) for package in PACKAGES for name in package.__all__])
def test_every_public_function_has_shapes_and_errors_or_an_example(public):
    text = public.attention.__doc__ if isinstance(public, types.ModuleType) else public.__doc__
    assert "Examples\n" in text or "Raises\n" in text


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/quickstart_jax.md",
        "docs/quickstart_torch.md",
        "docs/cache_layouts.md",
        "docs/sharding.md",
        "docs/gather.md",
    ],
)
def test_the_python_of_documents_runs(document, tmp_path):
    program = tmp_path / "document.py"
    program.write_text("\n".join(re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)))
    # In another process, because torch_xla has no gradients where a backward call came before the first XLA tensor.
    python_with_torch(program)
