"""What the attention functions share: the output's dtype and the workspace."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _library
from ._call import Array, custom_call


def output_dtype(query: Any, asked: Any) -> np.dtype:  # noqa: ANN401
    """The dtype of `out`: the query's, and bf16 for fp8 queries, unless the caller asks for another."""
    if asked is not None:
        return jnp.dtype(asked)
    return jnp.dtype(jnp.bfloat16) if jnp.dtype(query).itemsize == 1 else jnp.dtype(query)


def refuse_dropout(function: str, name: str, rate: Any) -> None:  # noqa: ANN401
    """No kernel drops weights out; a rate of 0 does not ask for it."""
    if isinstance(rate, jax.core.Tracer) or rate != 0:
        raise NotImplementedError(f"{function}: there is no dropout; {name} is {rate}, expected 0")


def with_workspace(
    target: str,
    operands: Sequence[Array | None],
    results: Sequence[jax.ShapeDtypeStruct | None],
    attributes: Mapping[str, np.generic],
    *,
    kv_heads: int,
    num_seqs: Any,  # noqa: ANN401
) -> list[Array]:
    """The results asked for, of an attention call that also has a workspace of the wanted size.

    ``operands[0]`` is ``[T, Hq, D]``, ``results[0]`` ``[T, Hq, Dv]``; T and `num_seqs` may be symbolic.

    The CPU does not use the workspace, but a call is traced before its platform is known. There the memory is reserved
    and never touched, which costs neither time nor resident memory. Lowering for each platform would save it at the
    price of a ``case`` around every call in StableHLO, in JAX 0.5 with the calls of all platforms.
    """
    size = 0
    query, out = operands[0], results[0]
    static = (*query.shape[1:2], kv_heads, *query.shape[2:], out.shape[-1])
    if query.ndim == 3 and all(isinstance(n, int) for n in static):
        options = (query.dtype, bool(attributes["batch_invariant"]))
        size = _library.workspace(target, *static, *options, query.shape[0], num_seqs)
    workspace = None if isinstance(size, int) and size == 0 else jax.ShapeDtypeStruct((size,), jnp.uint8)
    found = custom_call(target, operands, [*results, workspace], attributes)
    return [array for array, asked in zip(found, results, strict=False) if asked is not None]
