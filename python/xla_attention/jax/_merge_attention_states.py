"""merge_attention_states in JAX."""

import jax
import jax.numpy as jnp

from .._documentation import documented
from ._batching import batch_at_front, concat_lse, concat_rows, split_lse, split_rows, with_batching
from ._call import Array, custom_call
from ._no_gradient import without_gradient
from ._sharding import ShardingRule, partitioned


@documented("xla_gpu_merge_attention_states")
def merge_attention_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Merge the attention of the same queries over two disjoint sets of keys into that over both.

    Attention over a long context can be computed in parts, on several devices or with a prefix that many requests
    share. Each part gives an output and the log-sum-exp of its scores; merging them gives attention over all keys. More
    than two parts are merged one after the other, in any order. ``docs/semantics.md#merge_attention_states`` defines
    the result.

    Parameters
    ----------
    out_a : Array
    out_b : Array
    lse_a : Array
    lse_b : Array

    Returns
    -------
    out : Array
        ``[n, h, d]``, of the parts' dtype; 0 where neither part attended to a key.
    lse : Array
        ``f32[h, n]``; -inf where neither part attended to a key.

    Raises
    ------
    ValueError
        Shapes or dtypes do not fit together; the text names the operand.

    Notes
    -----
    ``lse = log(exp(lse_a) + exp(lse_b))`` and ``out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b``, in f32
    without overflow. An attention sink belongs to exactly one of the parts.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from xla_attention.jax import merge_attention_states
    >>> ones, even = jnp.ones((3, 2, 64)), jnp.zeros((2, 3))
    >>> out, lse = merge_attention_states(ones, even, 3 * ones, even.at[1].set(-jnp.inf))
    >>> out[0, :, 0].tolist(), jnp.exp(lse[:, 0]).tolist()
    ([2.0, 1.0], [2.0, 1.0])
    """
    return _merge(*map(jnp.asarray, (out_a, lse_a, out_b, lse_b)))


@jax.jit
@without_gradient("merge_attention_states", "its formula in jax.numpy, in the Notes of its documentation, has one")
def _merge(*operands: Array) -> tuple[Array, Array]:
    return _merge_call(None, *operands)


def _ffi_call(_: None, out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    results = [jax.ShapeDtypeStruct(out_a.shape, out_a.dtype), jax.ShapeDtypeStruct(lse_a.shape, jnp.float32)]
    out, lse = custom_call("xla_gpu_merge_attention_states", [out_a, lse_a, out_b, lse_b], results, {})
    return out, lse


def _sharding_rule(*_: object) -> ShardingRule:
    return ShardingRule(("tHd", "Ht") * 2, ("tHd", "Ht"), free="td")


def _batching_rule(_: None, axis_size: int, in_batched: list[bool], operands: tuple[Array, ...]) -> tuple:
    out_a, lse_a, out_b, lse_b = (batch_at_front(axis_size, *pair) for pair in zip(in_batched, operands, strict=True))
    operands = concat_rows(out_a), concat_lse(lse_a), concat_rows(out_b), concat_lse(lse_b)
    return None, operands, lambda out, lse: (split_rows(out, axis_size), split_lse(lse, axis_size))


_merge_call = with_batching(partitioned("xla_gpu_merge_attention_states", _ffi_call, _sharding_rule), _batching_rule)
