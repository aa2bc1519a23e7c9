"""Decode and mixed batches against other libraries on one GPU.

`make bench ARGS="decode.py word"` runs the cases whose name contains the word. As in prefill.py, results are compared
first, and libraries run in interleaved rounds. GB/s counts each visible byte of K and V once, TFLOP/s the products
under the causal mask. The peers get K and V in two caches, which suits them better, and FlashInfer's host plan is not
timed. The last line has all results as JSON.
"""

import json
import random
import time
from dataclasses import dataclass

import torch

import peers
from harness import agreeing, milliseconds, paged_attention, paged_operands, prepare_peers

DTYPES = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass
class Case:
    """A causal ragged batch of new tokens over contexts in shuffled pages."""

    name: str
    q_lens: list[int]
    lens: list[int]
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    window: int = -1  # keys before a query's own position
    cache: str = "bf16"

    def kv_bytes(self):
        """Bytes of the visible keys and values."""
        visible = [
            k if self.window < 0 else min(k, self.window + q) for q, k in zip(self.q_lens, self.lens, strict=True)
        ]
        return 2 * sum(visible) * self.kv_heads * self.head_dim * (2 if self.cache == "bf16" else 1)

    def flops(self):
        """Operations of all visible pairs of query and key, without a window."""
        pairs = sum(q * (k - q) + q * (q + 1) / 2 for q, k in zip(self.q_lens, self.lens, strict=True))
        return 4 * pairs * self.q_heads * self.head_dim

    def rate(self, ms):
        """GB/s for few new tokens per sequence, otherwise TFLOP/s."""
        if max(self.q_lens) <= 4:
            return f"{self.kv_bytes() / ms / 1e6:.0f} GB/s"
        return f"{self.flops() / ms / 1e9:.0f} TFLOP/s"


def few_queries(seqs, queries, keys, **heads):
    """A batch of equal sequences with a few new tokens each over a long context."""
    name = f"{seqs} x {queries} queries over {keys}, {heads['q_heads']}/{heads['kv_heads']}"
    return Case(name, [queries] * seqs, [keys] * seqs, **heads)


def decode(name, lens, **options):
    """A decode batch: one new token per sequence."""
    return Case(name, [1] * len(lens), lens, **options)


random.seed(0)
RAGGED = [random.randrange(1024, 32768) for _ in range(16)]
CASES = [
    decode("64 x 8k", [8192] * 64),
    decode("16 ragged 1k-32k", RAGGED),
    decode("1 x 128k", [131072]),
    decode("32 x 4k, 32/32", [4096] * 32, kv_heads=32),
    decode("128 x 2k, 64/8", [2048] * 128, q_heads=64),
    decode("8 x 512", [512] * 8),
    Case("64 x 4 queries over 4k", [4] * 64, [4096] * 64),
    few_queries(16, 5, 6000, q_heads=28, kv_heads=4),
    few_queries(64, 4, 8192, q_heads=28, kv_heads=4),
    *(few_queries(1, queries, 131072, q_heads=32, kv_heads=8) for queries in (5, 16, 64)),
    few_queries(4, 32, 32768, q_heads=32, kv_heads=8),
    few_queries(64, 16, 8192, q_heads=32, kv_heads=8),
    few_queries(16, 64, 8192, q_heads=32, kv_heads=8),
    few_queries(8, 16, 16384, q_heads=64, kv_heads=8),
    few_queries(8, 5, 512, q_heads=32, kv_heads=8),
    Case("mixed 4 x 2k + 60 x 4k", [2048] * 4 + [1] * 60, [2048] * 4 + [4096] * 60),
    Case("chunked 8 x 512 over 8k", [512] * 8, [8192] * 8),
    *(decode(f"64 x 8k, {cache}", [8192] * 64, cache=cache) for cache in DTYPES),
    decode("16 ragged 1k-32k, e4m3fn", RAGGED, cache="e4m3fn"),
    *(decode(f"64 x 8k, page {size}", [8192] * 64, page_size=size) for size in (1, 64, 256)),
    decode("64 x 16k, d64", [16384] * 64, head_dim=64),
    decode("64 x 4k, d256", [4096] * 64, q_heads=16, head_dim=256),
    decode("64 x 32k, window 1k", [32768] * 64, window=1023),
    *(decode(f"batch {n} over {k}k", [1024 * k] * n) for n in (1, 4, 16, 64) for k in (1, 4, 16, 64) if n * k <= 1024),
    *(
        decode(f"latency {n} x {k}", [k] * n)
        for n, k in ((1, 512), (8, 512), (16, 512), (1, 2048), (1, 8192), (4, 3000), (4, 8192))
    ),
    *(decode(f"short {n} x 512", [512] * n) for n in (1, 2, 4, 16, 32, 64)),
]


def paged_calls(case, table=peers.PAGED):
    """Our calls and those of the peers, by name."""
    query, kv, metadata = paged_operands(case, DTYPES.get(case.cache, torch.bfloat16))
    operands = (query, kv.flatten(2, 3), *metadata)
    options = {"scale": case.head_dim**-0.5, "sliding_window": case.window + 1 if case.window >= 0 else None}
    ours = {
        "ours": paged_attention(*operands, **options),
        "ours, batch invariant": paged_attention(*operands, **options, batch_invariant=True),
    }
    k_pages, v_pages = kv[..., 0, :].contiguous(), kv[..., 1, :].contiguous()
    return ours | prepare_peers(table, case, query, k_pages, v_pages)


def main(*words):
    """Run the cases; prints a line per case, then JSON."""
    only = " ".join(words)
    versions = {name: peers.versions(name) for name in peers.PACKAGES}
    if missing := [name for name, packages in versions.items() if not packages]:
        print("not installed: " + ", ".join(missing))
    rows = []
    for case in CASES:
        if only not in case.name:
            continue
        torch.manual_seed(len(case.name))
        times = milliseconds(agreeing(paged_calls(case), 3e-2))
        torch.cuda.empty_cache()
        best = min((ms for name, ms in times.items() if not name.startswith("ours")), default=None)
        ratio = f"  ours {best / times['ours']:.3f}x the best peer" if best else ""
        cells = "".join(f" | {name} {1e3 * ms:.1f} us {case.rate(ms)}" for name, ms in times.items())
        print(f"{case.name:26}{cells}{ratio}", flush=True)
        us = {name: round(1e3 * ms, 2) for name, ms in times.items()}
        rows.append({"case": case.name, "us": us, "kv_bytes": case.kv_bytes(), "flops": case.flops()})
    here = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    print(json.dumps({**here, "peers": versions, "rows": rows}))
