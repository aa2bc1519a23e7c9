"""torch.ops.xla_gpu.paged_attention_update on every device that torch has here, functional and in place."""

import numpy as np
import pytest

import xla_attention.torch as xt
from batches import step
from oracle import assert_paged_attention, kv_cache_update_reference
from torch_side import array, tensor, torch

MIXED = [(33, 33), (1, 100), (5, 70), (0, 9), (3, 0), (1, 1)]


def check(device, operands, **options):
    """Functional and in place: out and lse against the oracle and, bit by bit, against two calls, and the cache."""
    query, kv_cache, *sequences = (np.asarray(x) for x in operands[:6])
    options = {"scale": query.shape[-1] ** -0.5, **options}
    scales = {name: scale for name, scale in options.items() if name in ("k_scale", "v_scale")}
    wanted = kv_cache_update_reference(kv_cache, *(np.asarray(x) for x in operands[6:]), **scales)
    given = {name: tensor(value, device) for name, value in options.items()}
    tensors = [tensor(x, device) for x in operands]
    out, lse, updated = xt.paged_attention_update(*tensors, return_lse=True, **given)
    assert {x.device.type for x in (out, lse, updated)} == {device}
    assert_bits(updated, wanted)
    assert_bits(tensors[1], kv_cache)
    meant = {name: value for name, value in options.items() if name != "batch_invariant"}
    assert_paged_attention(array(out), array(lse), query, wanted, *sequences, **meant)
    attended = xt.paged_attention(tensors[0], updated, *tensors[2:6], return_lse=True, **given)
    for found, one in zip((out, lse), attended, strict=True):
        assert_bits(found, array(one))
    assert_bits(xt.paged_attention_update(*tensors, **given)[0], array(out))
    assert_bits(xt.paged_attention_update_(*tensors, **given), array(out))
    assert_bits(tensors[1], wanted)
    found = xt.paged_attention_update_(*tensors, return_lse=True, **given)
    for one, other in zip(found, (out, lse), strict=True):
        assert_bits(one, array(other))


def assert_bits(found, wanted):
    found = array(found)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_array_equal(np.ascontiguousarray(found).view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "d", "page_size"), [((4, 1), 64, 16), ((9, 3), 40, 5)])
def test_mixed_batches_are_the_update_and_then_attention(torch_device, dtype, heads, d, page_size):
    check(torch_device, step(MIXED, heads=heads, d=d, page_size=page_size, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 7, "soft_cap": 3.0},
        {"alibi_slopes": np.linspace(0.01, 0.5, 8, dtype=np.float32)},
        {"sinks": np.linspace(-2.0, 3.0, 8, dtype=np.float32)},
        {"q_scale": 0.5, "batch_invariant": True},
    ],
    ids=lambda options: "+".join(options),
)
def test_options_are_those_of_paged_attention(torch_device, options):
    check(torch_device, step(MIXED, dtype="bfloat16"), **options)


@pytest.mark.parametrize("cache", ["float8_e4m3fn", "float8_e5m2"])
def test_the_cache_may_be_8_bit(torch_device, cache):
    scales = {"k_scale": np.float32([0.01, 30.0]), "v_scale": 0.25}
    check(torch_device, step(MIXED, dtype="bfloat16", cache=cache, **scales), **scales)


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
