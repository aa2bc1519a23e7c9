"""Context parallelism over all GPUs of this machine: `make bench ARGS="context_parallel.py word ..."`.

Each case runs on one GPU, on every GPU at the same time as a whole, and by every strategy that computes it, on all
together. Efficiency is the time on one GPU, divided by the number of GPUs, relative to the time on all; a second figure
takes the time on every GPU instead, which is that of the slowest and has no communication. A peer is JAX's own
attention with q, k and v sharded by rows, whose collectives XLA chooses. Results are compared with those of one GPU
before anything is timed. Timing is that of prefill_jax.py, with fewer calls per round where they are long. The last
line has all results as JSON. The word "tiny" shrinks the cases, for a run on CPU devices.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xla_attention.jax as xa
from peers import report_failure
from prefill_jax import relative_error, seconds

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 64
TOLERANCE = 2e-2
AXIS = "cp"
ROUND_SECONDS = 0.3
LAYERS = 10  # calls in a program of a decode case, whose times are of one
ONE, EVERY = "one GPU", "every GPU"
STRATEGIES = [("ring", "zigzag"), ("ring", "contiguous"), ("all_gather", "zigzag"), ("all_to_all", "contiguous")]
K = 1024


@dataclasses.dataclass
class Case:
    """Packed sequences under a causal mask, forward or forward and backward."""

    name: str
    lens: list[int]
    window: int | None = None

    def starts(self):
        """cu_seqlens."""
        return np.concatenate([[0], np.cumsum(self.lens)]).astype(np.int32)

    def operands(self):
        """A cotangent of the output, then q, k and v, in the order of the stream."""
        total, heads = sum(self.lens), (Q_HEADS, Q_HEADS, KV_HEADS, KV_HEADS)
        return [jax.random.normal(jax.random.key(i), (total, h, HEAD_DIM), jnp.bfloat16) for i, h in enumerate(heads)]

    def options(self):
        """The mask."""
        return {"causal": True} | ({} if self.window is None else {"window": (self.window, 0)})


@dataclasses.dataclass
class Decode:
    """A query per sequence over a paged cache."""

    name: str
    seqs: int
    length: int


CASES = [Case(f"{n // K}k", [n]) for n in (8 * K, 16 * K, 32 * K, 64 * K, 128 * K)]
CASES += [
    Case("mixed 64k", [32 * K] + [8 * K] * 2 + [2 * K] * 8),
    Case("16 x 4k", [4 * K] * 16),
    Case("window 64k", [64 * K], window=4096),
]
DECODES = [Decode("decode 64 x 8k", 64, 8 * K), Decode("decode 4 x 128k", 4, 128 * K)]


class Call(NamedTuple):
    """A function, its operands, and the order that puts the rows of its results into that of the stream."""

    function: Callable
    operands: Sequence[Any]
    inverse: np.ndarray | None = None

    def gradients(self, dout):
        """The same forward and backward."""

        def both(dout, *operands):
            return jax.vjp(self.function, *operands)[1](dout)

        return self._replace(function=both, operands=[dout, *self.operands])


def on_mesh(mesh, strategy, layout, case):
    """Our attention over all devices."""
    attend = functools.partial(
        xa.context_parallel_attention, axis_name=AXIS, strategy=strategy, layout=layout, **case.options()
    )
    specs = P(AXIS), P(AXIS), P(AXIS), P()
    attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P(AXIS))
    return lambda q, k, v: attend(q, k, v, jnp.asarray(case.starts()))


def attention_of_jax(case):
    """JAX's attention over a batch of sequences of one length; None where lengths differ."""
    if len(set(case.lens)) > 1:
        return None
    window = {} if case.window is None else {"local_window_size": (case.window, 0)}
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation, **window)
    shape = (len(case.lens), case.lens[0])
    return lambda *operands: attend(*(x.reshape(*shape, *x.shape[1:]) for x in operands)).reshape(operands[0].shape)


def calls_of(case, mesh):
    """The forward calls by name, and the cotangent of each call's output."""
    operands, starts = case.operands(), jnp.asarray(case.starts())
    one = functools.partial(xa.flash_attn_varlen, cu_seqlens_q=starts, max_seqlen_q=max(case.lens), **case.options())
    rows = NamedSharding(mesh, P(AXIS))
    spread = [jax.device_put(x, rows) for x in operands]
    calls, douts = {ONE: Call(one, operands[1:])}, {ONE: operands[0]}

    def add(name, function, placed, inverse=None):
        calls[name], douts[name] = Call(function, placed[1:], inverse), placed[0]

    for strategy, layout in STRATEGIES:
        order = xa.zigzag_order(case.starts(), mesh.size) if layout == "zigzag" else None
        inverse = xa.inverse_zigzag_order(case.starts(), mesh.size) if layout == "zigzag" else None
        placed = spread if order is None else [jax.device_put(x[order], rows) for x in operands]
        add(f"{strategy} {layout}", on_mesh(mesh, strategy, layout, case), placed, inverse)
    if (attend := attention_of_jax(case)) is not None:
        add("jax.nn, rows sharded", attend, spread)
    return calls, douts


def compiled(call):
    """The program of a call."""
    return jax.jit(call.function).lower(*call.operands).compile()


def agreeing(calls):
    """The jitted calls that run and agree with one GPU."""
    kept, expected = {}, None
    with ThreadPoolExecutor() as pool:
        programs = {name: pool.submit(compiled, call) for name, call in calls.items()}
    for name, (_, operands, inverse) in calls.items():
        try:
            call = programs[name].result()
            results = jax.block_until_ready(call(*operands))
        except Exception as error:
            report_failure(name, error)
            continue
        results = jax.tree.map(lambda x, order=inverse: np.asarray(x if order is None else x[order]), results)
        expected = results if expected is None else expected
        error = float(relative_error(results, expected))
        if error > TOLERANCE:
            print(f"  {name} differs from one GPU by {error:.1e} and is not timed", flush=True)
            continue
        kept[name] = functools.partial(call, *operands)
    kept[EVERY] = on_every_device(calls[ONE])
    return kept


def on_every_device(call):
    """A function that makes the whole call on every device."""
    programs = []
    for device in jax.devices():
        operands = [jax.device_put(x, device) for x in call.operands]
        programs.append(functools.partial(compiled(call._replace(operands=operands)), *operands))
    return lambda: [program() for program in programs]


def decode_calls(case, mesh):
    """A decode step on one device, with heads over all devices, and with pages over all devices."""
    pages = case.seqs * case.length // PAGE_SIZE
    cache = jax.random.normal(jax.random.key(0), (pages, PAGE_SIZE, 2 * KV_HEADS, HEAD_DIM), jnp.bfloat16)
    query = jax.random.normal(jax.random.key(1), (case.seqs, Q_HEADS, HEAD_DIM), jnp.bfloat16)
    order = np.random.default_rng(0).permutation(pages).reshape(case.seqs, -1).astype(np.int32)
    lens, starts = np.full(case.seqs, case.length, np.int32), np.arange(case.seqs + 1, dtype=np.int32)
    tables, of_devices = xa.context_parallel_block_tables(order, lens, page_size=PAGE_SIZE, num_devices=mesh.size)
    options = {"axis_name": AXIS, "scale": HEAD_DIM**-0.5}

    def one(query, cache, tables):
        return xa.paged_attention(query, cache, lens, tables, starts, case.seqs, scale=HEAD_DIM**-0.5)

    def layers(attend):
        """Several calls in one program, as in a model, each after the one before it, on whose output it depends."""

        def run(query, cache, tables):
            for _ in range(LAYERS):
                out = attend(query, cache, tables)
                # Not `query.at[:, :heads].add`: where that is all of it, XLA's compiler in JAX 0.11 ends the process.
                query += 0 * jnp.tile(out, (1, query.shape[1] // out.shape[1], 1))
            return out

        return run

    def cut(scatter_heads):
        def attend(query, cache, tables):
            return xa.context_parallel_paged_attention(
                query, cache, lens, tables[0], starts, case.seqs, scatter_heads=scatter_heads, **options
            )

        specs = P(), P(AXIS), P(AXIS)
        return jax.shard_map(
            layers(attend),
            mesh=mesh,
            in_specs=specs,
            out_specs=P(None, AXIS) if scatter_heads else P(),
            check_vma=False,
        )

    spread = query, *(jax.device_put(x, NamedSharding(mesh, P(AXIS))) for x in (cache[of_devices.reshape(-1)], tables))
    order = jnp.asarray(order)
    specs = P(None, AXIS), P(None, None, AXIS)
    by_heads = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((query, cache), specs, strict=True)]
    return {
        ONE: Call(layers(one), (query, cache, order)),
        "heads cut": Call(layers(one), (*by_heads, order)),
        "pages cut, heads scattered": Call(cut(True), spread),
        "pages cut, all heads": Call(cut(False), spread),
    }


def report(name, calls, count, layers=1):
    """Time the calls of so many layers and print a line, of one layer."""
    times = {call: taken / layers for call, taken in seconds(calls, (), ROUND_SECONDS).items()}
    text = f"{name:20}"
    for call, taken in times.items():
        shares = (
            "" if call in (ONE, EVERY) else f" ({times[ONE] / count / taken:.2f}, {times[EVERY] / count / taken:.2f})"
        )
        text += f" | {call} {1e3 * taken:.3f} ms{shares}"
    print(text, flush=True)
    return {"case": name, "milliseconds": {call: 1e3 * taken for call, taken in times.items()}}


def shrunk(case):
    """The case for CPU devices."""
    if isinstance(case, Decode):
        return dataclasses.replace(case, seqs=4, length=4 * PAGE_SIZE)
    window = None if case.window is None else 16
    return dataclasses.replace(case, lens=[max(n // 512, 16) for n in case.lens], window=window)


def main(*words):
    """Run the cases with one of the words in their name; prints a line per case, then JSON."""
    tiny, words = "tiny" in words, [word for word in words if word != "tiny"]
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    if mesh.size < 2:
        sys.exit("context_parallel.py needs at least two devices")
    rows = []
    for case in CASES + DECODES:
        if words and not any(word in case.name for word in words):
            continue
        case = shrunk(case) if tiny else case
        if isinstance(case, Decode):
            rows.append(report(case.name, agreeing(decode_calls(case, mesh)), mesh.size, LAYERS))
            continue
        calls, douts = calls_of(case, mesh)
        rows.append(report(f"{case.name} forward", agreeing(calls), mesh.size))
        calls = {name: call.gradients(douts[name]) for name, call in calls.items()}
        rows.append(report(f"{case.name} forward + backward", agreeing(calls), mesh.size))
    device = jax.devices()[0].device_kind
    print(json.dumps({"device": device, "devices": mesh.size, "jax": jax.__version__, "rows": rows}))
