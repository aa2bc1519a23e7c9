"""Programs with our calls, compiled by XLA:GPU on a machine without a GPU, see `gpu_compiler`."""

import functools
import importlib.util
import json
import os
import pathlib
import re
import sys
import tempfile

import pytest

from calls import flatten, plain_calls
from packed_caches import packed_calls
from subprocesses import python, python_with_torch

HERE = pathlib.Path(__file__).parent
# `make` installs JAX's CUDA plugin in a separate folder: in site-packages, JAX would look for a GPU in every test.
PLUGIN = pathlib.Path(sys.prefix, "xla_gpu")

pytestmark = pytest.mark.skipif(not PLUGIN.is_dir(), reason=f"no CUDA plugin of JAX in {PLUGIN}: `make test`")

PACKED = [call.name for call in packed_calls()]
OPERATORS = [*plain_calls(), "gradients"]
CACHES = {name: flatten(call.arguments[call.updates]) for name, call in plain_calls().items() if call.updates}


# Writes the StableHLO of torch_xla graphs: our calls, and simple_add through torch_xla's own custom call.
TORCH_PROGRAMS = """
import pathlib, sys
import torch, torch_xla
import torch_xla.core.xla_model as xm
import xla_attention.torch as xt

a, b = torch.zeros(5, 7, device="xla"), torch.zeros(7, 5, device="xla")
cache, rows = torch.zeros(8, 4, 2, 16, device="xla"), torch.zeros(1, 3, 16, device="xla")
slots = torch.zeros(3, dtype=torch.int32, device="xla")
torch_xla.sync()
raw = ([a.t(), b], "XlaGpuSimpleAdd", [[7, 5]], [torch.float32], False, "", 4, {})
graphs = {
    "torch simple_add": xt.simple_add(a.t(), b),
    "torch kv_cache_update": xt.kv_cache_update(cache, rows.transpose(0, 1), rows.transpose(0, 1), slots),
    "torch_xla's own call": torch_xla._XLAC._xla_custom_call(*raw)[0],
}
for name, result in graphs.items():
    pathlib.Path(sys.argv[1], name).write_text(xm.get_stablehlo([result]))
"""


def environment():
    """Variables for the plugin, with ptxas and libdevice of the build's nvcc, without a GPU or CUDA libraries."""
    (toolkit,) = importlib.util.find_spec("nvidia.cu13").submodule_search_locations
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PLUGIN), os.environ.get("PYTHONPATH")])),
        "PATH": f"{toolkit}/bin:{os.environ['PATH']}",
        "XLA_FLAGS": f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={toolkit}",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_PLATFORMS": "cpu",
    }


@functools.cache
def programs():
    """The optimised HLO of each program."""
    folder = pathlib.Path(tempfile.mkdtemp())
    if importlib.util.find_spec("torch_xla"):
        python_with_torch("-c", TORCH_PROGRAMS, folder, PJRT_DEVICE="CPU")
    files = [f"{path.name}={path}" for path in folder.iterdir()]
    python(HERE / "gpu_compiler.py", folder / "hlo.json", *files, **environment())
    return json.loads((folder / "hlo.json").read_text())


def our_calls(hlo):
    """Each of our calls: its line, and the lines of its operands."""
    entry = hlo[hlo.index("\nENTRY") :].splitlines()
    lines = {match[1]: line for line in entry if (match := re.match(r"\s*(?:ROOT )?(%[\w.-]+) = ", line))}
    calls = [line for line in lines.values() if re.search(r'custom_call_target="(xla_gpu_|XlaGpu)', line)]
    assert calls, "our call is not in the program"
    for call in calls:
        operands = re.search(r" custom-call\((.*?)\), custom_call_target", call)[1]
        yield call, [lines[name] for name in re.findall(r"%[\w.-]+", operands)]


def layouts(line):
    """The layouts in an instruction's shape, or in those of its tuple."""
    shape = re.search(r" = (\(.*?\) |\S+ )", line)[1]
    return [[int(x) for x in layout.split(",") if x] for layout in re.findall(r"\]\{([\d,]*)", shape)]


def is_row_major(line):
    return all(layout == sorted(layout, reverse=True) for layout in layouts(line))


@pytest.mark.parametrize("placement", ["donated", "two devices"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_transposed_operands_are_copied_to_row_major(operator, placement):
    for call, operands in our_calls(programs()[f"{operator}, {placement}"]):
        assert "operand_layout_constraints=" in call and "api_version=API_VERSION_TYPED_FFI" in call
        assert is_row_major(call)
        assert [line for line in operands if not is_row_major(line)] == []
        assert not all("parameter(" in line for line in operands), "nothing was transposed"


@pytest.mark.parametrize("operator", CACHES)
@pytest.mark.parametrize("placement", ["donated", "two devices"])
def test_a_donated_cache_is_updated_in_place(operator, placement):
    hlo = programs()[f"{operator}, {placement}"]
    ((call, operands),) = our_calls(hlo)
    caches = [line for line in operands if re.search(f"= {shape_of(operator)}", line)]
    assert len(caches) == len(CACHES[operator])
    assert all(" parameter(" in line for line in caches)
    assert call.count("(0, {})") + call.count("(1, {})") == len(caches), "output_to_operand_aliasing"
    assert hlo.splitlines()[0].count("may-alias") + hlo.splitlines()[0].count("must-alias") == len(caches)
    assert copies(operator, hlo) == []


@pytest.mark.parametrize("operator", CACHES)
def test_a_cache_that_is_not_donated_is_copied_once(operator):
    """The control of the test above: without donation, there is a copy."""
    assert len(copies(operator, programs()[f"{operator}, kept"])) == len(CACHES[operator])


@pytest.mark.parametrize("placement", ["donated", "two devices"])
@pytest.mark.parametrize("form", PACKED)
def test_a_packed_cache_is_updated_in_place(form, placement):
    """The reshape between a packed cache and the call's pages is no copy, and needs no communication."""
    hlo = programs()[f"packed cache, {form}, {placement}"]
    ((call, operands),) = our_calls(hlo)
    assert "xla_gpu_paged_attention_update" in call
    assert " bitcast(" in operands[1]
    assert "may-alias" in hlo.splitlines()[0] or "must-alias" in hlo.splitlines()[0]
    assert re.findall(r"\S+\[\d+,4,\S* copy\(", hlo) == []
    assert re.findall(r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\S*\(", hlo) == []


@pytest.mark.parametrize("form", PACKED)
def test_a_packed_cache_that_is_not_donated_is_copied_once(form):
    """The control of the test above."""
    assert len(re.findall(r"\S+\[\d+,4,\S* copy\(", programs()[f"packed cache, {form}, kept"])) == 1


def test_queries_are_rounded_to_the_dtype_of_the_cache():
    """XLA:GPU would leave out a conversion there and back."""
    hlo = programs()["packed cache, interleaved e5m2, q_scale, donated"]
    assert re.search(r"= f8e5m2\[\d+,8,128\]\S* convert\(", hlo)


def shape_of(operator):
    """A pattern for the shape of the operator's caches, or of their shards. A latent cache has no heads."""
    caches = CACHES[operator]
    (shape,) = {(*x.shape[:2], *[r"\d+"] * (x.ndim - 3), r"\d+" if len(caches) > 1 else x.shape[-1]) for x in caches}
    return rf"f32\[{','.join(map(str, shape))}\]"


def copies(operator, hlo):
    return [line for line in hlo.splitlines() if re.search(rf"= {shape_of(operator)}\S* copy\(", line)]


def test_context_parallel_decode_is_one_collective_per_layer_around_calls_in_place():
    hlo = programs()["context-parallel decode"]
    calls = [re.search(r'target="(\w+)"', call)[1] for call, _ in our_calls(hlo)]
    update, attention = "xla_gpu_kv_cache_update", "xla_gpu_flash_attn_varlen"
    assert sorted(calls) == sorted([update, attention, update, attention, attention])
    assert len(re.findall(r" all-gather(?:-start)?\(", hlo)) == 2
    assert not re.search(r" (all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\(", hlo)
    assert hlo.splitlines()[0].count("may-alias") + hlo.splitlines()[0].count("must-alias") == 2
    assert not re.search(r"bf16\[8,16,4,64\]\S* copy\(", hlo)


@pytest.mark.parametrize("operator", OPERATORS)
def test_programs_for_two_gpus_have_no_collectives(operator):
    """Each device computes its heads, without communication."""
    hlo = programs()[f"{operator}, two devices"]
    assert re.findall(r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\S*\(", hlo) == []
    assert "num_partitions=2" in hlo


@pytest.mark.usefixtures("xla_device")
@pytest.mark.parametrize("operator", ["simple_add", "kv_cache_update"])
def test_torch_xlas_graphs_give_row_major_operands_too(operator):
    for _, operands in our_calls(programs()[f"torch {operator}"]):
        assert [line for line in operands if not is_row_major(line)] == []
        assert not all("parameter(" in line for line in operands)


@pytest.mark.usefixtures("xla_device")
def test_torch_xlas_own_call_gets_a_transposed_operand_uncopied():
    """docs/torch.md warns of this; it also shows that the tests of layouts can fail."""
    ((call, operands),) = our_calls(programs()["torch_xla's own call"])
    assert "operand_layout_constraints=" not in call
    assert [is_row_major(line) for line in operands] == [False, True]
