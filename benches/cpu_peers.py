"""Attention on the CPU against torch's scaled_dot_product_attention and an XLA program that gathers pages.

`python benches/cpu_peers.py [word ...]` runs the cases whose name contains a word. The implementations run in
interleaved rounds, so that all see the machine in the same state; the figure is the median. The first call of a round
is not timed, because threads of the previous implementation may still be active. Operands are random normal numbers.
Decode reads several caches in rotation, and torch's sum is one of its implementations: the rate at which it reads
memory changes within seconds on a shared machine.
"""

import functools
import itertools
import os
import statistics
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# torch's threads would otherwise spin for longer than a call of decode takes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jax
import jax.numpy as jnp
import numpy as np

from xla_attention.jax import flash_attn_varlen, paged_attention

ROUNDS = 12
CALLS_PER_ROUND = 3
# Decode's caches, and as many buffers that torch's sum reads: together they do not fit the CPU's caches.
DECODE_CACHES = 4
READER = "torch sum"


def medians(implementations, rounds=ROUNDS):
    """The median time of a call in seconds by implementation, measured in interleaved rounds."""
    times = {name: [] for name in implementations}
    for _ in range(rounds):
        for name, call in implementations.items():
            call()
            for _ in range(CALLS_PER_ROUND):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def in_jax(function, *operands):
    """A call of a jitted function that waits for its result."""
    return in_rotation(function, [operands])


def in_rotation(function, calls):
    """The same with the operands of each of `calls` in turn."""
    compiled = jax.jit(function).lower(*calls[0]).compile()
    turns = itertools.cycle(calls)
    return lambda: jax.block_until_ready(compiled(*next(turns)))


def torch_dtype(dtype):
    import torch

    return getattr(torch, dtype)


def in_torch(shapes, dtype, **options):
    """torch's attention on random operands `[B, H, T, D]`."""
    import torch

    q, k, v = (torch.randn(shape).to(torch_dtype(dtype)) for shape in shapes)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, **options)

    def call():
        with torch.inference_mode():
            attend()

    return call


def gradients_in_torch(shape, dtype, **options):
    """torch's attention on random operands, and its gradients."""
    import torch

    q, k, v = (torch.randn(shape).to(torch_dtype(dtype)).requires_grad_() for _ in range(3))
    dout = torch.randn(shape).to(torch_dtype(dtype))

    def call():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        torch.autograd.grad(out, (q, k, v), dout)

    return call


def random(seed, shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def prefill(dtype, causal, *, rows=2048, heads=8, d=128):
    """One sequence, with or without a causal mask."""
    q, k, v = (random(i, (rows, heads, d), dtype) for i in range(3))
    starts = jnp.array([0, rows])
    implementations = {"ours": in_jax(functools.partial(flash_attn_varlen, causal=causal), q, k, v, starts)}
    if dtype not in FP8:
        implementations["torch SDPA"] = in_torch([(1, heads, rows, d)] * 3, dtype, is_causal=causal)
    flops = 4 * rows * rows * heads * d * (0.5 if causal else 1)
    return implementations, lambda seconds: f"{flops / seconds / 1e9:7.0f} GFLOP/s"


def training(dtype, *, seqs=2, rows=1024, heads=8, d=128):
    """Causal attention forward and backward."""
    q, k, v, dout = (random(i, (seqs * rows, heads, d), dtype) for i in range(4))
    starts = jnp.arange(seqs + 1) * rows

    def gradients(q, k, v, dout, starts):
        return jax.vjp(lambda *qkv: flash_attn_varlen(*qkv, starts, causal=True), q, k, v)[1](dout)

    implementations = {
        "ours": in_jax(gradients, q, k, v, dout, starts),
        "torch SDPA": gradients_in_torch((seqs, heads, rows, d), dtype, is_causal=True),
    }
    flops = 3.5 * 4 * seqs * rows * rows * heads * d * 0.5
    return implementations, lambda seconds: f"{flops / seconds / 1e9:7.0f} GFLOP/s"


def decode(dtype, *, seqs=8, keys=2048, q_heads=32, kv_heads=8, d=128, page_size=16):
    """One query per sequence, over pages in random order; torch reads keys from a dense buffer."""
    import torch

    calls = [paged([(1, keys)] * seqs, q_heads, kv_heads, d, page_size, dtype) for _ in range(DECODE_CACHES)]
    implementations = {"ours": in_rotation(functools.partial(paged_attention, scale=d**-0.5), calls)}
    size = 2 * seqs * keys * kv_heads * d * jnp.dtype(dtype).itemsize
    buffers = itertools.cycle([torch.rand(size // torch.float32.itemsize) for _ in range(DECODE_CACHES)])
    implementations[READER] = lambda: next(buffers).sum()
    if dtype not in FP8:
        shapes = [(seqs, q_heads, 1, d), (seqs, kv_heads, keys, d), (seqs, kv_heads, keys, d)]
        implementations["torch SDPA"] = in_torch(shapes, dtype, enable_gqa=True)
    return implementations, lambda seconds: f"{size / seconds / 1e9:7.1f} GB/s"


def ragged(dtype, *, q_heads=32, kv_heads=8, d=128, page_size=16):
    """Prefill chunks and decode tokens in one batch, against an XLA program."""
    sequences = [(1, 2048)] * 6 + [(128, 1024), (256, 512)]
    operands = paged(sequences, q_heads, kv_heads, d, page_size, dtype)
    scale = d**-0.5
    longest = max(rows for rows, _ in sequences)
    ours = functools.partial(paged_attention, scale=scale)
    theirs = functools.partial(gathered_attention, scale=scale, longest=longest)
    difference = np.abs(np.float32(ours(*operands)) - np.float32(jax.jit(theirs)(*operands))).max()
    assert difference < 0.05, f"the two programs differ by {difference}"
    return {"ours": in_jax(ours, *operands), "XLA gather": in_jax(theirs, *operands)}, lambda _: ""


def paged(sequences, q_heads, kv_heads, d, page_size, dtype):
    """Operands of paged_attention: shuffled pages, K and V interleaved."""
    used = [-(-keys // page_size) for _, keys in sequences]
    order = np.random.default_rng(0).permutation(sum(used)).astype(np.int32)
    tables = np.zeros((len(used), max(used)), np.int32)
    for i, n in enumerate(used):
        tables[i, :n] = order[sum(used[:i]) : sum(used[: i + 1])]
    starts = np.cumsum([0, *(rows for rows, _ in sequences)])
    query = random(1, (int(starts[-1]), q_heads, d), jnp.bfloat16 if dtype in FP8 else dtype)
    cache = random(2, (sum(used), page_size, 2 * kv_heads, d), dtype)
    lens = [keys for _, keys in sequences]
    return (query, cache, *(jnp.asarray(x, jnp.int32) for x in (lens, tables, starts, [len(lens)])))


def gathered_attention(query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, *, scale, longest):
    """Attention without a kernel: gather all pages, pad the queries, mask, softmax."""
    slots, (_, q_heads, d) = len(context_lens), query.shape
    group = q_heads // (kv_cache.shape[2] // 2)
    stored = kv_cache[block_tables].reshape(slots, -1, kv_cache.shape[2], d)
    k, v = stored[:, :, 0::2], stored[:, :, 1::2]
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    row = starts[:, None] + jnp.arange(longest)
    q = query[jnp.clip(row, 0, len(query) - 1)].reshape(slots, longest, -1, group, d)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32) * scale
    position = context_lens[:, None] - (ends - starts)[:, None] + jnp.arange(longest)
    visible = jnp.arange(k.shape[1]) <= position[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1).astype(v.dtype)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(slots, longest, q_heads, d)
    valid = (row < ends[:, None]) & (jnp.arange(slots) < num_seqs[0])[:, None]
    return jnp.zeros_like(query).at[jnp.where(valid, row, len(query))].set(out, mode="drop")


FP8 = ("float8_e4m3fn", "float8_e5m2")
CASES = {
    **{f"prefill 2k {d}": functools.partial(prefill, d, False) for d in ("float32", "bfloat16", "float16")},
    **{f"prefill 2k causal {d}": functools.partial(prefill, d, True) for d in ("float32", "bfloat16", "float16")},
    **{f"training 2 x 1k {d}": functools.partial(training, d) for d in ("float32", "bfloat16")},
    **{
        f"training 4 x 512 d64 {d}": functools.partial(training, d, seqs=4, rows=512, d=64)
        for d in ("float32", "bfloat16")
    },
    **{f"decode 8 x 2k {d}": functools.partial(decode, d) for d in ("float32", "bfloat16", "float16", *FP8)},
    **{f"ragged paged {d}": functools.partial(ragged, d) for d in ("float32", "bfloat16")},
}


def main(*words):
    """Run the cases whose name contains one of `words`, or all."""
    import torch

    torch.set_num_threads(os.cpu_count())
    print(f"{os.cpu_count()} threads, torch {torch.__version__}, jax {jax.__version__}")
    for name, prepare in CASES.items():
        if words and not any(word in name for word in words):
            continue
        implementations, rate = prepare()
        times = medians(implementations)
        reader = times.pop(READER, None)
        others = [seconds for implementation, seconds in times.items() if implementation != "ours"]
        ratio = f" | ours {min(others) / times['ours']:.2f}x" if others else ""
        if reader is not None:
            ratio += f" | {reader / times['ours']:.2f} of the reader's {rate(reader).strip()}"
        shown = (
            f"{implementation} {seconds * 1e3:8.2f} ms {rate(seconds)}" for implementation, seconds in times.items()
        )
        print(f"{name:28} | " + " | ".join(shown) + ratio, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
