"""Cache updates, rotation and merging against a copy and FlashInfer on one GPU.

`make bench ARGS="cache.py word"` runs the cases whose name contains the word. The figure of merit is the fraction of a
copy's bandwidth: bytes are those that have to be read and written once, and the copy is torch's between two device
buffers, of as many bytes, in the same interleaved rounds. Short cases are compared with a trivial kernel instead.
FlashInfer gets K and V in two caches, and rotates and appends in two calls. The last line has all results as JSON.
"""

import functools
import json
import math
import time
from dataclasses import dataclass

import torch

import peers
import xla_attention.torch as xt
from harness import agreeing, milliseconds, prepare_peers

BF16 = torch.bfloat16
DTYPES = {"bf16": BF16, "e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
PAGE_SIZE, Q_HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128
POSITIONS = 8192
# From this number of rows on, bandwidth decides and not latency.
BANDWIDTH_BOUND = 4096


@dataclass
class Case:
    """`tokens` rows in bf16; K and V go to random slots of a cache with twice as many slots."""

    operator: str
    tokens: int
    cache: str = "bf16"
    scale: float | None = None
    interleaved: bool = False

    @property
    def name(self):
        """The operator and its options."""
        options = [self.cache] * (self.operator != "merge") + [f"scale {self.scale}"] * (self.scale is not None)
        return ", ".join([f"{self.operator} {self.tokens}", *options, *["interleaved"] * self.interleaved])

    def bytes(self):
        """Bytes read and written, each once."""
        heads = self.tokens * HEAD_DIM * BF16.itemsize
        if self.operator == "merge":
            return 3 * Q_HEADS * heads + 3 * Q_HEADS * self.tokens * 4
        kv = 2 * KV_HEADS * (heads + self.tokens * HEAD_DIM * DTYPES[self.cache].itemsize)
        return kv + (2 * Q_HEADS * heads if self.operator == "rope" else 0)


CASES = [
    *(Case("update", n) for n in (64, 16384, 32768, 65536)),
    *(Case("update", 32768, cache, scale) for cache in ("e4m3fn", "e5m2") for scale in (None, 1.0, 0.37)),
    *(Case("rope", n) for n in (64, 16384, 32768, 65536)),
    Case("rope", 32768, interleaved=True),
    *(Case("rope", 32768, "e4m3fn", scale) for scale in (None, 0.37)),
    *(Case("merge", n) for n in (64, 16384, 32768, 65536)),
]


def randn(*shape):
    """Random numbers in bf16."""
    return torch.randn(shape, device="cuda", dtype=BF16)


def in_place(operator, cache, *rows):
    """A call of an operator that writes to the cache; returns the cache."""

    def call():
        operator(cache, *rows)
        return cache.view(torch.uint8) if cache.element_size() == 1 else cache

    return call


def new_rows(case):
    """A cache, new keys and values, their slots and scales."""
    pages = max(2 * case.tokens, POSITIONS) // PAGE_SIZE
    cache = torch.zeros((pages, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM), device="cuda", dtype=BF16).to(DTYPES[case.cache])
    key, value = (randn(case.tokens, KV_HEADS, HEAD_DIM) for _ in range(2))
    slots = torch.randperm(pages * PAGE_SIZE, device="cuda")[: case.tokens].to(torch.int32)
    scales = [None if case.scale is None else torch.tensor([case.scale], device="cuda")] * 2
    return cache, key, value, slots, scales


def update_calls(case):
    """Calls of cache updates."""
    cache, key, value, slots, scales = new_rows(case)
    ours = in_place(torch.ops.xla_gpu.kv_cache_update_, cache, key, value, slots, *scales)
    return {"ours": ours} | prepare_peers({"flashinfer": flashinfer_append}, case, cache, key, value, slots)


def rope_calls(case):
    """Calls that rotate queries and keys and update the cache."""
    cache, key, value, slots, scales = new_rows(case)
    query = randn(case.tokens, Q_HEADS, HEAD_DIM)
    # As in prompts of a few sequences.
    positions = torch.arange(case.tokens, device="cuda", dtype=torch.int32) % POSITIONS
    angles = torch.rand((POSITIONS, HEAD_DIM // 2), device="cuda") * 2 * math.pi
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    rows = (query, key, value, slots, positions, table, case.interleaved, *scales)
    ours = functools.partial(torch.ops.xla_gpu.rope_kv_cache_update_, cache, *rows)
    operands = (cache, query, key, value, slots, positions, table)
    return {"ours": ours} | prepare_peers({"flashinfer": flashinfer_rope}, case, *operands)


def merge_calls(case):
    """Calls that merge two states."""
    out_a, out_b = (randn(case.tokens, Q_HEADS, HEAD_DIM) for _ in range(2))
    lse_a, lse_b = (torch.randn((Q_HEADS, case.tokens), device="cuda") for _ in range(2))
    states = (out_a, lse_a, out_b, lse_b)
    ours = functools.partial(xt.merge_attention_states, *states)
    return {"ours": lambda: ours()[0]} | prepare_peers({"flashinfer": flashinfer_merge}, case, *states)


def flashinfer_append(case, cache, key, value, slots):
    """append_paged_kv_cache; all slots are positions of one sequence that has every page in order."""
    if case.cache != "bf16" or not peers.available("flashinfer"):
        return None
    import flashinfer

    # Interleaved K and V again, to compare results.
    both = torch.zeros_like(cache).unflatten(2, (KV_HEADS, 2))
    k_cache, v_cache = (torch.zeros_like(both[..., 0, :]).contiguous() for _ in range(2))
    pages = torch.arange(len(cache), device="cuda", dtype=torch.int32)
    starts = torch.tensor([0, len(cache)], device="cuda", dtype=torch.int32)
    last = torch.tensor([PAGE_SIZE], device="cuda", dtype=torch.int32)
    batch = torch.zeros_like(slots)

    def call():
        flashinfer.append_paged_kv_cache(key, value, batch, slots, (k_cache, v_cache), pages, starts, last)
        return k_cache, v_cache

    # The interleaved result is computed once; only the call is timed.
    call()
    both[..., 0, :], both[..., 1, :] = k_cache, v_cache
    expected = both.flatten(2, 3)
    return lambda: call() and expected


def flashinfer_rope(case, cache, query, key, value, slots, positions, table):
    """Rotation in one call, the update in another."""
    if case.interleaved or (append := flashinfer_append(case, cache, key, value, slots)) is None:
        return None
    import flashinfer

    rows = (query.flatten(1), key.flatten(1), HEAD_DIM, table)

    def call():
        rotated, _ = flashinfer.apply_rope_with_cos_sin_cache(positions, *rows)
        append()
        return rotated

    return call


def flashinfer_merge(_case, out_a, lse_a, out_b, lse_b):
    """merge_state, which takes base-2 log-sum-exps as [n, h]."""
    if not peers.available("flashinfer"):
        return None
    import flashinfer

    lses = [(lse.T * math.log2(math.e)).contiguous() for lse in (lse_a, lse_b)]
    return lambda: flashinfer.merge_state(out_a, lses[0], out_b, lses[1])


PREPARE = {"update": update_calls, "rope": rope_calls, "merge": merge_calls}


def reference(case):
    """The call to compare with: a copy of as many bytes, or a trivial kernel for few rows."""
    if case.tokens < BANDWIDTH_BOUND:
        numbers = torch.zeros(64, device="cuda")
        return {"trivial": lambda: numbers.add_(1)}
    from_bytes = torch.randint(0, 256, (case.bytes() // 2,), dtype=torch.uint8, device="cuda")
    to_bytes = torch.empty_like(from_bytes)
    return {"copy": lambda: to_bytes.copy_(from_bytes)}


def main(*words):
    """Run the cases; prints a line per case, then JSON."""
    only = " ".join(words)
    versions = {"flashinfer": peers.versions("flashinfer")}
    if missing := [name for name, packages in versions.items() if not packages]:
        print("not installed: " + ", ".join(missing))
    rows = []
    for case in CASES:
        if only not in case.name:
            continue
        torch.manual_seed(time.time_ns())
        times = milliseconds(agreeing(PREPARE[case.operator](case)) | reference(case))
        torch.cuda.empty_cache()
        cells = "".join(f" | {name} {1e3 * ms:.2f} us {case.bytes() / ms / 1e6:.0f} GB/s" for name, ms in times.items())
        ratio = f"  ours {times['copy'] / times['ours']:.3f}x a copy" if "copy" in times else ""
        print(f"{case.name:30}{cells}{ratio}", flush=True)
        us = {name: round(1e3 * ms, 2) for name, ms in times.items()}
        rows.append({"case": case.name, "us": us, "bytes": case.bytes()})
    here = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    print(json.dumps({**here, "peers": versions, "rows": rows}))
