"""Prefill beside its peers on one GPU: `make bench ARGS="prefill.py word"` runs the cases whose name contains the word.

Answers are compared before anything is timed. The card is limited by its power, and how warm it is moves a figure more
than most changes do: ours and the peers take turns, each turn a CUDA graph of calls after a pause, and the ratio of
medians is what counts. TFLOP/s counts causal products once. The last line is all of it as JSON.
"""

import json
import time

import torch

import peers
from harness import agreeing, flash_attn_varlen, milliseconds, paged_attention, paged_operands, prepared, starts
from prefill_cases import CASES


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
    query, kv, metadata = paged_operands(case)
    ours = paged_attention(query, kv.flatten(2, 3), *metadata, scale=case.head_dim**-0.5)
    k_pages, v_pages = kv[..., 0, :].contiguous(), kv[..., 1, :].contiguous()
    return {"ours": ours} | prepared(peers.PAGED, case, query, k_pages, v_pages)


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
