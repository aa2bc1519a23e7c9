"""merge_attention_states in JAX."""

import jax
import jax.numpy as jnp

from .._documentation import documented
from ._call import Array, custom_call
from ._fold import as_columns, as_rows, each_call, unfolded, unfolded_lse, with_vmap
from ._no_gradient import without_gradient
from ._partition import Letters, partitioned


@documented("xla_gpu_merge_attention_states")
def merge_attention_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Merge the attention of the same queries over two disjoint sets of keys into that over both.

    Attention over a long context can be computed in parts, on several devices or with a part that many requests share:
    each part gives an output and the logarithm of its softmax denominators, and merging these gives what attention over
    all keys would. More than two parts are merged one after the other, in any order.

    Parameters
    ----------
    out_a : Array
    out_b : Array
    lse_a : Array
    lse_b : Array

    Returns
    -------
    out : Array
        ``[n, h, d]``, of the parts' dtype; 0 where neither part saw a key.
    lse : Array
        ``f32[h, n]``; -inf where neither part saw a key.

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
    return _merged(None, *operands)


def _run(_: None, out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    results = [jax.ShapeDtypeStruct(out_a.shape, out_a.dtype), jax.ShapeDtypeStruct(lse_a.shape, jnp.float32)]
    out, lse = custom_call("xla_gpu_merge_attention_states", [out_a, lse_a, out_b, lse_b], results, {})
    return out, lse


def _letters(*_: object) -> Letters:
    return Letters(("tHd", "Ht") * 2, ("tHd", "Ht"), free="td")


def _folded(_: None, size: int, which: list[bool], operands: tuple[Array, ...]) -> tuple:
    out_a, lse_a, out_b, lse_b = (each_call(size, *pair) for pair in zip(which, operands, strict=True))
    together = as_rows(out_a), as_columns(lse_a), as_rows(out_b), as_columns(lse_b)
    return None, together, lambda out, lse: (unfolded(out, size), unfolded_lse(lse, size))


_merged = with_vmap(partitioned(_run, _letters), _folded)
