"""A layer's ragged_paged_attention_v3 in JAX against ejkernel's kernels on one GPU.

`make bench ARGS="serving_jax.py decode xla"` runs the steps with one of the words in their name, against those of
ejkernel's platforms that are among the words; all without words. Each library updates a donated cache of its own, in
pages of 16 tokens in random order, and attends over it. Results are compared before anything is timed. The last line
has all results as JSON.
"""

import dataclasses
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from peers import available, report_failure
from xla_attention.jax import ragged_paged_attention_v3

PAGE_SIZE, Q_HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128
ROUNDS, CALLS, PAUSE_SECONDS = 7, 10, 0.1
TOLERANCE = 2e-2


@dataclasses.dataclass
class Step:
    """A step of serving: new tokens and tokens in all per sequence, decoding sequences first."""

    name: str
    new: list[int]
    lens: list[int]

    def operands(self):
        """Queries, keys, values, cache, kv_lens, page_indices, cu_q_lens and distribution."""
        tokens, pages = sum(self.new), max(-(-n // PAGE_SIZE) for n in self.lens)
        sources = jax.random.split(jax.random.key(0), 4)
        shapes = [(tokens, heads, HEAD_DIM) for heads in (Q_HEADS, KV_HEADS, KV_HEADS)]
        shapes.append((len(self.lens) * pages, PAGE_SIZE, KV_HEADS, 2, HEAD_DIM))
        arrays = [jax.random.normal(source, shape, jnp.bfloat16) for source, shape in zip(sources, shapes, strict=True)]
        decoding = sum(n == 1 for n in self.new)
        order = np.random.default_rng(0).permutation(len(self.lens) * pages)
        starts, counts = np.concatenate([[0], np.cumsum(self.new)]), [decoding, decoding, len(self.new)]
        return *arrays, *(jnp.asarray(x, jnp.int32) for x in (self.lens, order, starts, counts))


STEPS = [
    Step("decode 8 x 1k", [1] * 8, [1024] * 8),
    Step("decode 64 x 8k", [1] * 64, [8192] * 64),
    Step("mixed 60 x 4k + 4 x 2k", [1] * 60 + [2048] * 4, [4096] * 60 + [2048] * 4),
    Step("chunks 8 x 512 of 8k", [512] * 8, [8192] * 8),
]


def ours(*operands):
    """Our function."""
    return ragged_paged_attention_v3(*operands, sm_scale=HEAD_DIM**-0.5)


def ejkernel(platform, *operands):
    """One of ejkernel's functions, which compute in f32 or bf16 as they choose."""
    from ejkernel.kernels import kernel_registry

    function = kernel_registry.get("ragged_page_attention_v3", platform=platform)
    return function(*operands, softmax_scale=HEAD_DIM**-0.5)


PLATFORMS = ("cuda", "triton", "xla")


def implementations(platforms):
    """Our function and those of ejkernel, by name."""
    peers = {f"ejkernel {name}": functools.partial(ejkernel, name) for name in platforms if available("ejkernel")}
    return {"ours": ours} | peers


def microseconds(step, operands, platforms):
    """The median time of a step per library, measured in interleaved rounds."""
    calls, caches, expected = {}, {}, None
    for name, function in implementations(platforms).items():
        call = jax.jit(function, donate_argnums=3)
        try:
            out, cache = call(*operands[:3], jnp.copy(operands[3]), *operands[4:])
            out = np.asarray(out, np.float32)
        except Exception as error:
            report_failure(name, error)
            continue
        expected = out if expected is None else expected
        error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
        if error > TOLERANCE:
            print(f"{step.name}: {name} differs from ours by {error:.1e} and is not timed", flush=True)
            continue
        calls[name], caches[name] = call, cache
    times = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            jax.block_until_ready(caches[name])
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            for _ in range(CALLS):
                out, caches[name] = call(*operands[:3], caches[name], *operands[4:])
            jax.block_until_ready(out)
            times[name].append((time.perf_counter() - start) / CALLS)
    return {name: 1e6 * statistics.median(taken) for name, taken in times.items()}


def main(*words):
    """Run the steps; prints a line per step, then JSON."""
    rows, platforms = [], [word for word in words if word in PLATFORMS] or PLATFORMS
    names = set(words) - set(PLATFORMS)
    for step in STEPS:
        if names and not any(word in step.name for word in names):
            continue
        times = microseconds(step, step.operands(), platforms)
        print(f"{step.name:24}" + "".join(f" | {name} {taken:.0f} us" for name, taken in times.items()), flush=True)
        rows.append({"step": step.name, "microseconds": times})
    print(json.dumps({"gpu": jax.devices("gpu")[0].device_kind, "jax": jax.__version__, "rows": rows}))
