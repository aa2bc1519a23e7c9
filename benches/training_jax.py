"""Attention forward and backward from JAX beside its peers: `make bench ARGS="training_jax.py word"`.

All is timed as in prefill_jax.py. TFLOP/s counts three and a half times the products of the forward call. The last line
is all of it as JSON.
"""

import json

import jax
import jax.numpy as jnp

from prefill_cases import CASES
from prefill_jax import agreeing, calls_of, seconds


def with_gradients(call, shape):
    """A call that gives the gradients of q, k and v for a cotangent."""

    def total(dout, *operands):
        result = call(*operands)
        out = result[0] if isinstance(result, tuple) else result
        return jnp.sum(out.reshape(shape).astype(jnp.float32) * dout.astype(jnp.float32))

    return jax.jit(jax.grad(total, (1, 2, 3)))


def in_a_row(call):
    """The same with all gradients as one array, to be compared."""
    return jax.jit(lambda *operands: jnp.concatenate([x.reshape(-1) for x in call(*operands)]))


def main(only=""):
    """Run the cases over packed keys; a line for each, then the same as JSON."""
    rows = []
    for case in CASES:
        if only not in case.name or case.page_size or case.window >= 0 or case.fp8:
            continue
        calls, operands = calls_of(case)
        shape = (sum(case.q_lens), case.q_heads, case.value_dim)
        dout = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        calls = {name: with_gradients(call, shape) for name, call in calls.items()}
        operands = [dout, *operands]
        agreed = agreeing({name: in_a_row(call) for name, call in calls.items()}, operands)
        times = seconds({name: calls[name] for name in agreed}, operands)
        rates = {name: 3.5 * case.flops() / taken / 1e12 for name, taken in times.items()}
        ratios = "".join(f", {rates['ours'] / rate:.2f}x {name}" for name, rate in rates.items() if name != "ours")
        print(f"{case.name:32}" + "".join(f" | {name} {rate:.0f}" for name, rate in rates.items()) + ratios, flush=True)
        rows.append({"case": case.name, "tflops": rates})
    print(json.dumps({"gpu": jax.devices("gpu")[0].device_kind, "jax": jax.__version__, "rows": rows}))
