"""Eager calls: nested in one another, many shapes, and operands that share memory."""

import signal
import sys
import types

import pytest
import torch

import xla_attention.torch as xt
from xla_attention import _library
from xla_attention.torch import _eager


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def known():
    """This thread's requests, none of them at first."""
    _eager._CACHE.requests.clear()
    return _eager._CACHE.requests


def interrupt(monkeypatch, at, call):
    """Make a call at the moment when a method of Request is entered, as a signal handler or a trace function may."""
    method = getattr(_library.Request, at)

    def interrupted(*arguments, **options):
        monkeypatch.undo()
        call()
        return method(*arguments, **options)

    monkeypatch.setattr(_library.Request, at, interrupted)


@pytest.mark.parametrize("at", ["set_addresses", "run"])
@pytest.mark.parametrize("is_known", [False, True])
def test_the_same_call_may_come_in_between(monkeypatch, device, known, at, is_known):
    """The request of the outer call kept the addresses of the inner one: wrong numbers, and writes to freed memory."""
    ones, tens = torch.ones(3, device=device), torch.full((3,), 10.0, device=device)
    if is_known:
        xt.simple_add(ones, ones)
    inner = []
    interrupt(monkeypatch, at, lambda: inner.append(xt.simple_add(tens, tens)))
    assert xt.simple_add(ones, ones).tolist() == [2.0] * 3
    assert inner[0].tolist() == [20.0] * 3
    assert len(known) == 1


def test_signals_may_come_at_any_moment(known):
    """Also while the table of requests grows, is searched, and gives the oldest up."""
    wrong, inner = [], []

    def check(rows, value):
        out = xt.simple_add(torch.full((rows,), value), torch.full((rows,), value))
        if out.tolist() != [2 * value] * rows:
            wrong.append((rows, value, out))

    def handler(*_):
        inner.append(len(inner))
        check(len(inner) % (_eager._CACHE_SIZE + 50), 10.0)

    before, armed = signal.signal(signal.SIGALRM, handler), -1
    try:
        for call in range(20_000):
            if len(inner) == 200:
                break
            if armed < len(inner):  # once for each signal, so that handlers do not pile up on a slow machine
                armed = len(inner)
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + 1.3e-5 * (call % 11))
            check(call % (_eager._CACHE_SIZE + 50), 3.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not wrong
    assert len(inner) > 20
    check(1, 3.0)
    assert len(known) <= _eager._CACHE_SIZE


def test_a_failing_call_in_between_keeps_its_text_to_itself(monkeypatch, known):
    """Each of two nested calls has a buffer for its message."""
    ones, texts = torch.ones(3), []

    def wrong(rows):
        with pytest.raises(ValueError, match="b has shape") as error:
            xt.simple_add(ones, torch.ones(rows))
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


def test_requests_are_few_and_the_oldest_goes_first(known):
    for rows in range(2 * _eager._CACHE_SIZE):
        xt.simple_add(torch.ones(rows), torch.ones(rows))
        xt.simple_add(torch.ones(1), torch.ones(1))
    assert len(known) == _eager._CACHE_SIZE
    shapes = [key[3][0][0] for key in known]
    assert shapes[-1] == 1
    assert shapes[:-1] == list(range(_eager._CACHE_SIZE + 1, 2 * _eager._CACHE_SIZE))


def test_a_call_that_fails_leaves_no_request(known):
    for _ in range(2):
        with pytest.raises(ValueError, match="b has shape"):
            xt.simple_add(torch.ones(3), torch.ones(2))
    assert not known


def update(cache, key, value=None, slots=(0, 5, -1), **options):
    slot_mapping = torch.tensor(slots, dtype=torch.int32, device=key.device)
    xt.update_cache_(cache, key, key if value is None else value, slot_mapping, **options)


def test_a_cache_with_several_elements_in_one_place_is_refused(device):
    rows = torch.ones(3, 1, 8, device=device)
    cache = torch.zeros(1, 4, 2, 8, device=device).expand(2, 4, 2, 8)
    with pytest.raises(
        ValueError, match=r"kv_cache is written to and has strides \(0, 16, 8, 1\), .* clone\(\) it first"
    ):
        update(cache, rows)
    assert not cache.any()


@pytest.mark.parametrize("operand", ["key", "value", "both"])
def test_rows_of_the_cache_itself_are_refused(device, operand):
    cache, rows = torch.zeros(2, 4, 2, 8, device=device), torch.ones(3, 1, 8, device=device)
    own = {"key": cache[1, :3, :1], "value": cache[1, :3, 1:], "both": cache[0, 1:, :1]}[operand]
    key, value = (rows, own) if operand == "value" else (own, rows if operand == "key" else own)
    with pytest.raises(
        ValueError, match=f"kv_cache is written to and overlaps {'value' if operand == 'value' else 'key'}"
    ):
        update(cache, key, value)
    assert not cache.any()


def test_one_tensor_for_two_caches_is_refused(device):
    cache, rows = torch.zeros(2, 4, 1, 8, device=device), torch.ones(3, 1, 8, device=device)
    with pytest.raises(ValueError, match="k_cache is written to and overlaps v_cache"):
        update((cache, cache), rows)
    with pytest.raises(ValueError, match="k_cache is written to and overlaps v_cache"):
        update((cache[:1], cache.view(-1)[8:40].view(1, 4, 1, 8)), rows)


def test_a_cache_and_queries_that_overlap_are_refused(device):
    cache, row = torch.zeros(2, 4, 2, 8, device=device), torch.ones(1, 1, 8, device=device)
    sequence = (torch.tensor(x, device=device, dtype=torch.int32) for x in ([3], [[1]], [0, 1], [1]))
    slots = torch.tensor([6], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="kv_cache is written to and overlaps query"):
        xt.paged_attention_update_(cache[0, 0, :1].view(1, 1, 8), cache, *sequence, row, row, slots, scale=1.0)


def test_caches_that_lie_within_one_another_are_two(device):
    """Halves of one buffer, page by page; and parts of a buffer one after the other."""
    both, rows = torch.zeros(2, 2, 4, 1, 8, device=device), torch.ones(3, 1, 8, device=device)
    update((both[:, 0], both[:, 1]), rows, 2 * rows)
    assert both[0, 0, 0].tolist() == [[1.0] * 8] and both[1, 1, 1].tolist() == [[2.0] * 8]
    assert both.sum() == 2 * 8 * (1 + 2)
    both.zero_()
    update((both[0], both[1]), rows, 2 * rows)
    assert both.sum() == 2 * 8 * (1 + 2)


@pytest.mark.usefixtures("all_torch_devices")
def test_torch_counts_the_writes(device):
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
def test_a_gradient_through_an_update_in_place_is_refused(device):
    """It was lost, with no more than a warning."""
    cache, row = torch.zeros(2, 4, 2, 8, device=device), torch.ones(1, 1, 8, device=device, requires_grad=True)
    sequence = [torch.tensor(x, device=device, dtype=torch.int32) for x in ([3], [[1]], [0, 1], [1])]
    slots = torch.tensor([6], dtype=torch.int32, device=device)

    def step(row):
        return xt.paged_attention_update_(row, cache, *sequence, row, row, slots, scale=1.0, return_lse=True)

    for run in (step, torch.compile(step, backend="aot_eager")):
        # Compiled, asking comes before running.
        with pytest.raises(
            Exception, match="paged_attention_update_with_lse_: its gradient is not built yet on .* use fla"
        ):
            run(row)[0].sum().backward()
        with torch.no_grad():
            assert not run(row)[0].requires_grad
    assert not cache.requires_grad


@pytest.mark.gpu
def test_cuda_tensors_under_openxla_are_refused(monkeypatch):
    """The tensors and Dynamo are real; of torch_xla, which no torch with this CUDA has, only the name is looked at."""
    if "torch_xla" not in sys.modules:
        monkeypatch.setitem(sys.modules, "torch_xla", types.ModuleType("torch_xla"))
    a = torch.ones(3, device="cuda")
    with pytest.raises(
        Exception, match="its tensors are on cuda:0, and backend='openxla' .* or use backend='inductor'"
    ):
        torch.compile(xt.simple_add, backend="openxla", fullgraph=True)(a, a)
    assert torch.compile(xt.simple_add, backend="aot_eager")(a, a).tolist() == [2.0] * 3


def test_empty_tensors_may_have_any_strides(device):
    """torch gives them zeros, by expand for one."""
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


def test_a_copy_of_an_operand_is_told_by_its_name(device, caplog):
    rows = torch.ones(3, 16, 1, device=device).transpose(1, 2)[..., ::2]
    with caplog.at_level("DEBUG", "xla_attention.torch"):
        update(torch.zeros(2, 4, 2, 8, device=device), rows)
    assert "xla_gpu_kv_cache_update: key has strides (16, 1, 2) and is copied to be dense" in caplog.text
