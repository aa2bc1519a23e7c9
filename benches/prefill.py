"""Prefill beside its peers on one GPU: `make bench ARGS="prefill.py word"` runs the cases whose name contains the word.

Answers are compared before anything is timed. The card is limited by its power, and how warm it is moves a figure more
than most changes do: ours and the peers take turns, each turn a CUDA graph of calls after a pause, and the ratio of
medians is what counts. TFLOP/s counts causal products once. The last line is all of it as JSON.
"""

import json
import math
import statistics
import time

import torch

import peers
from harness import flash_attn_varlen, paged_attention
from prefill_cases import CASES

ROUNDS = 5
# What a turn takes, about: long enough to be timed, short enough for the card to stay as warm as it was.
TURN_SECONDS = 0.03
PAUSE_SECONDS = 0.1


def starts(lens):
    """cu_seqlens of lengths."""
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32).cuda()


def packed_operands(case):
    """q, k, v and both cu_seqlens over packed keys."""
    keys = (sum(case.lens), case.kv_heads)
    shapes = [(sum(case.q_lens), case.q_heads, case.head_dim), (*keys, case.head_dim), (*keys, case.value_dim)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return q, k, v, starts(case.q_lens), starts(case.lens)


def ours_packed(case, q, k, v, cu_q, cu_k):
    """Our call over packed keys."""
    options = {"causal": case.causal, "window": (case.window, -1)}
    return flash_attn_varlen(q, k, v, cu_q, cu_seqlens_k=cu_k, **options)


def contiguous_calls(case, table=peers.PREFILL):
    """Our call and the peers' over packed keys, by name."""
    operands = packed_operands(case)
    ours = ours_packed(case, *operands)
    if not case.fp8:
        return {"ours": ours} | prepared(table, case, *operands)
    coded = *(x.to(torch.float8_e4m3fn) for x in operands[:3]), *operands[3:]
    return {"ours": ours_packed(case, *coded), "ours in bf16": ours} | prepared({"fa3": table["fa3"]}, case, *coded)


def paged_calls(case):
    """Our call and the peers' over pages, by name."""
    used = [-(-n // case.page_size) for n in case.lens]
    case.tables = torch.zeros((len(used), max(used)), dtype=torch.int32)
    order = torch.randperm(sum(used), dtype=torch.int32)
    for row, pages in zip(case.tables, order.split(used), strict=True):
        row[: len(pages)] = pages
    case.tables, case.query_start_loc = case.tables.cuda(), starts(case.q_lens)
    shape = (sum(used), case.page_size, case.kv_heads, 2, case.head_dim)
    kv = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    query = torch.randn((sum(case.q_lens), case.q_heads, case.head_dim), device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor(case.lens, dtype=torch.int32, device="cuda")
    count = torch.tensor([len(case.lens)], dtype=torch.int32, device="cuda")
    metadata = (lens, case.tables, case.query_start_loc, count)
    ours = paged_attention(query, kv.flatten(2, 3), *metadata, scale=case.head_dim**-0.5)
    k_pages, v_pages = kv[..., 0, :].contiguous(), kv[..., 1, :].contiguous()
    return {"ours": ours} | prepared(peers.PAGED, case, query, k_pages, v_pages)


def prepared(table, *case):
    """The calls of the peers of a table that are here and take the case, by name."""
    calls = {}
    for name, prepare in table.items():
        try:
            calls[name] = prepare(*case)
        except Exception as error:
            did_not_run(name, error)
    return {name: call for name, call in calls.items() if call is not None}


def did_not_run(name, error):
    """Say what a peer has against this GPU or case."""
    print(f"  {name} did not run: {type(error).__name__}: {str(error)[:160]}", flush=True)


def rows_of(result, shape):
    """What a call gives, as [tokens, heads, columns]."""
    result = result if torch.is_tensor(result) else result[0]
    return result.reshape(shape).float()


def agreeing(calls, most=1e-2):
    """The calls that run here and give the same but for `most`; if none does but ours, ours is wrong."""
    wanted = calls["ours"]().float()
    found, differing = {}, []
    for name, call in calls.items():
        try:
            result = rows_of(call(), wanted.shape)
        except Exception as error:
            did_not_run(name, error)
            continue
        error = ((result - wanted).norm() / wanted.norm()).item()
        if error < most:
            found[name] = call
        else:
            print(f"  {name} differs from ours by {error:.1e}", flush=True)
            differing.append(name)
    assert len(found) > 1 or not differing, "ours differs from all"
    return found


def graph_of(call, seconds):
    """A CUDA graph of calls that take about `seconds`, and how many."""
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


def milliseconds(calls):
    """Median time of one call of each, taken in turns."""
    graphs = {name: graph_of(call, TURN_SECONDS) for name, call in calls.items()}
    times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, (graph, count) in graphs.items():
            torch.cuda.synchronize()
            time.sleep(PAUSE_SECONDS)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / count)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main(only=""):
    """Run the cases; a line for each, then the same as JSON."""
    versions = {name: peers.versions(name) for name in peers.PACKAGES}
    if missing := [name for name, found in versions.items() if not found]:
        print("not installed: " + ", ".join(missing))
    rows = []
    for case in CASES:
        if only not in case.name:
            continue
        torch.manual_seed(len(case.name))
        calls = paged_calls(case) if case.page_size else contiguous_calls(case)
        times = milliseconds(agreeing(calls, 1e-1 if case.fp8 else 1e-2))
        torch.cuda.empty_cache()
        rates = {name: case.flops() / taken / 1e9 for name, taken in times.items()}
        best = max((rate for name, rate in rates.items() if not name.startswith("ours")), default=None)
        ratio = f"  ours {rates['ours'] / best:.3f}x the best peer" if best else ""
        print(f"{case.name:32}" + "".join(f" | {name} {rate:.0f}" for name, rate in rates.items()) + ratio, flush=True)
        rows.append({"case": case.name, "tflops": {name: round(rate, 1) for name, rate in rates.items()}})
    here = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    print(json.dumps({**here, "peers": versions, "rows": rows}))
