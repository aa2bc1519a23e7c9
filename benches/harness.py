"""Timing with CUDA graphs, and our operators as calls to be timed."""

import functools
import statistics
from collections.abc import Callable

import torch

import xla_attention.torch as xt


def graph_time_us(function: Callable[[], object], calls: int = 5, replays: int = 7) -> float:
    """Median microseconds of one call, over replays of a CUDA graph that holds `calls` of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            function()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def paged_attention(query, kv_cache, *metadata, scale, batch_invariant=False):
    """A call of our paged_attention; `metadata` are its four index operands."""
    return functools.partial(
        xt.paged_attention, query, kv_cache, *metadata, scale=scale, batch_invariant=batch_invariant
    )


def flash_attn_varlen(q, k, v, cu_seqlens, **options):
    """A call of our flash_attn_varlen over packed keys, as many as queries unless `options` say otherwise."""
    return functools.partial(xt.flash_attn_varlen, q, k, v, cu_seqlens, **options)
