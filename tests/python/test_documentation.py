"""The examples in docstrings and in the README run."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import pytest

import xla_attention.jax

MODULES = ["xla_attention._info"] + [
    f"xla_attention.jax.{module.name}" for module in pkgutil.iter_modules(xla_attention.jax.__path__)
]
README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


@pytest.mark.parametrize("name", xla_attention.jax.__all__)
def test_every_public_function_has_shapes_and_errors_or_an_example(name):
    text = getattr(xla_attention.jax, name).__doc__
    assert "Examples\n" in text or "Raises\n" in text


def test_the_python_of_the_readme_runs():
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        exec(compile(block, str(README), "exec"), {})
