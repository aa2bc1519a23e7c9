"""simple_add in JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._call import Array, custom_call
from ._fold import each_call, with_vmap
from ._partition import Letters, partitioned


def simple_add(a: Array, b: Array) -> Array:
    """Add two arrays of equal shape and dtype, without broadcasting; differentiable any number of times.

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
        Shapes or dtypes differ, or no kernel takes the dtype.

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
    return _add(None, a, b)[0]


def _simple_add_jvp(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Any]:
    out = _simple_add(*primals)
    if not jnp.issubdtype(out.dtype, jnp.inexact):
        return out, np.zeros(out.shape, jax.dtypes.float0)
    # jax.numpy's addition, of which JAX knows the transpose.
    return out, jnp.add(*tangents)


_simple_add.__wrapped__.defjvp(_simple_add_jvp)


def _run(_: None, a: Array, b: Array) -> tuple[Array]:
    out = jax.ShapeDtypeStruct(a.shape, a.dtype)
    return tuple(custom_call("xla_gpu_simple_add", [a, b], [out], {}))


def _letters(_: None, a: Array, _b: Array) -> Letters:
    word = tuple(range(a.ndim))
    return Letters((word, word), (word,), free=word)


def _folded(_: None, size: int, which: list[bool], operands: tuple[Array, Array]) -> tuple:
    return None, [each_call(size, *pair) for pair in zip(which, operands, strict=True)], lambda *found: found


_add = with_vmap(partitioned(_run, _letters), _folded)
