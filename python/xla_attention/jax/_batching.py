"""Batching rules: ``jax.vmap`` over a call becomes one call with more sequences.

Each of the n calls has B sequences in T packed rows; the one call has n (B + 1) sequences in n T rows. After the B
sequences of each call follows an empty one. It spans the rows between the end of the call's last sequence and the start
of the next call's first, which belong to no sequence, and uses none of them.

JAX's names: ``axis_size`` is n, and ``in_batched`` has a flag per operand: whether it has a leading axis of that size.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._options import kv_layout_number
from ._call import Array
from ._varlen_types import Cotangents, Operands, Options, keys_are_in_pages

_MAX_LENGTH = 2**31 - 1  # as a `seqused`: every row that the sequence has


def with_batching(call: Callable, rule: Callable) -> Callable:
    """Give ``call(static, *operands)``, which returns a tuple of arrays, a batching rule.

    ``rule(static, axis_size, in_batched, operands)`` describes how the calls become one: it returns that call's static
    and operands, and a function that splits its results into those of each call. It returns None where the calls have
    to run one after the other.
    """

    def batched_call(static: Any, *operands: Any) -> tuple[Array, ...]:  # noqa: ANN401
        @jax.custom_batching.custom_vmap
        def with_vmap(*operands: Any) -> tuple[Array, ...]:  # noqa: ANN401
            return call(static, *operands)

        @with_vmap.def_vmap
        def _rule(axis_size: int, in_batched: list, *operands: Any) -> tuple[tuple, tuple]:  # noqa: ANN401
            concatenated = rule(static, axis_size, in_batched, operands)
            if concatenated is None:
                out = _sequential(functools.partial(batched_call, static), tuple(in_batched), operands)
            else:
                concat_static, concat_operands, split_results = concatenated
                out = split_results(*batched_call(concat_static, *concat_operands))
            return out, (True,) * len(out)

        return with_vmap(*operands)

    return batched_call


def _sequential(function: Callable, in_batched: tuple, operands: tuple) -> Any:  # noqa: ANN401
    """`function` of each index of the batched operands, one after the other."""
    arrays, treedef = jax.tree.flatten(operands)
    flags = jax.tree.leaves(in_batched)
    batched = [x for x, is_batched in zip(arrays, flags, strict=True) if is_batched]

    def at_index(slices: list[Array]) -> Any:  # noqa: ANN401
        slices = iter(slices)
        leaves = [next(slices) if is_batched else x for x, is_batched in zip(arrays, flags, strict=True)]
        return function(*treedef.unflatten(leaves))

    return jax.lax.map(at_index, batched)


# ---------- one axis


def batch_at_front(axis_size: int, is_batched: bool | None, array: Array | None) -> Array | None:
    """The array as ``[n, ...]``, broadcast where all calls share it."""
    if array is None or is_batched:
        return array
    return jnp.broadcast_to(array[None], (axis_size, *array.shape))


def concat_rows(array: Array) -> Array:
    """``[n, T, ...]`` as ``[n T, ...]``."""
    return array.reshape(-1, *array.shape[2:])


def split_rows(rows: Array, axis_size: int) -> Array:
    """``[n T, ...]`` as ``[n, T, ...]``."""
    return rows.reshape(axis_size, -1, *rows.shape[1:])


def concat_lse(lse: Array) -> Array:
    """``[n, Hq, T]`` as ``[Hq, n T]``; dense: ``[n, Hq, B, T]`` as ``[Hq, n B, T]``."""
    lse = jnp.moveaxis(lse, 0, 1)
    return lse.reshape(lse.shape[0], -1, *lse.shape[3:])


def split_lse(lse: Array, axis_size: int) -> Array:
    """``[Hq, n T]`` as ``[n, Hq, T]``; dense: ``[Hq, n B, T]`` as ``[n, Hq, B, T]``."""
    return jnp.moveaxis(lse.reshape(lse.shape[0], axis_size, -1, *lse.shape[2:]), 1, 0)


# ---------- metadata


def append_empty_sequence(values: Array) -> Array:
    """``[n, B, ...]`` as ``[n (B + 1), ...]``, with zeros for the empty sequence after those of each call."""
    zeros = jnp.zeros_like(values, shape=(values.shape[0], 1, *values.shape[2:]))
    return concat_rows(jnp.concatenate([values, zeros], 1))


def concat_cu_seqlens(cu_seqlens: Array, total: Any) -> Array:  # noqa: ANN401
    """``[n, B + 1]`` of calls with `total` rows each as ``[n (B + 1) + 1]``.

    The starts of a call are clamped to its own rows, so that a wrong one does not reach the rows of another call.
    """
    n = cu_seqlens.shape[0]
    starts = jnp.clip(cu_seqlens, 0, total) + jnp.arange(n, dtype=jnp.int32)[:, None] * total
    return jnp.concatenate([starts.reshape(-1).astype(jnp.int32), jnp.full((1,), n * total, jnp.int32)])


def concat_block_tables(tables: Array, pages: int) -> Array:
    """``[n, B, M]``, for one cache in which each call has the next `pages` pages. Pages are clamped to the call's."""
    first = jnp.arange(tables.shape[0], dtype=tables.dtype)[:, None, None] * pages
    return jnp.clip(tables, 0, pages - 1) + first


def concat_alibi_slopes(axis_size: int, is_batched: bool, slopes: Array, num_seqs: int) -> Array:
    """Slopes ``[Hq]`` or ``[B, Hq]`` of n calls: ``[Hq]`` where all calls share it, otherwise ``[n (B + 1), Hq]``."""
    if slopes.ndim - int(is_batched) == 1:
        if not is_batched:
            return slopes
        slopes = jnp.repeat(slopes[:, None], num_seqs, 1)
    return append_empty_sequence(batch_at_front(axis_size, is_batched or slopes.ndim == 3, slopes))


def concat_bias(options: Options, axis_size: int, in_batched: Operands, operands: Operands) -> Array:
    """Biases ``[B or 1, ...]`` of n calls as ``[n B, ...]``, or as it is where all sequences of all calls share it."""
    bias, is_batched = operands.bias, bool(in_batched.bias)
    is_shared = bias.shape[int(is_batched)] == 1
    if is_shared and not is_batched:
        return bias
    each = batch_at_front(axis_size, is_batched, bias)
    if options.dense:
        num_seqs = operands.q.shape[int(in_batched.q)]
    else:
        num_seqs = operands.cu_seqlens_q.shape[int(in_batched.cu_seqlens_q)] - 1
    if is_shared:
        each = jnp.broadcast_to(each, (axis_size, num_seqs, *each.shape[2:]))
    return concat_rows(each) if options.dense else append_empty_sequence(each)


# ---------- calls of _varlen


def can_concat(options: Options, in_batched: Operands, operands: Operands) -> bool:
    """Whether n calls can be one: what a call has once for all its sequences has to be the same in all calls."""
    shared = ["sinks", "q_scale", "k_scale", "v_scale"]
    if options.kv_layout == kv_layout_number("stacked"):
        shared.append("k")  # pages are not the leading dimension
    if keys_are_in_pages(options, operands) and operands.cu_seqlens_k.size:
        # Lengths may be differences of cu_seqlens_k, which are no rows here: they cannot be offset and clamped.
        return False
    return not any(getattr(in_batched, name) for name in shared)


def concat_operands(options: Options, axis_size: int, in_batched: Operands, operands: Operands) -> Operands:
    """The operands of n calls as those of one; pages that all calls share are not repeated."""
    in_pages = keys_are_in_pages(options, operands)
    keys_per_call = not in_pages or in_batched.k or in_batched.v
    shared = ("sinks", "q_scale", "k_scale", "v_scale", *(() if keys_per_call else ("k", "v")))
    each = Operands(*(batch_at_front(axis_size, *pair) for pair in zip(in_batched, operands, strict=True)))
    concat = {name: concat_rows(x) for name, x in each._asdict().items() if x is not None}
    concat.update({name: getattr(operands, name) for name in shared if getattr(operands, name) is not None})
    if operands.bias is not None:
        concat["bias"] = concat_bias(options, axis_size, in_batched, operands)
    if options.dense:
        return Operands(**concat)

    def per_sequence(name: str, default: int) -> Array:
        values = getattr(each, name)
        values = jnp.full((axis_size, num_seqs), default, jnp.int32) if values is None else values
        return append_empty_sequence(values)

    num_seqs = each.cu_seqlens_q.shape[1] - 1
    total_q, total_k = operands.q.shape[int(in_batched.q)], operands.k.shape[int(in_batched.k)]
    concat["cu_seqlens_q"] = concat_cu_seqlens(each.cu_seqlens_q, total_q)
    if in_pages:
        tables = concat_block_tables(each.block_table, total_k) if keys_per_call else each.block_table
        concat["cu_seqlens_k"] = jnp.zeros((0,), jnp.int32)
        concat["block_table"] = append_empty_sequence(tables)
    else:
        concat["cu_seqlens_k"] = concat_cu_seqlens(each.cu_seqlens_k, total_k)
    concat["seqused_q"], concat["seqused_k"] = (per_sequence(name, _MAX_LENGTH) for name in ("seqused_q", "seqused_k"))
    for name in ("leftpad_k", "q_offset"):
        if getattr(operands, name) is not None:
            concat[name] = per_sequence(name, 0)
    if operands.alibi_slopes is not None:
        slopes = concat_alibi_slopes(axis_size, in_batched.alibi_slopes, operands.alibi_slopes, num_seqs)
        concat["alibi_slopes"] = slopes
    return Operands(**concat)


def concat_cotangents(axis_size: int, in_batched: Cotangents, cotangents: Cotangents) -> Cotangents:
    """The cotangents of n calls as those of one."""
    dout, out, lse, dlse = (batch_at_front(axis_size, *pair) for pair in zip(in_batched, cotangents, strict=True))
    return Cotangents(concat_rows(dout), concat_rows(out), *(None if x is None else concat_lse(x) for x in (lse, dlse)))
