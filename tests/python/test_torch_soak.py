"""Many eager calls, from several threads and streams: memory does not grow, and results are correct."""

import concurrent.futures
import threading

import pytest
import torch

import xla_attention.torch as xt
from batches import batch
from torch_adapter import tensor
from xla_attention.torch import _plan

SHAPES = [([(1, n)] * (1 + n % 3) + [(n % 5, n)], d) for n in (3, 17, 40, 129, 300) for d in (64, 128)]


def calls(device, dtype="bfloat16"):
    return [[tensor(x, device) for x in batch(sequences, d=d, dtype=dtype)] for sequences, d in SHAPES]


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_device_memory_stays_flat_over_10_000_calls(captured):
    all_calls = calls("cuda")

    def every_shape():
        for operands in all_calls:
            xt.paged_attention(*operands, scale=0.125)

    run = every_shape
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            every_shape()
        if captured:
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                every_shape()
            run = graph.replay
        run()
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        for _ in range(10_000 // len(all_calls)):
            run()
        torch.cuda.synchronize()
        assert torch.cuda.mem_get_info()[0] == free


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_threads_with_separate_streams_give_the_bits_of_one_thread(device):
    all_calls = calls(device, "float32")
    expected = [xt.paged_attention(*operands, scale=0.125) for operands in all_calls]
    started = threading.Barrier(4)

    def run(_):
        stream = torch.cuda.Stream() if device == "cuda" else None
        started.wait()
        for _ in range(20):
            for operands, expected_result in zip(all_calls, expected, strict=True):
                if stream is None:
                    actual = xt.paged_attention(*operands, scale=0.125)
                else:
                    with torch.cuda.stream(stream):
                        actual = xt.paged_attention(*operands, scale=0.125)
                        stream.synchronize()
                assert torch.equal(actual, expected_result), operands[0].shape

    if device == "cuda":
        torch.cuda.synchronize()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))


@pytest.mark.gpu
def test_the_workspace_of_a_plan_is_freed_even_if_the_launch_fails(monkeypatch):
    query, cache = torch.randn(2, 8, 128, device="cuda"), torch.randn(128, 16, 8, 128, device="cuda")
    tables = torch.arange(128, dtype=torch.int32, device="cuda").view(2, 64)
    lens, starts, count = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([1000, 1024], [0, 1, 2], [2]))

    def attend():
        return xt.paged_attention(query, cache, lens, tables, starts, count, scale=0.1)

    _plan._STATE.plans.clear()
    assert torch.equal(attend(), attend())
    (plan,) = _plan._STATE.plans.values()
    assert plan._workspace > 0
    before = torch.cuda.memory_allocated()
    monkeypatch.setattr(plan._request, "run", lambda *_: pytest.fail("the launch fails"))
    with pytest.raises(pytest.fail.Exception, match="the launch fails"):
        attend()
    assert torch.cuda.memory_allocated() == before
