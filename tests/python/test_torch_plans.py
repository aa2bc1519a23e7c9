"""Eager calls of torch whose shapes and options have been seen: they run without torch's dispatcher."""

import concurrent.futures
import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dlpack_exchange
import xla_attention.torch as xt
from xla_attention.torch import _cache, _eager, _layouts, _plan

pytestmark = pytest.mark.usefixtures("torch_device", "all_torch_devices")


@pytest.fixture(params=["in Python", "in C"], autouse=True)
def _layouts_described(request, monkeypatch):
    """Layouts are described in Python, as before torch 2.10, and in C."""
    if request.param == "in C":
        monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", dlpack_exchange.capsule(), raising=False)
    exchange = _layouts._exchange() if request.param == "in C" else None
    assert (exchange is None) == (request.param == "in Python")
    monkeypatch.setattr(_layouts, "_EXCHANGE", exchange)
    monkeypatch.setattr(_plan, "_STATE", _plan._ThreadState())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def torch_device(request):
    return request.param


def operands(device, tokens=5, heads=4, seed=0):
    """q, k, v and cu_seqlens of two sequences."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, heads, 64, generator=generator).to(device) for _ in range(3))
    return q, k, v, torch.tensor([0, 2, tokens], dtype=torch.int32, device=device)


def through_the_dispatcher(function, *args, **kwargs):
    """The result of a call in a mode that sees operators."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(op)
            return op(*args, **(kwargs or {}))

    seen = []
    with Mode():
        result = function(*args, **kwargs)
    assert any("flash_attn_varlen_op" in str(op) for op in seen)
    return result


@pytest.fixture
def only_plans(monkeypatch):
    """A function after whose call no eager call may go through the dispatcher."""
    return lambda: monkeypatch.setattr(_eager, "run", lambda *_, **__: pytest.fail("not planned"))


def test_calls_without_a_workspace_are_planned(torch_device, only_plans):
    """Latent attention with batch_invariant, which has none on a GPU either."""
    generator = torch.Generator().manual_seed(0)
    q, cache = (torch.randn(shape, generator=generator).to(torch_device) for shape in ((3, 2, 16), (2, 4, 16)))
    numbers = ([0, 1, 3], [7, 2], [[0, 1], [1, 0]])
    metadata = [torch.tensor(x, dtype=torch.int32, device=torch_device) for x in numbers]

    def attend():
        return xt.mla_paged_attention(
            q, cache, *metadata, softmax_scale=0.25, head_dim_v=8, causal=True, batch_invariant=True
        )

    first = attend()
    only_plans()
    assert torch.equal(attend(), first)


def test_other_tensors_of_the_same_shapes_are_planned(torch_device, only_plans):
    cases = [operands(torch_device, seed=seed) for seed in range(3)]
    expected = [through_the_dispatcher(xt.flash_attn_varlen, *case, causal=True, return_lse=True) for case in cases]
    xt.flash_attn_varlen(*cases[0], causal=True, return_lse=True)
    only_plans()
    for case, (out, lse) in zip(cases, expected, strict=True):
        actual = xt.flash_attn_varlen(*case, causal=True, return_lse=True)
        assert torch.equal(actual[0], out)
        assert torch.equal(actual[1], lse)


def test_shapes_strides_options_and_shared_operands_have_plans_of_their_own(torch_device):
    q, k, v, starts = operands(torch_device)
    longer = operands(torch_device, tokens=9, seed=1)
    wide = torch.stack([k, v], dim=1)
    calls = [
        ((q, k, k, starts), {}),
        ((q, k, v, starts), {}),
        ((q, q, q, starts), {}),
        ((q, k, k.view_as(k), starts), {}),
        ((q, k, v, starts, starts), {}),
        ((q, k, v, starts, starts - starts // 4), {}),
        ((q, k, v, starts), {"causal": True}),
        ((q, k, v, starts), {"window": (1, 0)}),
        ((q, wide[:, 0], wide[:, 1], starts), {}),
        (longer, {}),
        ((q.double().float(), v, k, starts), {}),
    ]
    expected = [through_the_dispatcher(xt.flash_attn_varlen, *args, **kwargs) for args, kwargs in calls]
    for _ in range(2):
        for (args, kwargs), out in zip(calls, expected, strict=True):
            assert torch.equal(xt.flash_attn_varlen(*args, **kwargs), out)


def test_operands_that_are_converted_are_converted_in_every_call(torch_device):
    q, k, v, _ = operands(torch_device)
    for middle in (2, 3, 1):
        long = torch.tensor([0, middle, 5], device=torch_device)
        expected = xt.flash_attn_varlen(q, k, v, long.to(torch.int32))
        assert torch.equal(xt.flash_attn_varlen(q, k, v, long), expected)
        assert torch.equal(xt.flash_attn_varlen(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, long), expected)


def test_a_scale_is_a_view_of_its_operand(torch_device, only_plans):
    q, k, v, starts = operands(torch_device)
    scales = [torch.tensor(x, device=torch_device) for x in (0.5, 2.0)]
    expected = [through_the_dispatcher(xt.flash_attn_varlen, q, k, v, starts, v_scale=scale) for scale in scales]
    xt.flash_attn_varlen(q, k, v, starts, v_scale=scales[0])
    only_plans()
    for scale, out in zip(scales, expected, strict=True):
        assert torch.equal(xt.flash_attn_varlen(q, k, v, starts, v_scale=scale), out)


def test_a_part_of_a_complex_number_is_negated_when_it_is_read(torch_device, only_plans):
    q, k, v, starts = operands(torch_device)
    scale = torch.tensor(2.0 + 0.5j, device=torch_device)
    expected = xt.flash_attn_varlen(q, k, v, starts, v_scale=scale.imag)
    assert scale.conj().imag.is_neg()
    assert torch.equal(xt.flash_attn_varlen(q, k, v, starts, v_scale=scale.conj().imag), -expected)
    only_plans()
    assert torch.equal(xt.flash_attn_varlen(q, k, v, starts, v_scale=scale.imag), expected)


def test_a_call_within_a_call_has_memory_of_its_own(torch_device, only_plans, monkeypatch):
    cases = [operands(torch_device, seed=seed) for seed in range(3)]
    expected = [xt.flash_attn_varlen(*case) for case in cases]
    serves, inner = _plan._Plan.serves, []

    def interrupted(plan, tensors):
        monkeypatch.setattr(_plan._Plan, "serves", serves)
        inner.extend(xt.flash_attn_varlen(*case) for case in cases[1:])
        return serves(plan, tensors)

    monkeypatch.setattr(_plan._Plan, "serves", interrupted)
    assert torch.equal(xt.flash_attn_varlen(*cases[0]), expected[0])
    assert all(torch.equal(out, other) for out, other in zip(inner, expected[1:], strict=True))
    only_plans()
    assert torch.equal(xt.flash_attn_varlen(*cases[2]), expected[2])


def test_tensors_without_strides_go_through_the_dispatcher(torch_device):
    ones = torch.eye(3, device=torch_device).to_sparse()
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="simple_add"):
            xt.simple_add(ones, ones)
    assert not any(_plan._STATE.plans.values())


def test_an_unknown_exchange_interface_is_not_used(monkeypatch):
    later = dlpack_exchange.capsule(major_version=2)
    for unknown in (5, None, object(), later):
        monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", unknown, raising=False)
        assert _layouts._exchange() is None


def test_calls_with_many_tensors_or_dimensions_have_no_plan(torch_device, monkeypatch):
    ones = torch.ones([1] * 60, device=torch_device)
    monkeypatch.setattr(_layouts, "MAX_TENSORS", 1)
    assert torch.equal(xt.simple_add(ones, ones), ones + ones)
    assert not _plan._STATE.plans


def test_gradients_modes_and_the_profiler_see_the_operator(torch_device):
    q, k, v, starts = operands(torch_device)
    for _ in range(2):
        xt.flash_attn_varlen(q, k, v, starts)
    through_the_dispatcher(xt.flash_attn_varlen, q, k, v, starts)
    with torch.autograd.profiler.profile() as profile:
        xt.flash_attn_varlen(q, k, v, starts)
    assert any("flash_attn_varlen_op" in event.name for event in profile.function_events)
    leaf = torch.nn.Parameter(q)
    with torch.no_grad():
        xt.flash_attn_varlen(leaf, k, v, starts)
    xt.flash_attn_varlen(leaf, k, v, starts).sum().backward()
    assert leaf.grad is not None
    assert not xt.flash_attn_varlen(q, k, v, starts).requires_grad


def test_an_update_in_place_rejects_overlaps_and_raises_the_version(torch_device, only_plans):
    cache = torch.zeros(2, 4, 2, 8, device=torch_device)
    rows, slots = torch.ones(3, 1, 8, device=torch_device), torch.tensor([0, 5, -1], device=torch_device)
    xt.update_cache_(cache, rows, 2 * rows, slots)
    only_plans()
    other, version = torch.zeros_like(cache), cache._version
    xt.update_cache_(other, rows, 2 * rows, slots)
    xt.update_cache_(cache, rows, 2 * rows, slots)
    assert torch.equal(other, cache)
    assert cache._version > version
    inside = other.view(-1)[8:32].view(3, 1, 8)
    with pytest.raises(ValueError, match=r"kv_cache is written to and overlaps key"):
        xt.update_cache_(other, inside, 2 * rows, slots)


def test_plans_keep_no_tensor(torch_device):
    tensors = operands(torch_device)
    results = [xt.flash_attn_varlen(*tensors) for _ in range(2)]
    assert any(_plan._STATE.plans.values())
    alive = [weakref.ref(x) for x in (*tensors, *results)]
    del tensors, results
    gc.collect()
    assert not any(x() is not None for x in alive)


def test_the_number_of_plans_is_bounded(torch_device):
    for tokens in range(2, 2 + _cache.CACHE_SIZE + 20):
        xt.simple_add(*(torch.ones(tokens, device=torch_device) for _ in range(2)))
    assert len(_plan._STATE.plans) == _cache.CACHE_SIZE


def test_threads_have_plans_of_their_own(torch_device):
    def results(seed):
        case = operands(torch_device, seed=seed)
        return torch.stack([xt.flash_attn_varlen(*case, causal=True) for _ in range(20)]).cpu()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for seed, outs in enumerate(pool.map(results, range(8))):
            expected = through_the_dispatcher(xt.flash_attn_varlen, *operands(torch_device, seed=seed), causal=True)
            assert all(torch.equal(out, expected.cpu()) for out in outs)
