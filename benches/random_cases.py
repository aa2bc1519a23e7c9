"""Random batches with the head layouts of known models against other libraries on one GPU.

`make bench ARGS="random_cases.py paged seed=1 count=300 seconds=200 peers=fa3,flashinfer"` draws as many cases of
attention over pages (`packed`: over packed keys; `gradients`: their gradients), or as many as fit the time; the same
seed draws the same ones. Fixed cases show what a kernel was tuned for, random ones what it was not tuned for. Each call
of a graph reads other operands, so that small ones do not stay in L2, and libraries run in interleaved rounds. Peers
get K and V in two caches, and FlashInfer's host plan is not timed. The output has a line of JSON per case, in
$OUT/random_<group>.jsonl if OUT is set, and at the end the cases that are the slowest beside their best peer.
"""

import functools
import itertools
import json
import math
import os
import pathlib
import random
import statistics
import time

import torch

import decode
import peers
import prefill
import prefill_cases
import training
from harness import agreeing, milliseconds, prepare_peers

# Hq, Hkv and D of models, some divided by tensor parallelism.
HEADS = {
    128: [(32, 8), (64, 8), (28, 4), (40, 8), (64, 4), (32, 4), (96, 8), (32, 32), (32, 16), (16, 1), (8, 1), (16, 2)],
    64: [(64, 8), (32, 8), (14, 2), (9, 3), (16, 16), (32, 32)],
    256: [(16, 8), (8, 4), (16, 16), (4, 1), (16, 2)],
}
WINDOWS = {128: [4095, 1023], 64: [127], 256: [511, 1023]}
PAGE_SIZES = [16, 16, 32, 64, 128]
# Bytes of q, K and V of a case, and of the copies together, which exceed L2.
MOST_BYTES, COPIES_BYTES, MOST_COPIES = 3e9, 150e6, 12
LEAST_FLOPS, MOST_FLOPS = 1e7, 2e12
# Shorter than for the fixed cases, because there are hundreds.
TIMING = {"graph_seconds": 4e-3, "rounds": 3, "pause_seconds": 0.03}


def log_uniform(draw, low, high):
    """An integer whose logarithm is uniform."""
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def draw_lens(draw, seqs):
    """Lengths of sequences, alike or different by up to 16 times, and what a case is called by."""
    longest = log_uniform(draw, 32, 65536)
    if draw.random() < 0.4:
        return [longest] * seqs, str(longest)
    lens = [log_uniform(draw, max(1, longest / 16), longest) for _ in range(seqs)]
    return lens, f"{min(lens)}-{max(lens)}"


def draw_paged(draw):
    """A random batch over pages."""
    dim = draw.choice([128, 128, 128, 64, 256])
    heads = draw.choice(HEADS[dim])
    kind = draw.choice(["decode", "decode", "speculative", "chunk", "prefill", "mixed"])
    seqs = log_uniform(draw, 1, 512)
    lens, lengths = draw_lens(draw, seqs)
    if kind == "decode":
        q_lens = [1] * seqs
    elif kind in ("speculative", "chunk"):
        queries = draw.randint(2, 16) if kind == "speculative" else log_uniform(draw, 17, 1024)
        q_lens = [min(queries, n) for n in lens]
    elif kind == "prefill":
        q_lens = lens
    else:
        prefills = draw.randint(1, max(1, seqs // 8))
        q_lens = [min(n, log_uniform(draw, 64, 2048)) if i < prefills else 1 for i, n in enumerate(lens)]
    window = draw.choice(WINDOWS[dim]) if draw.random() < 0.15 else -1
    page = draw.choice(PAGE_SIZES)
    name = f"{kind} {seqs} x {max(q_lens)} over {lengths}, {heads[0]}/{heads[1]} of {dim}, page {page}"
    name += f", window {window}" if window >= 0 else ""
    return decode.Case(name, q_lens, lens, *heads, dim, page, window)


def draw_packed(draw, takes_windows=True):
    """A random batch of packed sequences."""
    dim = draw.choice([128, 128, 128, 64, 256, 96, 192])
    heads = draw.choice(HEADS.get(dim, HEADS[128]))
    lens, lengths = draw_lens(draw, log_uniform(draw, 1, 256))
    causal = draw.random() < 0.7
    has_window = causal and dim in WINDOWS and draw.random() < 0.15
    window = draw.choice(WINDOWS[dim]) if has_window and takes_windows else -1
    name = f"{len(lens)} x {lengths}, {heads[0]}/{heads[1]} of {dim}, {'causal' if causal else 'full'}"
    name += f", window {window}" if window >= 0 else ""
    return prefill_cases.Case(name, lens, lens, *heads, dim, causal=causal, window=window)


def operand_bytes(case):
    """Bytes of q, K and V."""
    rows = sum(case.lens) * case.kv_heads * 2 + sum(case.q_lens) * case.q_heads
    return 2 * rows * case.head_dim


def cases(draw_case, seed, count):
    """The first `count` cases of a seed that are neither too large nor too small."""
    draw = random.Random(seed)
    drawn = (draw_case(draw) for _ in itertools.count())
    fitting = (c for c in drawn if operand_bytes(c) <= MOST_BYTES and LEAST_FLOPS <= c.flops() <= MOST_FLOPS)
    return itertools.islice(fitting, count)


def gradient_calls(case, table):
    """Our gradients and those of the peers."""
    operands = training.operands(case)
    return {"ours": training.ours(case, *operands)} | prepare_peers(table, case, *operands)


# What draws a case, what prepares its calls, and the peers.
GROUPS = {
    "paged": (draw_paged, decode.paged_calls, peers.PAGED),
    "packed": (draw_packed, prefill.contiguous_calls, peers.PREFILL),
    "gradients": (functools.partial(draw_packed, takes_windows=False), gradient_calls, training.PEERS),
}


def in_turn(calls):
    """A call that makes one of `calls` after the other."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def prepare(case, make_calls, table):
    """Per library whose results agree with ours, a call that takes other operands each time."""
    copies = max(1, min(MOST_COPIES, math.ceil(COPIES_BYTES / operand_bytes(case))))
    calls = [make_calls(case, table) for _ in range(copies)]
    first = {name: call for name, call in calls[0].items() if name in ("ours", *table)}
    return {name: in_turn([one[name] for one in calls]) for name in agreeing(first, 3e-2)}


def timed(draw_case, given, output, make_calls, timing):
    """Each case of the seed that fits the time, and the microseconds of its calls by name.

    A line of JSON per case goes to $OUT/<output>.jsonl if OUT is set, otherwise it is printed.
    """
    given = {"seed": "1", "count": "200", "seconds": "inf"} | given
    folder = os.environ.get("OUT")
    lines = (pathlib.Path(folder) / f"{output}.jsonl").open("w") if folder else None
    start = time.monotonic()
    for case in cases(draw_case, int(given["seed"]), int(given["count"])):
        if time.monotonic() - start > float(given["seconds"]):
            break
        times = milliseconds(make_calls(case), **timing)
        torch.cuda.empty_cache()
        us = {name: round(1e3 * ms, 2) for name, ms in times.items()}
        print(json.dumps({"case": case.name, "us": us}), file=lines, flush=True)
        yield case, us


def main(group="paged", *words):
    """Times the cases; prints a line per case, then the ratios."""
    given = dict(word.split("=") for word in words)
    draw_case, make_calls, table = GROUPS[group]
    if "peers" in given:
        table = {name: table[name] for name in given["peers"].split(",")}
    start, ratios = time.monotonic(), {}
    calls_of = functools.partial(prepare, make_calls=make_calls, table=table)
    for case, us in timed(draw_case, given, f"random_{group}", calls_of, TIMING):
        if len(us) > 1:
            ratios[case.name] = min(t for name, t in us.items() if name != "ours") / us["ours"]
    print(f"{len(ratios)} cases beside peers, {time.monotonic() - start:.0f} s")
    for name, ratio in sorted(ratios.items(), key=lambda item: item[1])[: len(ratios) // 3]:
        print(f"{ratio:.2f} {name}")
    if ratios:
        print(f"geometric mean {statistics.geometric_mean(ratios.values()):.3f}")
