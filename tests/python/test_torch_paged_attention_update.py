"""torch.ops.xla_gpu.paged_attention_update on every device that torch has here, functional and in place."""

import numpy as np
import pytest

import xla_attention.torch as xt
from batches import step
from torch_side import array, tensor, torch

MIXED = [(33, 33), (1, 100), (5, 70), (0, 9), (3, 0), (1, 1)]


def assert_bits(found, wanted):
    found = array(found)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(np.ascontiguousarray(found).view(np.uint8), wanted.view(np.uint8))


def test_the_number_of_sequences_may_be_a_python_int_and_indices_wide(torch_device):
    operands = [tensor(x, torch_device) for x in step(MIXED)]
    wanted = [array(x) for x in xt.paged_attention_update(*operands, scale=0.125)]
    wide = [x.to(torch.int64) for x in (*operands[2:5], operands[8])]
    rows = (*operands[6:8], wide[3])
    found = torch.ops.xla_gpu.paged_attention_update(*operands[:2], *wide[:3], len(MIXED), *rows, 0.125)
    for one, other in zip(found, wanted, strict=True):
        assert_bits(one, other)


def test_rows_may_be_slices_of_one_projection(torch_device):
    query, cache, *sequences, key, value, slots = (tensor(x, torch_device) for x in step(MIXED))
    wanted = xt.paged_attention_update(query, cache, *sequences, key, value, slots, scale=0.125)
    qkv = torch.cat([query, key, value], dim=1)
    q, k, v = qkv[:, :8], qkv[:, 8:10], qkv[:, 10:]
    by_columns = cache.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    for one, other in zip(
        xt.paged_attention_update(q, by_columns, *sequences, k, v, slots, scale=0.125), wanted, strict=True
    ):
        assert_bits(one, array(other))


def test_a_slice_of_a_cache_is_written_in_place():
    query, cache, *rest = (tensor(x) for x in step(MIXED))
    stored = torch.stack([cache, torch.zeros_like(cache)], dim=1)
    out, updated = xt.paged_attention_update(query, cache, *rest, scale=0.125)
    assert torch.equal(xt.paged_attention_update_(query, stored[:, 0], *rest, scale=0.125), out)
    assert_bits(stored[:, 0].contiguous(), array(updated))
    assert not stored[:, 1].any()


@pytest.mark.parametrize("backend", ["inductor", "openxla"])
def test_a_compiled_step_updates_the_cache_in_place(backend, request):
    device = request.getfixturevalue("xla_device") if backend == "openxla" else "cpu"
    operands = [tensor(x, device) for x in step(MIXED)]
    out, updated = (array(x) for x in xt.paged_attention_update(*operands, scale=0.125))

    def run(query, *rest):
        return 2.0 * xt.paged_attention_update_(query, *rest, scale=0.125)

    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for _ in range(2):
        np.testing.assert_array_equal(array(compiled(*operands)), 2.0 * out)
        assert_bits(operands[1], updated)


def test_the_program_has_one_custom_call_that_is_in_place(xla_device):
    import _XLAC

    operands = [tensor(x, xla_device) for x in step(MIXED)]
    out, updated = xt.paged_attention_update(*operands, scale=0.5, sliding_window=9)
    (line,) = [line for line in _XLAC._get_xla_tensors_hlo([out, updated]).splitlines() if " custom-call(" in line]
    assert 'custom_call_target="xla_gpu_paged_attention_update"' in line
    assert "output_to_operand_aliasing={{1}: (1, {})}" in line
    for attribute in ("batch_invariant = false", "scale = 0x3F000000 : f32", "sliding_window = 9 : i64"):
        assert attribute in line


def test_torch_checks_the_operators():
    # opcheck compares results and operands as numbers, NaN among them.
    operands = [tensor(x).nan_to_num() for x in step([(2, 20), (1, 9)], spare_rows=0)]
    ops = torch.ops.xla_gpu
    rows, others = operands[6:], operands[:5]
    for op in (
        ops.paged_attention_update,
        ops.paged_attention_update_with_lse,
        ops.paged_attention_update_,
        ops.paged_attention_update_with_lse_,
    ):
        torch.library.opcheck(op.default, (*operands, 0.125))
        torch.library.opcheck(op.int, (*others, 2, *rows, 0.125))


def refusals():
    query, cache, lens, tables, starts, count, key, value, slots = (tensor(x) for x in step([(2, 20), (1, 9)]))
    sequences = (lens, tables, starts, count)
    given = (query, cache, *sequences)
    return {
        "key": ((*given, key[:-1], value, slots, 0.125), ValueError, "key has shape"),
        "value": ((*given, key, value.half(), slots, 0.125), ValueError, "value has dtype f16, expected f32"),
        "float slots": ((*given, key, value, slots.float(), 0.125), TypeError, "slot_mapping has dtype torch.float32"),
        "window": ((*given, key, value, slots, 0.125, 0), ValueError, "_update: sliding_window is 0, expected >= 1"),
        "devices": ((*given, key.to("meta"), value, slots, 0.125), ValueError, "on meta"),
    }


@pytest.mark.parametrize("case", refusals())
def test_mistakes_are_refused_before_anything_runs(case):
    arguments, error, text = refusals()[case]
    for op in (torch.ops.xla_gpu.paged_attention_update, torch.ops.xla_gpu.paged_attention_update_):
        with pytest.raises(error, match=text):
            op(*arguments)


def test_a_gradient_is_refused_by_name(torch_device):
    query, *rest = (tensor(x, torch_device) for x in step(MIXED))
    out, _ = xt.paged_attention_update(query.requires_grad_(), *rest, scale=0.125)
    text = f"xla_gpu::paged_attention_update: .* not built yet on {torch_device}.*; use flash_attn_varlen"
    with pytest.raises(NotImplementedError, match=text):
        out.sum().backward()
