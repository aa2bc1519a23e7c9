"""Attention forward and backward in JAX against other libraries: `make bench ARGS="training_jax.py word ..."`.

Timing is that of prefill_jax.py. TFLOP/s counts 3.5 times the operations of the forward call. The last line has all
results as JSON.
"""

import jax
import jax.numpy as jnp

from prefill_jax import compare, first, operands_of


def gradients(case, attention):
    """The gradients of q, k and v for a cotangent, which is the first operand."""

    def total(dout, *operands):
        out = first(attention(*operands)).reshape(dout.shape)
        return jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32))

    return jax.grad(total, (1, 2, 3))


def with_cotangent(case):
    """The cotangent, then q, k and v."""
    shape = (sum(case.q_lens), case.q_heads, case.value_dim)
    return [jax.random.normal(jax.random.key(0), shape, jnp.bfloat16), *operands_of(case)]


def main(*only):
    """Run the cases over packed keys."""
    compare(only, gradients, with_cotangent, 3.5)
