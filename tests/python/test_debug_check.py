"""XLA_ATTENTION_CHECK=1 with JAX, eager torch and info(); tests/subprocess/check_mode.rs tests what it detects."""

import pytest

import xla_attention
from subprocesses import python, python_with_torch
from xla_attention import library_path
from xla_attention._library import build_info

CALL = """
import jax, jax.numpy as jnp
from xla_attention.jax import paged_attention

@jax.jit
def step(table):
    query, cache = jnp.ones((3, 2, 16)), jnp.ones((4, 8, 2, 16))
    lens, starts, seqs = jnp.array([9, 3]), jnp.array([0, 2, 3]), jnp.array([2])
    return paged_attention(query, cache, lens, table, starts, seqs, scale=0.25)

print(float(step(jnp.array([[3, 1], [0, 0]])).sum()))
try:
    print(float(step(jnp.array([[3, 7], [0, 0]])).sum()))
except (ValueError, jax.errors.JaxRuntimeError) as error:
    print(error)
print(float(step(jnp.array([[2, 1], [0, 0]])).sum()))
"""

EAGER = """
import torch
from xla_attention.torch import kv_cache_update
cache, rows = torch.zeros(4, 8, 2, 16), torch.ones(3, 1, 16)
for slots in ([5, 6, 7], [5, 32, 7]):
    try:
        print(float(kv_cache_update(cache, rows, rows, torch.tensor(slots)).sum()))
    except ValueError as error:
        print(error)
"""


def lines(code, check, run=python):
    return run("-c", code, JAX_PLATFORMS="cpu", XLA_ATTENTION_CHECK=check).stdout.splitlines()


def test_a_bad_block_table_is_an_error_that_names_sequence_and_entry():
    text = "XLA_ATTENTION_CHECK: block_tables[0, 1] is 7 (sequence 0), expected a page, 0 to 3"
    first, refused, after = lines(CALL, "1")
    assert (first, after) == ("96.0", "96.0")
    assert refused.startswith(f"INVALID_ARGUMENT: xla_gpu_paged_attention: {text}")


def test_without_the_check_metadata_is_clamped():
    assert lines(CALL, "0") == ["96.0"] * 3


def test_eager_torch_is_checked_too():
    pytest.importorskip("torch")
    text = (
        "xla_gpu_kv_cache_update: XLA_ATTENTION_CHECK: slot_mapping[1] is 32, expected a slot, 0 to 31, or -1 for none"
    )
    assert lines(EAGER, "1", python_with_torch) == ["96.0", text]
    assert lines(EAGER, "0", python_with_torch) == ["96.0", "64.0"]


def test_info_reports_that_calls_are_checked():
    code = "import xla_attention; print(xla_attention.info())"
    line = "every call is checked and waited for: XLA_ATTENTION_CHECK=1, for debugging only"
    # It imports every front-end, torch too.
    assert line in lines(code, "1", python_with_torch)
    assert line not in xla_attention.info().splitlines()


@pytest.mark.skipif(build_info()["failpoints"], reason="the library was built for tests")
def test_the_library_has_no_failpoints():
    assert b"failpoint: " not in library_path().read_bytes()


def check_mode(value):
    """Whether the library checks calls for a value of the variable, and its standard error."""
    code = "from xla_attention import _library; print(_library.build_info()['check'])"
    completed = python("-c", code, XLA_ATTENTION_CHECK=value)
    return completed.stdout.strip(), completed.stderr


@pytest.mark.parametrize("value", ["1", "true", "ON", "Yes"])
def test_the_variable_enables_the_check(value):
    assert check_mode(value) == ("True", "")


@pytest.mark.parametrize("value", ["0", "False", "off", "no", ""])
def test_the_variable_disables_the_check(value):
    assert check_mode(value) == ("False", "")


def test_an_unknown_value_disables_the_check_with_a_warning():
    warning = "XLA_ATTENTION_CHECK=maybe: expected 1, true, on or yes, or 0, false, off or no; taken for off\n"
    assert check_mode("maybe") == ("False", warning)
