"""Eager calls: nested calls, the request cache, and operands that share memory."""

import signal
import sys
import types

import pytest
import torch

import xla_attention.torch as xt
from xla_attention import _library
from xla_attention.torch import _cache, _eager


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def request_cache():
    """This thread's request cache, emptied."""
    _eager._CACHE.requests.clear()
    return _eager._CACHE.requests


def interrupt(monkeypatch, at, call):
    """Make a call when a method of Request is entered, as a signal handler or a trace function may."""
    method = getattr(_library.Request, at)

    def interrupted(*arguments, **options):
        monkeypatch.undo()
        call()
        return method(*arguments, **options)

    monkeypatch.setattr(_library.Request, at, interrupted)


def dispatched(a, b):
    """simple_add through torch's dispatcher; ``xt.simple_add`` runs the plan of a call."""
    return torch.ops.xla_gpu.simple_add(a, b)


@pytest.mark.parametrize(("add", "at"), [(dispatched, "set_addresses"), (dispatched, "run"), (xt.simple_add, "run")])
@pytest.mark.parametrize("is_cached", [False, True])
def test_the_same_call_may_be_nested(monkeypatch, device, request_cache, add, at, is_cached):
    """The calls must not share a request, or the outer call would use the addresses of the inner one."""
    ones, tens = torch.ones(3, device=device), torch.full((3,), 10.0, device=device)
    if is_cached:
        add(ones, ones)
    inner = []
    interrupt(monkeypatch, at, lambda: inner.append(add(tens, tens)))
    assert add(ones, ones).tolist() == [2.0] * 3
    assert inner[0].tolist() == [20.0] * 3
    assert len(request_cache) <= 1


@pytest.mark.parametrize("add", [dispatched, xt.simple_add])
def test_signal_handlers_may_make_calls_at_any_moment(request_cache, add):
    """Also while the caches of requests and plans are searched, grow and evict."""
    wrong, inner = [], []

    def check(rows, value):
        out = add(torch.full((rows,), value), torch.full((rows,), value))
        if out.tolist() != [2 * value] * rows:
            wrong.append((rows, value, out))

    def handler(*_):
        inner.append(len(inner))
        check(len(inner) % (_cache.CACHE_SIZE + 50), 10.0)

    before, armed = signal.signal(signal.SIGALRM, handler), -1
    try:
        for call in range(20_000):
            if len(inner) == 200:
                break
            if armed < len(inner):  # once per signal, so that handlers do not accumulate on a slow machine
                armed = len(inner)
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + 1.3e-5 * (call % 11))
            check(call % (_cache.CACHE_SIZE + 50), 3.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not wrong
    assert len(inner) > 20
    check(1, 3.0)
    assert len(request_cache) <= _cache.CACHE_SIZE


def test_nested_calls_that_fail_keep_their_error_texts(monkeypatch, request_cache):
    """Each of two nested calls has its own buffer for the error text."""
    ones, texts = torch.ones(3), []

    def wrong(rows):
        with pytest.raises(ValueError, match="b has shape") as error:
            dispatched(ones, torch.ones(rows))
        texts.append(str(error.value))

    library = _library.library()
    call = library.xa_call

    def interrupted(*arguments):
        code = call(*arguments)
        monkeypatch.undo()
        wrong(5)
        return code

    monkeypatch.setattr(library, "xa_call", interrupted)
    wrong(4)
    assert "[5]" in texts[0] and "[4]" in texts[1]


def test_the_request_cache_is_bounded_and_evicts_the_least_recently_used(request_cache):
    for rows in range(2 * _cache.CACHE_SIZE):
        dispatched(torch.ones(rows), torch.ones(rows))
        dispatched(torch.ones(1), torch.ones(1))
    assert len(request_cache) == _cache.CACHE_SIZE
    shapes = [key[3][0][0] for key in request_cache]
    assert shapes[-1] == 1
    assert shapes[:-1] == list(range(_cache.CACHE_SIZE + 1, 2 * _cache.CACHE_SIZE))


def test_a_failed_call_is_not_cached(request_cache):
    for _ in range(2):
        with pytest.raises(ValueError, match="b has shape"):
            xt.simple_add(torch.ones(3), torch.ones(2))
    assert not request_cache


def update(cache, key, value=None, slots=(0, 5, -1), **options):
    slot_mapping = torch.tensor(slots, dtype=torch.int32, device=key.device)
    xt.update_cache_(cache, key, key if value is None else value, slot_mapping, **options)


def test_a_cache_with_internal_overlap_is_rejected(device):
    rows = torch.ones(3, 1, 8, device=device)
    cache = torch.zeros(1, 4, 2, 8, device=device).expand(2, 4, 2, 8)
    with pytest.raises(
        ValueError, match=r"kv_cache is written to and has strides \(0, 16, 8, 1\), .* clone\(\) it first"
    ):
        update(cache, rows)
    assert not cache.any()


@pytest.mark.parametrize("operand", ["key", "value", "both"])
def test_rows_that_overlap_the_cache_are_rejected(device, operand):
    cache, rows = torch.zeros(2, 4, 2, 8, device=device), torch.ones(3, 1, 8, device=device)
    own = {"key": cache[1, :3, :1], "value": cache[1, :3, 1:], "both": cache[0, 1:, :1]}[operand]
    key, value = (rows, own) if operand == "value" else (own, rows if operand == "key" else own)
    with pytest.raises(
        ValueError, match=f"kv_cache is written to and overlaps {'value' if operand == 'value' else 'key'}"
    ):
        update(cache, key, value)
    assert not cache.any()


def test_overlapping_caches_are_rejected(device):
    cache, rows = torch.zeros(2, 4, 1, 8, device=device), torch.ones(3, 1, 8, device=device)
    with pytest.raises(ValueError, match="k_cache is written to and overlaps v_cache"):
        update((cache, cache), rows)
    with pytest.raises(ValueError, match="k_cache is written to and overlaps v_cache"):
        update((cache[:1], cache.view(-1)[8:40].view(1, 4, 1, 8)), rows)


def test_queries_that_overlap_the_cache_are_rejected(device):
    cache, row = torch.zeros(2, 4, 2, 8, device=device), torch.ones(1, 1, 8, device=device)
    sequence = (torch.tensor(x, device=device, dtype=torch.int32) for x in ([3], [[1]], [0, 1], [1]))
    slots = torch.tensor([6], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="kv_cache is written to and overlaps query"):
        xt.paged_attention_update_(cache[0, 0, :1].view(1, 1, 8), cache, *sequence, row, row, slots, scale=1.0)


def test_interleaved_caches_are_accepted(device):
    """Halves of one buffer, interleaved page by page or contiguous."""
    both, rows = torch.zeros(2, 2, 4, 1, 8, device=device), torch.ones(3, 1, 8, device=device)
    update((both[:, 0], both[:, 1]), rows, 2 * rows)
    assert both[0, 0, 0].tolist() == [[1.0] * 8] and both[1, 1, 1].tolist() == [[2.0] * 8]
    assert both.sum() == 2 * 8 * (1 + 2)
    both.zero_()
    update((both[0], both[1]), rows, 2 * rows)
    assert both.sum() == 2 * 8 * (1 + 2)


@pytest.mark.usefixtures("all_torch_devices")
def test_writes_bump_the_version_counter(device):
    cache, rows = torch.zeros(2, 4, 2, 8, device=device), torch.ones(3, 1, 8, device=device)
    scale = torch.ones(1, device=device, requires_grad=True)
    loss = (cache * scale).sum()
    update(cache, rows)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        inside = torch.zeros(2, 4, 2, 8, device=device)
        update(inside, rows)
        update(cache, rows)
        assert inside.sum() == cache.sum() == 32


@pytest.mark.usefixtures("all_torch_devices")
def test_a_gradient_through_an_in_place_update_is_an_error(device):
    """Without our autograd kernel, torch would drop it with a warning."""
    cache, row = torch.zeros(2, 4, 2, 8, device=device), torch.ones(1, 1, 8, device=device, requires_grad=True)
    sequence = [torch.tensor(x, device=device, dtype=torch.int32) for x in ([3], [[1]], [0, 1], [1])]
    slots = torch.tensor([6], dtype=torch.int32, device=device)

    def step(row):
        return xt.paged_attention_update_(row, cache, *sequence, row, row, slots, scale=1.0, return_lse=True)

    for run in (step, torch.compile(step, backend="aot_eager")):
        # Compiled, the error is raised at compile time.
        with pytest.raises(
            Exception, match="paged_attention_update_with_lse_: its gradient is not built yet on .* use fla"
        ):
            run(row)[0].sum().backward()
        with torch.no_grad():
            assert not run(row)[0].requires_grad
    assert not cache.requires_grad


@pytest.mark.gpu
def test_real_cuda_tensors_under_openxla_are_an_error(monkeypatch):
    """Tensors and Dynamo are real; torch_xla is a fake, because it does not exist for this CUDA."""
    if "torch_xla" not in sys.modules:
        monkeypatch.setitem(sys.modules, "torch_xla", types.ModuleType("torch_xla"))
    a = torch.ones(3, device="cuda")
    with pytest.raises(
        Exception, match="its tensors are on cuda:0, and backend='openxla' .* or use backend='inductor'"
    ):
        torch.compile(xt.simple_add, backend="openxla", fullgraph=True)(a, a)
    assert torch.compile(xt.simple_add, backend="aot_eager")(a, a).tolist() == [2.0] * 3


def test_empty_tensors_may_have_any_strides(device):
    """For instance zeros, as torch.expand gives them."""
    none = torch.empty_strided((0, 1, 8), (0, 0, 0), device=device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    assert xt.flash_attn_varlen(none, none, none, starts).shape == (0, 1, 8)
    rows, two = torch.ones(3, 1, 8, device=device), torch.tensor([0, 3], device=device)
    assert not xt.flash_attn_varlen(rows, none, none, two, 0 * two).any()
    cache = torch.zeros(2, 4, 2, 8, device=device)
    update(cache, none, slots=())
    assert not cache.any()
    row = rows[:1].as_strided((1, 1, 8), (0, 0, 1))
    assert torch.equal(xt.flash_attn_varlen(row, row, row, two.clamp(max=1)), row)


def test_the_log_names_an_operand_that_is_copied(device, caplog):
    rows = torch.ones(3, 16, 1, device=device).transpose(1, 2)[..., ::2]
    with caplog.at_level("DEBUG", "xla_attention.torch"):
        update(torch.zeros(2, 4, 2, 8, device=device), rows)
    assert "xla_gpu_kv_cache_update: key has strides (16, 1, 2) and is copied to be dense" in caplog.text
