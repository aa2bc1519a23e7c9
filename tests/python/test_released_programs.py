"""Exported programs are a file format: custom calls stay as earlier versions emitted them, and stored programs run."""

import pathlib

import jax
import numpy as np
import pytest
from jax import export

from released_programs import PROGRAMS, custom_calls, operands_of
from xla_attention import _library

RELEASED = pathlib.Path(__file__).with_name("released")


def test_every_operator_has_a_program():
    operators = {f"xla_gpu_{name.partition('.')[0]}" for name in PROGRAMS}
    assert operators == {x["target"] for x in _library.build_info()["operators"]}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_custom_calls_are_those_of_the_stored_programs(name):
    assert custom_calls(name) == (RELEASED / f"{name}.mlir").read_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_stored_exported_program_gives_the_results_of_the_function(name, platform):
    program = export.deserialize((RELEASED / f"{name}.jax").read_bytes())
    operands = operands_of(name)
    actual, expected = jax.tree.leaves(program.call(*operands)), jax.tree.leaves(jax.jit(PROGRAMS[name][0])(*operands))
    assert len(actual) == len(expected)
    for result, expected_result in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(result, expected_result)
