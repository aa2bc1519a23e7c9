"""simple_add in JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._batching import batch_at_front, with_batching
from ._call import Array, custom_call
from ._sharding import ShardingRule, partitioned


def simple_add(a: Array, b: Array) -> Array:
    """Add two arrays of equal shape and dtype, without broadcasting; differentiable any number of times.

    ``docs/semantics.md#simple_add`` defines the result.

    Parameters
    ----------
    a, b : Array
        Any shape; f16, bf16, f32, f64, i8, u8, i32 or i64, the same for both.

    Returns
    -------
    Array
        ``a + b``, of their shape and dtype. Integers wrap.

    Raises
    ------
    ValueError
        Shapes or dtypes differ, or there is no kernel for the dtype.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from xla_attention.jax import simple_add
    >>> simple_add(jnp.arange(3.0), jnp.ones(3)).tolist()
    [1.0, 2.0, 3.0]
    """
    return _simple_add(jnp.asarray(a), jnp.asarray(b))


@jax.jit
@jax.custom_jvp
def _simple_add(a: Array, b: Array) -> Array:
    return _add_call(None, a, b)[0]


def _simple_add_jvp(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Any]:
    out = _simple_add(*primals)
    if not jnp.issubdtype(out.dtype, jnp.inexact):
        return out, np.zeros(out.shape, jax.dtypes.float0)
    # jnp.add, because JAX knows its transpose.
    return out, jnp.add(*tangents)


_simple_add.__wrapped__.defjvp(_simple_add_jvp)


def _ffi_call(_: None, a: Array, b: Array) -> tuple[Array]:
    out = jax.ShapeDtypeStruct(a.shape, a.dtype)
    return tuple(custom_call("xla_gpu_simple_add", [a, b], [out], {}))


def _sharding_rule(_: None, a: Array, _b: Array) -> ShardingRule:
    dims = tuple(range(a.ndim))
    return ShardingRule((dims, dims), (dims,), free=dims)


def _batching_rule(_: None, axis_size: int, in_batched: list[bool], operands: tuple[Array, Array]) -> tuple:
    operands = [batch_at_front(axis_size, *pair) for pair in zip(in_batched, operands, strict=True)]
    return None, operands, lambda out: (out,)


_add_call = with_batching(partitioned("xla_gpu_simple_add", _ffi_call, _sharding_rule), _batching_rule)
