"""Timing of CUDA graphs of calls in interleaved rounds, and our operators as calls to time."""

import functools
import math
import statistics
import time

import torch

import xla_attention.torch as xt
from peers import agreeing_calls, report_failure

ROUNDS = 5
# The approximate time of a graph: long enough to be timed, short enough not to change the GPU's temperature.
GRAPH_SECONDS = 0.03
PAUSE_SECONDS = 0.1


def paged_attention(query, kv_cache, *metadata, **options):
    """A call of our paged_attention; `metadata` are its four index operands."""
    return functools.partial(xt.paged_attention, query, kv_cache, *metadata, **options)


def flash_attn_varlen(q, k, v, cu_seqlens, **options):
    """A call of our flash_attn_varlen over packed keys; `options` may have `cu_seqlens_k`."""
    return functools.partial(xt.flash_attn_varlen, q, k, v, cu_seqlens, **options)


def starts(lens):
    """cu_seqlens of lengths."""
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32).cuda()


def paged_operands(case, cache_dtype=torch.bfloat16):
    """query, shuffled pages [P, page_size, Hkv, 2, D] of K and V, and our index operands; sets the peers' in `case`."""
    used = [-(-n // case.page_size) for n in case.lens]
    tables = torch.zeros((len(used), max(used)), dtype=torch.int32)
    for row, pages in zip(tables, torch.randperm(sum(used), dtype=torch.int32).split(used), strict=True):
        row[: len(pages)] = pages
    case.tables, case.query_start_loc = tables.cuda(), starts(case.q_lens)
    shape = (sum(used), case.page_size, case.kv_heads, 2, case.head_dim)
    kv = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(cache_dtype)
    query = torch.randn((sum(case.q_lens), case.q_heads, case.head_dim), device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor(case.lens, dtype=torch.int32, device="cuda")
    count = torch.tensor([len(case.lens)], dtype=torch.int32, device="cuda")
    return query, kv, (lens, case.tables, case.query_start_loc, count)


def prepare_peers(table, *case):
    """The calls of those peers of a table that support the case, by name."""
    calls = {}
    for name, prepare in table.items():
        try:
            calls[name] = prepare(*case)
        except Exception as error:
            report_failure(name, error)
    return {name: call for name, call in calls.items() if call is not None}


def rows_of(result, shape):
    """The first result of a call as f32 of a shape."""
    result = result if torch.is_tensor(result) else result[0]
    return result.reshape(shape).float()


def agreeing(calls, tolerance=1e-2):
    """The calls whose results agree with ours, see `agreeing_calls`."""

    def run(call):
        result = call()
        return (result if torch.is_tensor(result) else result[0]).float()

    def relative_error(result, expected):
        return ((result.reshape(expected.shape) - expected).norm() / expected.norm()).item()

    return agreeing_calls(calls, run, relative_error, tolerance)


def graph_of(call, seconds):
    """A CUDA graph of calls that takes about `seconds`, and the number of calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        start.record()
        call()
        end.record()
    stream.synchronize()
    count = max(3, min(200, math.ceil(seconds * 1e3 / max(start.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    return graph, count


def milliseconds(calls, graph_seconds=GRAPH_SECONDS, rounds=ROUNDS, pause_seconds=PAUSE_SECONDS):
    """The median time of each call, measured in interleaved rounds."""
    graphs = {name: graph_of(call, graph_seconds) for name, call in calls.items()}
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (graph, count) in graphs.items():
            torch.cuda.synchronize()
            time.sleep(pause_seconds)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / count)
    return {name: statistics.median(taken) for name, taken in times.items()}
