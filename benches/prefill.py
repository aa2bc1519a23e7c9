"""Prefill against other libraries on one GPU.

`make bench ARGS="prefill.py word"` runs the cases whose name contains the word. Results are compared before anything is
timed. The GPU is limited by power, and its temperature changes a figure more than most code does. Libraries therefore
run in interleaved rounds of CUDA graphs, with pauses, and the figure of merit is the ratio of medians. TFLOP/s
counts the products under the causal mask. The last line has all results as JSON.
"""

import json
import time

import torch

import peers
from harness import agreeing, flash_attn_varlen, milliseconds, paged_attention, paged_operands, prepare_peers, starts
from prefill_cases import CASES


def packed_operands(case):
    """Packed q, k and v, and both cu_seqlens."""
    keys = (sum(case.lens), case.kv_heads)
    shapes = [(sum(case.q_lens), case.q_heads, case.head_dim), (*keys, case.head_dim), (*keys, case.value_dim)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return q, k, v, starts(case.q_lens), starts(case.lens)


def ours_packed(case, q, k, v, cu_q, cu_k):
    """Our call over packed keys."""
    options = {"causal": case.causal, "window": (case.window, -1), "softcap": case.softcap}
    return flash_attn_varlen(q, k, v, cu_q, cu_seqlens_k=cu_k, **options)


def contiguous_calls(case, table=peers.PREFILL):
    """Our call and those of the peers over packed keys, by name."""
    operands = packed_operands(case)
    ours = ours_packed(case, *operands)
    if case.softcap:
        table = {"fa3": table["fa3"]}
    if not case.fp8:
        return {"ours": ours} | prepare_peers(table, case, *operands)
    fp8 = *(x.to(torch.float8_e4m3fn) for x in operands[:3]), *operands[3:]
    return {"ours": ours_packed(case, *fp8), "ours in bf16": ours} | prepare_peers({"fa3": table["fa3"]}, case, *fp8)


def paged_calls(case):
    """Our call and those of the peers over pages, by name."""
    query, kv, metadata = paged_operands(case)
    ours = paged_attention(query, kv.flatten(2, 3), *metadata, scale=case.head_dim**-0.5)
    k_pages, v_pages = kv[..., 0, :].contiguous(), kv[..., 1, :].contiguous()
    return {"ours": ours} | prepare_peers(peers.PAGED, case, query, k_pages, v_pages)


def main(only=""):
    """Run the cases; prints a line per case, then JSON."""
    versions = {name: peers.versions(name) for name in peers.PACKAGES}
    if missing := [name for name, packages in versions.items() if not packages]:
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
