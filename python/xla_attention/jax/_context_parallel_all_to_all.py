"""Context-parallel attention by exchanging rows for heads: each device attends with all rows of its share of the heads.

This is the strategy of DeepSpeed Ulysses (Jacobs et al., 2023). Between the exchanges the call is that of one device,
so that JAX differentiates the whole.
"""

import functools

import jax
import jax.numpy as jnp

from ._call import Array
from ._context_parallel_steps import Config
from ._flash_attn_varlen import attend
from ._varlen_types import Operands


def attend_by_heads(config: Config, operands: Operands) -> tuple[Array, Array]:
    """The output and the log-sum-exp."""
    axis, n = config.axis_name, config.num_devices
    kv_heads = operands.k.shape[1]
    k, v = operands.k, operands.v
    if kv_heads % n:
        k, v = (_repeat_heads(n // kv_heads, x) for x in (k, v))
    q, k, v = (jax.lax.all_to_all(x, axis, 1, 0, tiled=True) for x in (operands.q, k, v))

    def own_heads(values: Array | None) -> Array | None:
        if values is None:
            return None
        index = jax.lax.axis_index(axis)
        return jax.lax.dynamic_slice_in_dim(values, index * q.shape[1], q.shape[1], axis=values.ndim - 1)

    by_heads = operands._replace(
        q=q, k=k, v=v, alibi_slopes=own_heads(operands.alibi_slopes), sinks=own_heads(operands.sinks)
    )
    out, lse = attend(config.options, by_heads, return_lse=True)
    return jax.lax.all_to_all(out, axis, 0, 1, tiled=True), jax.lax.all_to_all(lse, axis, 1, 0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _repeat_heads(repeats: int, array: Array) -> Array:
    """KV heads for more devices than there are heads; the gradients of the copies are summed in f32."""
    return jnp.repeat(array, repeats, axis=1)


def _repeat_heads_fwd(repeats: int, array: Array) -> tuple[Array, None]:
    return _repeat_heads(repeats, array), None


def _repeat_heads_bwd(repeats: int, _residuals: None, gradient: Array) -> tuple[Array]:
    rows, heads, dim = gradient.shape
    copies = gradient.astype(jnp.float32).reshape(rows, heads // repeats, repeats, dim)
    return (copies.sum(axis=2).astype(gradient.dtype),)


_repeat_heads.defvjp(_repeat_heads_fwd, _repeat_heads_bwd)
