"""Multi-head latent attention against other libraries on one GPU.

`make bench ARGS="mla.py word"` runs the cases whose name contains the word. As in decode.py, results are compared
first, and libraries run in interleaved rounds. GB/s counts each visible byte of the cache once, TFLOP/s the products
under the causal mask. FlashAttention-3 gets contiguous sequences where its build has no pages. The last line has all
results as JSON.
"""

import functools
import json
import time
from dataclasses import dataclass

import torch

import peers
import xla_attention.torch as xt
from harness import agreeing, milliseconds, prepare_peers, starts

D, DV = 576, 512
SCALE = (128 + 64) ** -0.5
CACHES = {"bf16": torch.bfloat16, "e4m3fn": torch.float8_e4m3fn}


@dataclass
class Case:
    """A causal batch of equal sequences over shuffled pages of latent rows."""

    sequences: int
    keys: int
    heads: int = 128
    queries: int = 1
    page_size: int = 64
    cache: str = "bf16"

    @property
    def name(self):
        """All parameters."""
        sizes = f"{self.sequences} x {self.queries} over {self.keys}, {self.heads} heads"
        return f"{sizes}, {self.cache}, page {self.page_size}"

    def kv_bytes(self):
        """Bytes of the rows."""
        return self.sequences * self.keys * D * CACHES[self.cache].itemsize

    def flops(self):
        """Operations of all visible pairs of query and key."""
        pairs = self.queries * (self.keys - self.queries) + self.queries * (self.queries + 1) / 2
        return 2 * self.sequences * pairs * self.heads * (D + DV)

    def operands(self):
        """Our operands, and the rows of each sequence, contiguous."""
        pages = -(-self.keys // self.page_size)
        table = torch.randperm(self.sequences * pages, device="cuda").int().view(self.sequences, pages)
        cache = torch.randn((table.numel(), self.page_size, D), device="cuda", dtype=torch.bfloat16)
        cache = cache.to(CACHES[self.cache])
        q = torch.randn((self.sequences * self.queries, self.heads, D), device="cuda", dtype=torch.bfloat16)
        lens = torch.full((self.sequences,), self.keys, dtype=torch.int32, device="cuda")
        return q, cache, starts([self.queries] * self.sequences), lens, table


CASES = [
    Case(64, 8192),
    Case(64, 8192, heads=64),
    Case(64, 8192, heads=16),
    Case(64, 8192, cache="e4m3fn"),
    Case(64, 8192, heads=64, cache="e4m3fn"),
    Case(64, 8192, heads=16, cache="e4m3fn"),
    Case(1, 131072, cache="e4m3fn"),
    Case(64, 8192, page_size=1),
    Case(64, 8192, page_size=16),
    Case(64, 4096, queries=2),
    Case(1, 131072),
    Case(1, 131072, heads=16),
    Case(4, 8192, heads=16),
    Case(128, 2048),
    Case(16, 4096, queries=64),
    Case(4, 4096, queries=4096, heads=16),
]


def fa3(case, q, cache, cu_seqlens_q, lens, table):
    """FlashAttention-3 with `qv`, over contiguous rows."""
    if case.cache != "bf16" or not peers.available("fa3_fwd_interface"):
        return None
    from fa3_fwd_interface import flash_attn_with_kvcache

    rows = cache[table.long()].view(case.sequences, -1, 1, D)
    q = q.view(case.sequences, case.queries, case.heads, D)
    operands = (q[..., DV:], rows[..., DV:], rows[..., :DV])
    options = {"qv": q[..., :DV], "cache_seqlens": lens, "softmax_scale": SCALE, "causal": True}
    return lambda: flash_attn_with_kvcache(*operands, **options)


def flashinfer(case, q, cache, cu_seqlens_q, lens, table):
    """FlashInfer's MLA wrapper, whose host plan is made before the timing starts."""
    if case.cache != "bf16" or not peers.available("flashinfer"):
        return None
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device="cuda"))
    pages = table.shape[1] * torch.arange(case.sequences + 1, dtype=torch.int32, device="cuda")
    sizes = (case.heads, DV, D - DV, case.page_size, True, SCALE, q.dtype, cache.dtype)
    wrapper.plan(cu_seqlens_q, pages, table.flatten(), lens, *sizes)
    return lambda: wrapper.run(q[..., :DV], q[..., DV:], cache[..., :DV], cache[..., DV:])


PEERS = {"FA3": fa3, "FlashInfer": flashinfer}


def main(*words):
    """Run the cases; prints a line per case, then JSON."""
    only, rows = " ".join(words), []
    for case in CASES:
        if only not in case.name:
            continue
        torch.manual_seed(len(case.name))
        operands = case.operands()
        options = {"softmax_scale": SCALE, "causal": True}
        calls = {"ours": functools.partial(xt.mla_paged_attention, *operands, **options)}
        calls |= prepare_peers(PEERS, case, *operands)
        times = milliseconds(agreeing(calls, 2e-2))
        cells = "".join(
            f" | {name} {1e3 * ms:.1f} us {case.flops() / ms / 1e9:.0f} TFLOP/s {case.kv_bytes() / ms / 1e6:.0f} GB/s"
            for name, ms in times.items()
        )
        print(f"{case.name:42}{cells}", flush=True)
        us = {name: round(1e3 * ms, 2) for name, ms in times.items()}
        rows.append({"case": case.name, "us": us, "kv_bytes": case.kv_bytes(), "flops": case.flops()})
        del operands, calls
        torch.cuda.empty_cache()
    here = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    print(json.dumps({**here, "rows": rows}))
