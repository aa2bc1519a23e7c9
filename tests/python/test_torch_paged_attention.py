"""torch.ops.xla_gpu.paged_attention on every device that torch has here, against the oracle."""

import pytest

import xla_attention.torch as xt
from batches import batch
from torch_side import tensor, torch

MIXED = [(33, 33), (1, 100), (5, 70), (0, 9), (3, 0), (1, 1)]


def test_the_number_of_sequences_may_be_a_python_int(torch_device):
    operands = [tensor(x, torch_device) for x in batch(MIXED)]
    wanted = xt.paged_attention(*operands, scale=0.125)
    found = torch.ops.xla_gpu.paged_attention(*operands[:-1], len(MIXED), 0.125)
    assert torch.equal(found.cpu(), wanted.cpu())


def test_wide_indices_saturate_where_narrow_ones_would_wrap(torch_device):
    query, cache, lens, tables, starts, count = (tensor(x, torch_device) for x in batch(MIXED))
    wanted = xt.paged_attention(query, cache, lens, tables, starts, count, scale=0.125)
    wide = [x.to(torch.int64) for x in (lens, tables, starts, count)]
    wide[0] = torch.where(wide[0] > 2**30, wide[0] + 2**40, wide[0])
    assert torch.equal(xt.paged_attention(query, cache, *wide, scale=0.125).cpu(), wanted.cpu())


def test_operands_may_be_transposed_and_sliced(torch_device):
    query, cache, *rest = (tensor(x, torch_device) for x in batch(MIXED))
    wanted = xt.paged_attention(query, cache, *rest, scale=0.125).cpu()
    turned = query.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.cat([query, query], dim=1)[:, : query.shape[1]]
    stored = torch.stack([cache, cache], dim=0)[1]
    by_columns = cache.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    for q, c in ((turned, cache), (wide, stored), (query, by_columns)):
        assert torch.equal(xt.paged_attention(q, c, *rest, scale=0.125).cpu(), wanted)


def test_the_tpu_operators_signature(torch_device):
    query, cache, lens, tables, starts, count = (tensor(x, torch_device) for x in batch(MIXED))
    wanted = xt.paged_attention(query, cache, lens, tables, starts, count, scale=0.25, sliding_window=9)
    arguments = (query, cache, lens, tables, starts, count)
    found = xt.ragged_paged_attention(*arguments, sm_scale=0.25, sliding_window=9, num_kv_pages_per_block=4)
    assert torch.equal(found.cpu(), wanted.cpu())


@pytest.mark.parametrize("backend", ["inductor", "openxla"])
def test_it_compiles_in_one_graph(backend, request):
    device = request.getfixturevalue("xla_device") if backend == "openxla" else "cpu"
    operands = [tensor(x, device) for x in batch(MIXED)]

    def step(query, *rest):
        return torch.sin(xt.xla_gpu_paged_attention(2.0 * query, *rest, scale=0.125, sliding_window=20))

    found = torch.compile(step, backend=backend, fullgraph=True)(*operands)
    torch.testing.assert_close(found.cpu(), step(*operands).cpu(), atol=1e-6, rtol=1e-6)


@pytest.mark.gpu
def test_it_compiles_for_cuda():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    operands = [tensor(x, "cuda") for x in batch(MIXED)]

    def step(query, *rest):
        return torch.sin(xt.paged_attention(2.0 * query, *rest, scale=0.125))

    found = torch.compile(step, backend="inductor", fullgraph=True)(*operands)
    torch.testing.assert_close(found, step(*operands), atol=1e-6, rtol=1e-6)


def refusals():
    query, cache, lens, tables, starts, count = (tensor(x) for x in batch([(2, 20), (1, 9)]))
    rest = (tables, starts, count, 0.125)
    return {
        "head dimension": ((query, cache[..., :32], lens, *rest), ValueError, "kv_cache has shape"),
        "dtype": ((query.double(), cache, lens, *rest), NotImplementedError, "query is f64, kv_cache is f32"),
        "scale": ((query, cache, lens, *rest[:3], 0.0), ValueError, "scale is 0, expected finite and > 0"),
        "window": ((query, cache, lens, *rest, 0), ValueError, "sliding_window is 0, expected >= 1, or None"),
        "float lengths": ((query, cache, lens.float(), *rest), TypeError, "context_lens has dtype torch.float32"),
        "devices": ((query, cache.to("meta"), lens, *rest), ValueError, "on meta"),
    }


@pytest.mark.parametrize("case", refusals())
def test_mistakes_are_refused_before_anything_runs(case):
    arguments, error, text = refusals()[case]
    with pytest.raises(error, match=text):
        torch.ops.xla_gpu.paged_attention(*arguments)


def test_torch_checks_the_operator():
    query, *rest = (tensor(x) for x in batch([(2, 20), (1, 9)], spare_rows=0))
    for op in (torch.ops.xla_gpu.paged_attention, torch.ops.xla_gpu.paged_attention_with_lse):
        torch.library.opcheck(op.default, (query, *rest, 0.125))
        torch.library.opcheck(op.int, (query, *rest[:-1], 2, 0.125))


def test_a_gradient_is_refused_by_name(torch_device):
    query, *rest = (tensor(x, torch_device) for x in batch(MIXED))
    out = xt.paged_attention(query.requires_grad_(), *rest, scale=0.125)
    with pytest.raises(
        NotImplementedError,
        match=f"xla_gpu::paged_attention: .* not built yet on {torch_device}.*; use flash_attn_varlen over packed",
    ):
        out.sum().backward()
