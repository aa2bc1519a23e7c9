"""torch_xla in subprocesses: order of imports, failed imports, operators that users define, and CUDA plugins."""

import pytest

from subprocesses import python_with_torch

pytestmark = pytest.mark.usefixtures("xla_device")

# A user's custom call of the target's unprefixed name.
CALL = """
import torch, torch_xla
a, b = torch.arange(8.0, device="xla"), torch.full((8,), 10.0, device="xla")
out = torch_xla._XLAC._xla_custom_call([a, b], "XlaGpuSimpleAdd", [list(a.shape)], [a.dtype], False, "", 4, {})[0]
print(out.cpu().tolist() == (torch.arange(8.0) + 10).tolist())
"""
# A user's definition of an operator that we define too.
DEFINE = """
import torch, torch_xla
lib = torch.library.Library("xla_gpu", "DEF")
lib.define("simple_add(Tensor a, Tensor b) -> Tensor")

@torch.library.impl(lib, "simple_add", "XLA")
def simple_add_xla(a, b):
    arguments = [a, b], "XlaGpuSimpleAdd", [list(a.shape)], [a.dtype], False, "", 4, {}
    return torch_xla._XLAC._xla_custom_call(*arguments)[0]
"""


def run_program(code, device="CPU"):
    return python_with_torch("-c", code, PJRT_DEVICE=device).stdout.strip()


@pytest.mark.parametrize(
    "imports",
    [
        "import xla_attention.torch, torch_xla",
        "import torch_xla, xla_attention.torch",
        "import importlib.util, xla_attention.torch; importlib.util.find_spec('torch_xla'); import torch_xla",
    ],
)
def test_a_user_defined_custom_call_finds_the_handler_in_either_import_order(imports):
    assert run_program(imports + CALL) == "True"


def test_importing_us_does_not_import_torch_xla_and_the_hook_is_removed():
    code = """
import sys, xla_attention.torch
print("torch_xla" in sys.modules)
import torch_xla
print(type(torch_xla.__loader__).__name__, type(torch_xla.__spec__.loader).__name__)
print([finder for finder in sys.meta_path if "xla_attention" in type(finder).__module__])
"""
    assert run_program(code).splitlines() == ["False", "SourceFileLoader SourceFileLoader", "[]"]


# A folder with a torch_xla that cannot be imported, first on the path.
BROKEN = """
import pathlib, sys, tempfile
folder = tempfile.mkdtemp()
pathlib.Path(folder, "torch_xla.py").write_text("raise ImportError('not this one')")
sys.path.insert(0, folder)
"""


def test_an_import_of_torch_xla_that_fails_may_be_repeated():
    code = f"""
import xla_attention.torch
{BROKEN}
try:
    import torch_xla
except ImportError as error:
    print(error)
sys.path.pop(0)
"""
    assert run_program(code + CALL).splitlines() == ["not this one", "True"]


def test_a_torch_xla_that_accepts_no_handlers_can_be_imported():
    """Calls on XLA tensors then raise the reason."""
    code = """
import xla_attention.torch as xt, xla_attention.torch_xla as runtime
def no_ffi(version):
    raise ImportError(f"no XLA FFI is found in torch_xla {version}")
runtime._ffi_api = no_ffi
import torch, torch_xla
a = torch.ones(2)
print((a.to("xla") + 1).cpu().tolist(), xt.simple_add(a, a).tolist())
try:
    xt.simple_add(a.to("xla"), a.to("xla"))
except ImportError as error:
    print(error)
"""
    assert run_program(code).splitlines() == ["[2.0, 2.0] [2.0, 2.0]", "no XLA FFI is found in torch_xla 2.9.0"]


def test_a_user_may_define_our_operator_first():
    code = """
import xla_attention.torch as xt
a = torch.ones(3, device="xla")
print(torch.ops.xla_gpu.simple_add(a, a).cpu().tolist(), xt.merge_attention_states is not None)
"""
    assert run_program(DEFINE + code) == "[2.0, 2.0, 2.0] True"


def test_a_user_may_define_our_operator_over_our_handlers():
    code = """
import xla_attention.torch_xla
xla_attention.torch_xla.register_targets()
a = torch.ones(3, device="xla")
print(torch.ops.xla_gpu.simple_add(a, a).cpu().tolist())
"""
    assert run_program(DEFINE + code) == "[2.0, 2.0, 2.0]"


@pytest.mark.parametrize(
    "order",
    [
        "xt.provide_xla_ops(); import torch_xla.experimental.custom_kernel",
        "import torch_xla.experimental.custom_kernel; xt.provide_xla_ops()",
    ],
)
def test_torch_xlas_operator_uses_our_kernel_in_either_import_order(order):
    """Against torch_xla's reference implementation; on XLA tensors as a custom call."""
    code = f"""
import torch, xla_attention.torch as xt
{order}
import torch_xla.experimental.custom_kernel as kernels
torch.manual_seed(0)
q, pages = torch.randn(20, 4, 64), torch.randn(12, 8, 4, 64)
lens, tables = torch.tensor([20, 9, 33], dtype=torch.int32), torch.arange(15, dtype=torch.int32).reshape(3, 5) % 12
starts, count = torch.tensor([0, 15, 16, 20], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
arguments = (q, pages, lens, tables, starts, count)
expected = kernels._ragged_paged_attention_nonkernel(*arguments, sm_scale=0.125, k_scale=None, v_scale=None)

def attend(*arguments):
    return torch.ops.xla.ragged_paged_attention(*arguments, 0.125)

on_xla = [x.to("xla") for x in arguments]
hlo = torch_xla._XLAC._get_xla_tensors_hlo([attend(*on_xla)])
print('custom_call_target="xla_gpu_paged_attention"' in hlo)
compiled = torch.compile(attend, backend="openxla", fullgraph=True)
for found in (attend(*arguments), attend(*on_xla).cpu(), compiled(*on_xla).cpu()):
    print((found - expected).abs().max().item() < 1e-5)
"""
    assert run_program(code).splitlines()[-4:] == ["True"] * 4


def test_on_tpus_torch_xlas_kernel_stays():
    code = """
import torch, torch_xla.runtime, torch_xla.experimental.custom_kernel as kernels
kernels.ragged_paged_attention_xla = lambda q, *rest: q + 7
import xla_attention.torch as xt
xt.provide_xla_ops()
torch_xla.runtime.device_type = lambda: "TPU"
x = torch.zeros(1, device="xla")
print(torch.ops.xla.ragged_paged_attention(x, x, x, x, x, x).cpu().tolist())
"""
    assert run_program(code) == "[7.0]"


def test_other_devices_are_an_error_that_names_the_alternative():
    code = """
import torch_xla.runtime
torch_xla.runtime.device_type = lambda: "TPU"
import xla_attention.torch_xla
try:
    xla_attention.torch_xla.register_targets()
except ImportError as error:
    print(error)
"""
    assert "torch_xla runs on TPU; there are handlers for PJRT_DEVICE=CPU, and for CUDA after" in run_program(code)


@pytest.mark.parametrize("device", [None, "CUDA"])
def test_an_unusable_cuda_plugin_is_an_error_and_changes_nothing(device):
    """PJRT_DEVICE is restored, or set to torch_xla's default; the CPU still works."""
    code = """
import os, _ctypes
from xla_attention.torch import use_cuda_plugin
for path in ("/nowhere/plugin.so", os.path.realpath(_ctypes.__file__)):
    try:
        use_cuda_plugin(path)
    except (ImportError, RuntimeError) as error:
        print(os.environ.get("PJRT_DEVICE"), type(error).__name__, error)
os.environ["PJRT_DEVICE"] = "CPU"
import torch, torch_xla
print((torch.ones(2, device="xla") + 1).cpu().tolist())
try:
    use_cuda_plugin(os.__file__)
except RuntimeError as error:
    print(os.environ.get("PJRT_DEVICE"), error)
"""
    missing, wrong, number, late = run_program(code, device).splitlines()
    assert missing.startswith(f"{device} ImportError xla_attention: /nowhere/plugin.so is not there; pip install jax-")
    assert wrong.startswith(f"{device or 'CPU'} RuntimeError") and "is no PJRT plugin" in wrong
    assert number == "[2.0, 2.0]"
    assert late.startswith("CPU") and "torch_xla has made its device already" in late


def test_a_cuda_plugin_without_torch_xla_does_not_set_the_device():
    code = f"""
import os
{BROKEN}
from xla_attention.torch_xla import use_cuda_plugin
try:
    use_cuda_plugin(os.__file__)
except ImportError as error:
    print("PJRT_DEVICE" in os.environ, error)
"""
    assert run_program(code, None).startswith("False xla_attention: torch_xla cannot be imported (not this one)")
