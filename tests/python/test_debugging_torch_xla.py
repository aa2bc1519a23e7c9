"""docs/debugging_torch_xla.md: its code runs, and its statements about the output hold."""

import functools
import importlib
import pathlib
import re
import tempfile

import pytest

from subprocesses import python_with_torch

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/debugging_torch_xla.md"

pytestmark = pytest.mark.usefixtures("xla_device")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@functools.cache
def printed():
    """The output of the page's program, run in an empty folder with the variables that the page exports."""
    exported = dict(re.findall(r"export (\w+)='?(.*?)'?\n", "".join(blocks("sh"))))
    assert exported.keys() == {"PJRT_DEVICE", "XLA_FLAGS"}
    program = pathlib.Path(tempfile.mkdtemp(), "page.py")
    program.write_text(f"import os\nos.chdir({str(program.parent)!r})\n" + "\n".join(blocks("python")))
    return python_with_torch(program, **exported).stdout


def numbered(number):
    return [line for line in printed().splitlines() if line.startswith(f"{number}. ")]


def test_a_graph_is_printed_at_three_levels():
    (ours,), (hlo,), (stablehlo,) = (numbered(number) for number in (1, 2, 3))
    assert "xla_attention::call(" in ours
    assert 'custom_call_target="xla_gpu_flash_attn_varlen"' in hlo
    assert "api_version=API_VERSION_TYPED_FFI" in hlo and "operand_layout_constraints=" in hlo
    assert "stablehlo.custom_call @xla_gpu_flash_attn_varlen(" in stablehlo and "api_version = 4 : i32" in stablehlo


def test_dumps_have_the_call_before_and_after_optimisation():
    assert numbered(4) == ["4. before_optimizations 1", "4. after_optimizations 1"]


def test_steps_of_one_shape_compile_once_and_nothing_falls_back():
    assert numbered(5) == ["5. None 2"]
    assert numbered(6) == ["6. []"]
    assert "Metric: ExecuteTime\n  TotalSamples: 2\n" in printed() and "Counter: MarkStep\n  Value: 2\n" in printed()


def test_the_names_in_the_table_exist():
    """The names of the page's table that can be looked up."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    import xla_attention.torch as xt

    assert xt.xla_gpu_paged_attention is xt.paged_attention
    assert callable(xt.vllm_style.attention) and callable(xm.get_stablehlo) and callable(torch_xla.sync)
    assert torch.ops.xla_gpu.paged_attention and torch.ops.xla.flash_attn_varlen_op and torch_xla._XLAC
    assert torch_xla._XLAC._xla_counter_names() is not None
    for gone in ("torch_xla._XLAC", "vllm.v1.attention.backends.xla_gpu_paged_attention"):
        with pytest.raises(ImportError):
            importlib.import_module(gone)
    from torch_xla import stablehlo

    assert not hasattr(stablehlo, "get_stablehlo")
