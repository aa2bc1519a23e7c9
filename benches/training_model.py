"""Training steps of a decoder with a billion random weights, with our attention and the peers' of prefill_jax.py.

`make bench ARGS="training_model.py word ..."` runs the shapes with one of the words in their name. A step is forward,
backward and AdamW over 16384 random tokens in sequences of one length, with products in bf16, weights and moments in
f32. The losses of the first step are compared; then steps are timed in interleaved rounds. The last line has all
results as JSON.
"""

import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import optax

from peers import report_failure
from prefill_cases import Case
from prefill_jax import attentions, first, starts_of

LAYERS, WIDTH, HIDDEN, VOCABULARY = 16, 2048, 8192, 32768
ROUNDS, STEPS = 3, 4


def shape(q_heads, kv_heads, head_dim, length):
    """16384 tokens in causal sequences of one length."""
    lens = [length] * (16384 // length)
    return Case(f"{q_heads}/{kv_heads} heads of {head_dim}, {length}", lens, lens, q_heads, kv_heads, head_dim)


SHAPES = [shape(16, 16, 128, 4096), shape(32, 8, 64, 4096), shape(16, 16, 128, 16384)]


def initial_weights(case):
    """Weights of a decoder with RMSNorm, RoPE, a gated MLP and tied embeddings; matrices of all layers are stacked."""
    queries, keys = case.q_heads * case.head_dim, case.kv_heads * case.head_dim
    shapes = {"q": (WIDTH, queries), "k": (WIDTH, keys), "v": (WIDTH, keys), "out": (queries, WIDTH)}
    shapes |= {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    sources = jax.random.split(jax.random.key(0), 1 + len(shapes))
    layers = {
        name: jax.random.normal(source, (LAYERS, *shape)) * shape[0] ** -0.5
        for source, (name, shape) in zip(sources[1:], shapes.items(), strict=True)
    }
    layers |= {name: jnp.ones((LAYERS, WIDTH)) for name in ("attention_norm", "mlp_norm")}
    return {"embedding": 0.02 * jax.random.normal(sources[0], (VOCABULARY, WIDTH)), "layers": layers}


def rms_norm(x, scale):
    """Rows of unit mean square, times `scale`."""
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(squares + 1e-5) * scale).astype(x.dtype)


def rotate(x, positions):
    """Rotary embedding of `[T, H, D]`, halves of a head paired."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 500_000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


def loss_of(weights, tokens, case, attention):
    """Mean cross entropy of the next token."""
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    positions = jnp.arange(len(tokens)) % case.lens[0]

    def layer(x, matrices):
        h = rms_norm(x, matrices["attention_norm"])
        q, k, v = ((h @ matrices[name]).reshape(len(x), -1, case.head_dim) for name in "qkv")
        q, k = (rotate(y, positions).astype(x.dtype) for y in (q, k))
        x = x + first(attention(q, k, v)).reshape(len(x), -1) @ matrices["out"]
        h = rms_norm(x, matrices["mlp_norm"])
        return x + (jax.nn.silu(h @ matrices["gate"]) * (h @ matrices["up"])) @ matrices["down"], None

    x, _ = jax.lax.scan(layer, weights["embedding"][tokens], weights["layers"])
    logits = (rms_norm(x, 1.0) @ weights["embedding"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1)).mean()


def step_of(case, attention, optimizer):
    """A jitted step from weights, state and tokens to weights, state and loss."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, state, tokens):
        loss, gradients = jax.value_and_grad(loss_of)(weights, tokens, case, attention)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, loss

    return step


def measured(case):
    """The time of a step in milliseconds by attention, and the number of weights."""
    optimizer = optax.adamw(1e-4)
    weights = initial_weights(case)
    count = sum(x.size for x in jax.tree.leaves(weights))
    state = optimizer.init(weights)
    tokens = jax.random.randint(jax.random.key(1), (sum(case.lens),), 0, VOCABULARY)
    losses, steps = {}, {}
    for name, attention in attentions(case, *starts_of(case)).items():
        try:
            losses[name] = float(jax.jit(functools.partial(loss_of, case=case, attention=attention))(weights, tokens))
            steps[name] = step_of(case, attention, optimizer).lower(weights, state, tokens).compile()
        except Exception as error:
            report_failure(name, error)
    assert max(losses.values()) - min(losses.values()) < 1e-2, losses
    times = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            weights, state, loss = step(weights, state, tokens)
            jax.block_until_ready(loss)
            start = time.perf_counter()
            for _ in range(STEPS):
                weights, state, loss = step(weights, state, tokens)
            jax.block_until_ready((weights, loss))
            times[name].append((time.perf_counter() - start) / STEPS)
    return {name: 1e3 * statistics.median(taken) for name, taken in times.items()}, count


def main(*only):
    """Run the shapes; prints a line per shape, then JSON."""
    rows = []
    for case in SHAPES:
        if only and not any(word in case.name for word in only):
            continue
        times, count = measured(case)
        rates = {name: 1e3 * sum(case.lens) / taken for name, taken in times.items()}
        line = "".join(f" | {name} {times[name]:.1f} ms, {rate:.0f} tokens/s" for name, rate in rates.items())
        print(f"{case.name}, {count / 1e9:.2f} billion weights{line}", flush=True)
        rows.append({"case": case.name, "weights": count, "tokens_per_second": rates})
    print(json.dumps({"gpu": jax.devices("gpu")[0].device_kind, "jax": jax.__version__, "rows": rows}))
