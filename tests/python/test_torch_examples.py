"""The examples for torch run."""

import importlib.util
import pathlib

import pytest

from subprocesses import python, python_with_torch

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(name, *arguments):
    """The output of an example."""
    return python_with_torch(EXAMPLES / name, *arguments, PJRT_DEVICE="CPU").stdout


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu), "xla"])
@pytest.mark.parametrize(
    "name",
    [
        "torch_paged_attention.py",
        "torch_flash_attn_varlen.py",
        "torch_vllm_style.py",
        "torch_cascade_attention.py",
    ],
)
def test_the_example_says_that_all_agree(name, device):
    if device == "xla" and importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed")
    printed = run(name, device)
    assert "True" in printed or "largest difference" in printed
    assert "False" not in printed


def test_the_cascade_reads_the_prefix_once():
    printed = run("torch_cascade_attention.py")
    assert "both ways agree: True" in printed
    # 6 sequences over 2048 shared tokens, with 345 unshared ones in all; 1024 bytes of K and V each.
    assert f"plain: {(6 * 2048 + 345) * 1024} bytes" in printed
    assert f"cascade: {(2048 + 345) * 1024} bytes" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("xla_device")
def test_a_user_defined_custom_call_runs():
    # As a user starts it, with nothing imported beforehand.
    printed = python(EXAMPLES / "torch_simple_add.py", PJRT_DEVICE="CPU").stdout
    assert 'custom_call_target="XlaGpuSimpleAdd"' in printed
    assert "[10.0, 11.0, 12.0" in printed


@pytest.mark.usefixtures("xla_device")
def test_the_three_ways_to_inspect_the_program():
    printed = run("torch_programs.py")
    assert "stablehlo.custom_call @xla_gpu_paged_attention" in printed
    assert "api_version=API_VERSION_TYPED_FFI" in printed
    assert "fallbacks: []  compilations after the first step: 0" in printed


@pytest.mark.parametrize(
    ("layout", "dtype"), [("contiguous", "float32"), ("zigzag", "float32"), ("zigzag", "bfloat16")]
)
def test_a_ring_of_two_processes_agrees_with_one(layout, dtype):
    printed = run("torch_ring_attention.py", "--layout", layout, "--dtype", dtype)
    # Causal and not, forward and backward.
    assert printed.count("the ring and one process agree: True") == 2
