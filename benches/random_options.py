"""Random batches over pages with one option each, beside the same call without it, on one GPU.

`make bench ARGS="random_options.py seed=5 count=400 seconds=200"` draws the cases of `random_cases.py paged`. An option
that takes a kernel away shows as a large share of the plain call's time. The output has a line of JSON per case, in
$OUT/random_options.jsonl if OUT is set, and at the end each option's share in geometric mean and its slowest cases.
"""

import functools
import statistics

import torch

from harness import paged_attention, paged_operands
from random_cases import draw_paged, timed

# Shorter than beside other libraries: a case has more than ten calls.
TIMING = {"graph_seconds": 2e-3, "rounds": 3, "pause_seconds": 5e-3}
# Queries up to which a sequence is given a tree.
MOST_TREE_QUERIES = 64
SLOWEST = 8


def quantized(kv):
    """int8 pages and a scale per row."""
    return (kv.float() * 40).clamp(-127, 127).to(torch.int8), torch.full(kv.shape[:-1], 1 / 40, device="cuda")


def calls_of(case):
    """The plain call, and by name the calls with one option each."""
    query, kv, metadata = paged_operands(case)
    kv = kv.flatten(2, 3)
    window = {"sliding_window": case.window + 1} if case.window >= 0 else {}
    call = functools.partial(paged_attention, scale=case.head_dim**-0.5, **window)
    plain = functools.partial(call, query, kv, *metadata)
    per_head, one = torch.rand(case.q_heads, device="cuda"), torch.tensor(1.0, device="cuda")
    codes, scales = quantized(kv)
    e4m3fn = kv.to(torch.float8_e4m3fn)
    calls = {
        "plain": plain(),
        "f16": call(query.half(), kv.half(), *metadata),
        "e4m3fn cache": call(query, e4m3fn, *metadata, k_scale=one, v_scale=one),
        "int8 cache": call(query, codes, *metadata, kv_scale_cache=scales),
        "soft cap": plain(soft_cap=30.0),
        "alibi": plain(alibi_slopes=per_head),
        "sinks": plain(sinks=per_head),
        "batch_invariant": plain(batch_invariant=True),
        "k_start": plain(k_start=torch.zeros(len(query), dtype=torch.int32, device="cuda")),
    }
    if case.window < 0:
        calls["window"] = plain(sliding_window=1024)
    longest = max(case.q_lens)
    if 1 < longest <= MOST_TREE_QUERIES:
        bits = torch.full((len(case.lens), longest, -(-longest // 32)), -1, dtype=torch.int32, device="cuda")
        calls["tree"] = plain(tree_mask=bits)
    return calls


def main(*words):
    """Times the cases; prints a line per case, then the shares."""
    shares = {}
    given = dict(word.split("=") for word in words)
    for case, us in timed(draw_paged, given, "random_options", calls_of, TIMING):
        for name in us.keys() - {"plain"}:
            shares.setdefault(name, []).append((us[name] / us["plain"], us["plain"], case.name))
    for name, found in sorted(shares.items()):
        mean = statistics.geometric_mean(share for share, _, _ in found)
        print(f"{name}: {mean:.3f} of the plain call's time, {len(found)} cases")
        for share, plain, case in sorted(found, reverse=True)[:SLOWEST]:
            print(f"  {share:.2f} of {plain} us: {case}")
