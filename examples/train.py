"""Train a small transformer on this repository's own documentation, with our attention and with plain attention.

    python examples/train.py
    python examples/train.py --steps 400 --dtype bfloat16 --json docs/train.json
    python examples/train.py --platform cuda --attention flash
    python examples/train.py --mesh 4 --strategy ring

Both runs start from the same weights and see the same batches, so that their losses have to agree. A batch is a row of
tokens in which pieces of text of various lengths are packed: `flash_attn_varlen` gets their starts in ``cu_seqlens``;
plain attention computes the scores of all pairs of tokens and masks those of different pieces. With ``--mesh N`` the
run with our attention spreads the tokens of a batch over N devices; without GPUs these are N devices of the CPU.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
BYTES = 256  # a token is a byte of the text
LAYERS, WIDTH, Q_HEADS, KV_HEADS, HEAD_DIM = 4, 192, 6, 2, 32
LONGEST_PIECE = 384
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

Weights = dict[str, Any]
Attention = Callable[..., jax.Array]


def read_text() -> np.ndarray:
    """The documentation as bytes."""
    paths = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    return np.frombuffer(b"\n".join(path.read_bytes() for path in paths), np.uint8)


def batches(text: np.ndarray, tokens: int, seed: int, multiple: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Rows of `tokens` tokens, their successors and positions, and ``cu_seqlens``, from random pieces of the text.

    The lengths of the pieces are multiples of `multiple`.
    """
    rng = np.random.default_rng(seed)
    pieces = tokens // (LONGEST_PIECE // 8)
    while True:
        lengths = rng.integers(LONGEST_PIECE // 8, LONGEST_PIECE, pieces)
        lengths -= lengths % multiple
        # Sequences after the last that fits are empty, so that cu_seqlens has one shape.
        ends = np.minimum(np.cumsum(lengths), tokens)
        starts = np.concatenate([[0], ends[:-1], [tokens]])
        places = rng.integers(0, len(text) - tokens, len(starts) - 1)
        positions = np.concatenate([np.arange(n) for n in np.diff(starts)])
        at = np.repeat(places, np.diff(starts)) + positions
        yield tuple(x.astype(np.int32) for x in (text[at], text[at + 1], positions, starts))


def initial_weights(key: jax.Array) -> Weights:
    """f32 weights of a decoder with RMSNorm, RoPE and a gated MLP."""
    shapes = {
        "wq": (WIDTH, Q_HEADS * HEAD_DIM),
        "wk": (WIDTH, KV_HEADS * HEAD_DIM),
        "wv": (WIDTH, KV_HEADS * HEAD_DIM),
        "wo": (Q_HEADS * HEAD_DIM, WIDTH),
        "gate": (WIDTH, 3 * WIDTH),
        "up": (WIDTH, 3 * WIDTH),
        "down": (3 * WIDTH, WIDTH),
    }
    keys = iter(jax.random.split(key, 1 + LAYERS * len(shapes)))

    def layer() -> Weights:
        matrices = {n: jax.random.normal(next(keys), shape) * shape[0] ** -0.5 for n, shape in shapes.items()}
        return {**matrices, "attention_norm": jnp.ones(WIDTH), "mlp_norm": jnp.ones(WIDTH)}

    embedding = 0.02 * jax.random.normal(next(keys), (BYTES, WIDTH))
    return {"embedding": embedding, "layers": [layer() for _ in range(LAYERS)], "norm": jnp.ones(WIDTH)}


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
    """Attention without our kernels: the scores of all pairs, and a mask."""
    piece = jnp.searchsorted(cu_seqlens, jnp.arange(len(q)), side="right")
    k, v = (jnp.repeat(x, Q_HEADS // KV_HEADS, 1) for x in (k, v))
    scores = jnp.einsum("ihd,jhd->hij", q, k).astype(jnp.float32) * HEAD_DIM**-0.5
    mask = (piece[:, None] == piece[None]) & (jnp.arange(len(q))[:, None] >= jnp.arange(len(q)))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hij,jhd->ihd", weights.astype(v.dtype), v)


def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
    """Attention with our kernels, forward and backward."""
    from xla_attention.jax import flash_attn_varlen

    return flash_attn_varlen(q, k, v, cu_seqlens, causal=True, max_seqlen_q=LONGEST_PIECE, max_seqlen_k=LONGEST_PIECE)


ATTENTIONS: dict[str, Attention] = {"flash": flash_attention, "plain": plain_attention}


class ContextParallel:
    """Attention with our kernels over several devices, each of which has a part of the tokens of every piece."""

    def __init__(self, devices: int, strategy: str) -> None:
        from xla_attention.jax import context_parallel_attention

        if len(jax.devices()) < devices:
            raise SystemExit(f"--mesh {devices} needs {devices} devices, there are {len(jax.devices())}")
        self.mesh = Mesh(np.array(jax.devices()[:devices]), ("cp",))
        # An exchange of rows for heads needs the rows of the stream in order.
        self.layout = "contiguous" if strategy == "all_to_all" else "zigzag"
        rows, whole = PartitionSpec("cp"), PartitionSpec()
        options = {"axis_name": "cp", "strategy": strategy, "layout": self.layout, "max_seqlen": LONGEST_PIECE}
        attend = functools.partial(context_parallel_attention, **options)
        self.attention = jax.shard_map(attend, mesh=self.mesh, in_specs=(rows, rows, rows, whole), out_specs=rows)
        self.rows, self.whole = (NamedSharding(self.mesh, spec) for spec in (rows, whole))

    def spread(self, batch: tuple[np.ndarray, ...]) -> tuple[jax.Array, ...]:
        """The batch on the devices: XLA computes everything but attention on a device's own tokens."""
        from xla_attention.jax import zigzag_order

        *rows, starts = batch
        if self.layout == "zigzag":
            order = zigzag_order(starts, self.mesh.size)
            rows = [x[order] for x in rows]
        return *(jax.device_put(x, self.rows) for x in rows), jax.device_put(starts, self.whole)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Rows of unit mean square, times `scale`."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * scale.astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of ``[T, H, D]``, halves of a head paired."""
    angles = positions[:, None, None] * 10_000.0 ** (-jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def loss_of(weights: Weights, batch: tuple, attention: Attention, dtype: Any) -> jax.Array:
    """Mean cross entropy of the next byte, in nats."""
    tokens, successors, positions, cu_seqlens = batch
    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    x = weights["embedding"][tokens]
    for layer in weights["layers"]:
        h = rms_norm(x, layer["attention_norm"])
        q, k, v = ((h @ layer[name]).reshape(len(x), -1, HEAD_DIM) for name in ("wq", "wk", "wv"))
        attended = attention(rotate(q, positions), rotate(k, positions), v, cu_seqlens)
        x = x + attended.reshape(len(x), -1) @ layer["wo"]
        h = rms_norm(x, layer["mlp_norm"])
        x = x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    logits = (rms_norm(x, weights["norm"]) @ weights["embedding"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, successors).mean()


def train(name: str, text: np.ndarray, options: argparse.Namespace) -> dict[str, Any]:
    """The loss of every step, and the time per step."""
    optimizer = optax.adamw(optax.cosine_decay_schedule(options.rate, options.steps), weight_decay=0.01)
    weights = initial_weights(jax.random.key(options.seed))
    parallel = ContextParallel(options.mesh, options.strategy) if options.mesh and name == "flash" else None
    state = optimizer.init(weights)
    if parallel:  # placed like a step's results, or the second step would be compiled again
        weights, state = jax.device_put((weights, state), parallel.whole)
    attention = parallel.attention if parallel else ATTENTIONS[name]
    loss = functools.partial(loss_of, attention=attention, dtype=DTYPES[options.dtype])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Weights, state: Any, batch: tuple) -> tuple[Weights, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    losses: list[float] = []
    stream = batches(text, options.tokens, options.seed, 2 * options.mesh if options.mesh else 1)
    stream = map(parallel.spread, stream) if parallel else stream
    began = time.perf_counter()
    with tqdm(total=options.steps, desc=name, unit="step") as bar:
        for index in range(options.steps):
            weights, state, value = step(weights, state, next(stream))
            losses.append(float(value))
            if index == 0:
                began = time.perf_counter()  # the first step compiles
            bar.set_postfix_str(f"loss {losses[-1]:.3f}")
            bar.update()
    seconds = (time.perf_counter() - began) / max(options.steps - 1, 1)
    return {"losses": losses, "ms_per_step": 1e3 * seconds}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--attention", choices=(*ATTENTIONS, "both"), default="both")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per batch")
    parser.add_argument("--rate", type=float, default=3e-3, help="initial learning rate")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of products; weights are float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--platform", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--mesh", type=int, metavar="N", help="spread the tokens of our attention over N devices")
    parser.add_argument(
        "--strategy", choices=("all_gather", "ring", "all_to_all"), default="all_gather", help="of --mesh"
    )
    parser.add_argument("--json", type=Path, help="add the losses to this file, for `make plot`")
    options = parser.parse_args(arguments)
    if options.mesh is not None and (options.mesh < 1 or options.tokens % (2 * options.mesh)):
        parser.error(f"--tokens is {options.tokens}, expected a multiple of twice --mesh, which is {options.mesh}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Train, and print the differences between the two runs."""
    options = parse_arguments(arguments)
    if options.platform != "auto":
        jax.config.update("jax_platforms", options.platform)
    if options.mesh:
        jax.config.update("jax_num_cpu_devices", options.mesh)
    # By default, JAX computes f32 products in TF32 on GPUs; our kernels do not.
    jax.config.update("jax_default_matmul_precision", "highest")
    text = read_text()
    names = list(ATTENTIONS) if options.attention == "both" else [options.attention]
    print(f"{len(text)} bytes of text, {options.steps} steps of {options.tokens} tokens, {options.dtype}, "
          f"{jax.devices()[0].device_kind}")  # fmt: skip
    runs = {name: train(name, text, options) for name in names}
    for name, run in runs.items():
        print(f"{name}: loss {run['losses'][0]:.4f} to {run['losses'][-1]:.4f}, {run['ms_per_step']:.1f} ms per step")
    if len(runs) == 2:
        differences = np.abs(np.subtract(*(run["losses"] for run in runs.values())))
        print(f"the losses differ by at most {differences.max():.2g}, on average by {differences.mean():.2g}")
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        device = f"{jax.devices()[0].device_kind}, {options.dtype}"
        known[device] = {"date": date.today().isoformat(), "tokens": options.tokens, "runs": runs}
        options.json.write_text(json.dumps(known) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
