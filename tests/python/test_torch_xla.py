"""Our calls in torch_xla: programs, their text, and faults of torch_xla's own custom call that ours avoid."""

import pytest
import torch

import xla_attention.torch as xt
from batches import batch, varlen
from calls import PAGED, Call
from torch_adapter import array, tensor

pytestmark = pytest.mark.usefixtures("xla_device")
MIXED = [(33, 33), (1, 100), (5, 70)]


def compiled(function):
    return torch.compile(function, backend="openxla", fullgraph=True)


@pytest.fixture
def operands():
    return batch(MIXED)


def both(function, *operands, **options):
    """The results of a function of XLA tensors, lazy and compiled."""
    tensors = [tensor(x, "xla") for x in operands]
    return [list(map(array, run(*tensors, **options))) for run in (function, compiled(function))]


@pytest.mark.parametrize("options", [[{"scale": 0.5}, {"scale": 2.0}], [{"sliding_window": 3}, {"sliding_window": 40}]])
def test_each_set_of_attributes_is_a_separate_program(operands, options):
    """torch_xla's own custom call would run the first program twice."""
    for attributes in ({"scale": 0.125, **more} for more in options):

        def call(*operands, attributes=attributes):
            return xt.paged_attention(*operands, **attributes, return_lse=True)

        expected = Call("paged_attention", "", {**dict(zip(PAGED, operands, strict=True)), **attributes})
        for actual in both(call, *operands):
            expected.check(*actual)


def test_each_output_dtype_and_shape_is_a_separate_program():
    (q, k, v, starts, _), _ = varlen([(7, 7), (9, 9)], dtype="float8_e4m3fn", rows_after=0)
    tensors = [tensor(x, "xla") for x in (q, k, v, starts)]
    for dtype in (torch.bfloat16, torch.float16):
        out = xt.flash_attn_varlen(*tensors, out_dtype=dtype)
        assert out.cpu().dtype == dtype and torch.isfinite(out.cpu().float()).all()
    for rows in (5, 3):
        a = torch.ones(rows, 2, device="xla")
        assert xt.simple_add(a, a).cpu().tolist() == [[2.0, 2.0]] * rows


def test_the_program_has_the_target_with_layouts_and_typed_attributes(operands):
    """In the text of the HLO."""
    import _XLAC

    tensors = [tensor(x, "xla") for x in operands]
    out = xt.paged_attention(*tensors, scale=0.5, sliding_window=9, sinks=torch.zeros(8, device="xla"))
    (line,) = [line for line in _XLAC._get_xla_tensors_hlo([out]).splitlines() if " custom-call(" in line]
    assert 'custom_call_target="xla_gpu_paged_attention"' in line
    assert "api_version=API_VERSION_TYPED_FFI" in line
    assert "operand_layout_constraints={f32[41,8,64]{2,1,0}" in line
    for attribute in ("batch_invariant = false", "scale = 0x3F000000 : f32", "sliding_window = 9 : i64"):
        assert attribute in line
    assert "xla_attention::call" in _XLAC._get_xla_tensors_text([out])


def test_a_cache_that_is_copied_to_is_donated():
    """Two caches: each is aliased with its own result, and neither is copied."""
    import _XLAC

    caches = [torch.zeros(2, 4, 2, 8, device="xla") for _ in range(2)]
    rows, slots = torch.ones(3, 2, 8, device="xla"), torch.tensor([0, 5, -1], device="xla")
    xt.update_cache_(tuple(caches), rows, 2 * rows, slots)
    hlo = _XLAC._get_xla_tensors_hlo(caches)
    assert "output_to_operand_aliasing={{0}: (0, {}), {1}: (1, {})}" in hlo
    assert [int(cache.sum().cpu()) for cache in caches] == [32, 64]


def test_the_exported_program_is_a_typed_custom_call(operands):
    """In exported StableHLO, which any PJRT program can run."""
    from torch_xla.stablehlo import exported_program_to_stablehlo

    class Step(torch.nn.Module):
        def forward(self, *operands):
            return torch.ops.xla_gpu.paged_attention(*operands, 0.125)

    exported = torch.export.export(Step(), tuple(tensor(x) for x in operands))
    text = exported_program_to_stablehlo(exported).get_stablehlo_text()
    assert "stablehlo.custom_call @xla_gpu_paged_attention" in text
    assert "api_version = 4 : i32" in text
    assert "scale = 1.250000e-01 : f32" in text
    assert "sliding_window = -1 : i64" in text


def test_nothing_falls_back_and_steps_of_one_shape_compile_once(operands):
    """According to torch_xla's metrics."""
    import torch_xla
    from torch_xla.debug import metrics

    tensors = [tensor(x, "xla") for x in operands]

    def step(scale_by):
        out = xt.paged_attention(tensors[0] * scale_by, *tensors[1:], scale=0.125)
        torch_xla.sync()
        return out

    step(torch.tensor([1.0]).to("xla"))
    metrics.clear_all()
    for value in (2.0, 3.0):
        step(torch.tensor([value]).to("xla"))
    assert not [name for name in metrics.counter_names() if name.startswith("aten::")]
    assert metrics.metric_data("CompileTime") is None


def test_registering_twice_is_fine():
    from xla_attention import torch_xla as runtime

    runtime.register_with_cpu_client()
    runtime.register_with_cpu_client.__wrapped__()
    xt.register_targets()


def test_the_ffi_table_is_found_without_symbols():
    """As in a stripped torch_xla."""
    import pathlib

    import _XLAC

    from xla_attention import torch_xla as runtime

    runtime.register_targets()
    assert runtime._scan_memory(pathlib.Path(_XLAC.__file__).resolve()) == runtime._ffi_api("this one")


def test_tensors_of_several_devices_are_refused(operands):
    query, *rest = (tensor(x) for x in operands)
    with pytest.raises(ValueError, match="kv_cache is on cpu, query on xla:0; expected all on one device"):
        xt.paged_attention(query.to("xla"), *rest, scale=0.125)


def test_cuda_tensors_under_openxla_are_an_error_that_names_the_alternatives(monkeypatch):
    from xla_attention.torch import _define

    a = torch.ones(3)
    assert torch.equal(torch.compile(xt.simple_add, backend="eager")(a, a), a + a)
    monkeypatch.setattr(_define.Call, "device", lambda _: torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="move them there .* or use backend='inductor'"):
        compiled(lambda x: xt.simple_add(x, x))(a)
