"""The output dtype and the workspace of attention calls."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _library
from ._call import Array, custom_call


def output_dtype(query: Any, out_dtype: Any) -> np.dtype:  # noqa: ANN401
    """The dtype of `out`: `out_dtype` if it is given, otherwise the query's, and bf16 for fp8 queries."""
    if out_dtype is not None:
        return jnp.dtype(out_dtype)
    return jnp.dtype(jnp.bfloat16) if jnp.dtype(query).itemsize == 1 else jnp.dtype(query)


def with_workspace(
    target: str,
    operands: Sequence[Array | None],
    results: Sequence[jax.ShapeDtypeStruct | None],
    attributes: Mapping[str, np.generic],
    *,
    kv_heads: int,
    num_seqs: Any,  # noqa: ANN401
    after_workspace: Sequence[jax.ShapeDtypeStruct | None] = (),
    bias: _library.BiasSizes | None = None,
) -> list[Array]:
    """Emit an attention call with a workspace after `results`; returns the other results that are not None.

    ``operands[0]`` is ``[T, Hq, D]``, ``results[0]`` ``[T, Hq, Dv]``; T and `num_seqs` may be symbolic.

    The CPU does not use the workspace, but a call is traced before its platform is known. There XLA reserves the memory
    and nothing touches it, which costs neither time nor resident memory. Platform-dependent lowering would avoid it,
    but puts a ``case`` around every call in StableHLO, in JAX 0.5 with the calls of all platforms.
    """
    size = 0
    query, out = operands[0], results[0]
    static = (*query.shape[1:2], kv_heads, *query.shape[2:], out.shape[-1])
    if query.ndim == 3 and all(isinstance(n, int) for n in static):
        options = (query.dtype, bool(attributes["batch_invariant"]))
        size = _library.workspace(target, *static, *options, query.shape[0], num_seqs, bias)
    workspace = None if isinstance(size, int) and size == 0 else jax.ShapeDtypeStruct((size,), jnp.uint8)
    arrays = custom_call(target, operands, [*results, workspace, *after_workspace], attributes)
    given = [*results, None, *after_workspace]
    return [array for array, result in zip(arrays, given, strict=False) if result is not None]
