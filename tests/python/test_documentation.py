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
NAMESAKES = []  # packages with the name of another library, which __all__ leaves out
MODULES = ["xla_attention._info", "xla_attention.flax"]
if importlib.util.find_spec("torch"):
    import xla_attention.torch

    PACKAGES.append(xla_attention.torch)
    NAMESAKES.append(xla_attention.torch.transformers)
if importlib.util.find_spec("torch_xla"):
    MODULES.append("xla_attention.torch_xla")
MODULES += [m.name for package in PACKAGES for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


def public_functions(package):
    """The functions of a package, and of the public modules in it."""
    for name in package.__all__:
        public = getattr(package, name)
        yield from public_functions(public) if isinstance(public, types.ModuleType) else [public]


@pytest.mark.parametrize("public", [x for package in PACKAGES + NAMESAKES for x in public_functions(package)])
def test_every_public_function_has_shapes_and_errors_or_an_example(public):
    assert "Examples\n" in public.__doc__ or "Raises\n" in public.__doc__


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/quickstart_jax.md",
        "docs/quickstart_torch.md",
        "docs/dot_product_attention.md",
        "docs/cache_layouts.md",
        "docs/sharding.md",
        "docs/context_parallel.md",
        "docs/context_parallel_decode.md",
        "docs/gather.md",
        "docs/flash_attn.md",
        "docs/ragged_paged_attention_v3.md",
    ],
)
def test_the_python_of_documents_runs(document, tmp_path):
    program = tmp_path / "document.py"
    program.write_text("\n".join(re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)))
    # In another process, because torch_xla has no gradients where a backward call came before the first XLA tensor.
    python_with_torch(program)
