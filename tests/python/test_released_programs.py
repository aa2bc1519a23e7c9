"""Compiled programs are a file format: what an earlier version emitted is emitted still, and what it exported runs."""

import pathlib

import jax
import numpy as np
import pytest
from jax import export

from released_programs import PROGRAMS, custom_calls, operands_of
from xla_attention import _library

RELEASED = pathlib.Path(__file__).with_name("released")


def test_every_operator_has_a_program():
    assert [f"xla_gpu_{name}" for name in sorted(PROGRAMS)] == sorted(
        x["target"] for x in _library.build_info()["operators"]
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_custom_calls_are_those_of_before(name):
    assert custom_calls(name) == (RELEASED / f"{name}.mlir").read_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_exported_program_of_before_gives_what_the_function_gives(name, platform):
    program = export.deserialize((RELEASED / f"{name}.jax").read_bytes())
    operands = operands_of(name)
    found, expected = jax.tree.leaves(program.call(*operands)), jax.tree.leaves(jax.jit(PROGRAMS[name][0])(*operands))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
