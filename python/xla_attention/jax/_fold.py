"""Batches of calls: an axis of ``jax.vmap`` becomes more sequences of one call.

Packed calls of B sequences over T rows become one call of n (B + 1) sequences over n T rows. Behind the sequences of
each call stands one more, which reaches to the beginning of the next call's first and uses none of its rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._options import kv_layout_number
from ._call import Array
from ._varlen_types import Cotangents, Operands, Options, keys_are_in_pages

_ALL = 2**31 - 1  # rows of a sequence, however many there are


def is_foldable(options: Options, batched: Operands, operands: Operands) -> bool:
    """What all sequences of a call share is shared by the calls, and pages of n calls can be those of one."""
    shared = ["sinks", "q_scale", "k_scale", "v_scale"]
    if options.kv_layout == kv_layout_number("stacked"):
        shared.append("k")
    if keys_are_in_pages(options, operands) and operands.cu_seqlens_k.size:
        return False  # which tell lengths there, in a way of their own
    return not any(getattr(batched, name) for name in shared)


def one_by_one(function: Callable, batched: tuple, arguments: tuple) -> Any:  # noqa: ANN401
    """`function` of each index of the batched arguments, one after the other."""
    arrays, places = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(batched)
    moving = [x for x, moves in zip(arrays, flags, strict=True) if moves]

    def at(index: list[Array]) -> Any:  # noqa: ANN401
        rest = iter(index)
        return function(*places.unflatten([next(rest) if moves else x for x, moves in zip(arrays, flags, strict=True)]))

    return jax.lax.map(at, moving)


def with_vmap(call: Callable, fold: Callable) -> Callable:
    """`call(static, *operands)`, which returns a tuple of arrays, with a rule for ``jax.vmap``.

    ``fold(static, size, which, operands)``, where `which` operands are batched, says how `size` calls are one: its
    static, its operands, and a function of its results. It returns None where the calls are made one after the other.
    """

    def mapped(static: Any, *operands: Any) -> tuple[Array, ...]:  # noqa: ANN401
        @jax.custom_batching.custom_vmap
        def one(*operands: Any) -> tuple[Array, ...]:  # noqa: ANN401
            return call(static, *operands)

        @one.def_vmap
        def _of_many(size: int, which: list, *operands: Any) -> tuple[tuple, tuple]:  # noqa: ANN401
            folding = fold(static, size, which, operands)
            if folding is None:
                found = one_by_one(functools.partial(mapped, static), tuple(which), operands)
            else:
                of_one, together, unfold = folding
                found = unfold(*mapped(of_one, *together))
            return found, (True,) * len(found)

        return one(*operands)

    return mapped


def unfolded(rows: Array, size: int) -> Array:
    """``[n T, ...]`` as ``[n, T, ...]``."""
    return rows.reshape(size, -1, *rows.shape[1:])


def unfolded_lse(lse: Array, size: int) -> Array:
    """``[Hq, n T]`` as ``[n, Hq, T]``; dense: ``[Hq, n B, T]`` as ``[n, Hq, B, T]``."""
    return jnp.moveaxis(lse.reshape(lse.shape[0], size, -1, *lse.shape[2:]), 1, 0)


def folded_cotangents(size: int, batched: Cotangents, cotangents: Cotangents) -> Cotangents:
    """Of n calls, as those of one."""
    dout, out, lse, dlse = (each_call(size, *pair) for pair in zip(batched, cotangents, strict=True))
    return Cotangents(as_rows(dout), as_rows(out), *(None if x is None else as_columns(x) for x in (lse, dlse)))


def each_call(size: int, batched: bool | None, array: Array | None) -> Array | None:
    """The array of each call: ``[n, ...]``."""
    if array is None or batched:
        return array
    return jnp.broadcast_to(array[None], (size, *array.shape))


def as_rows(array: Array) -> Array:
    return array.reshape(-1, *array.shape[2:])


def as_columns(array: Array) -> Array:
    """``[n, Hq, T, ...]`` as ``[Hq, n T, ...]``."""
    array = jnp.moveaxis(array, 0, 1)
    return array.reshape(array.shape[0], -1, *array.shape[3:])


def folded(options: Options, size: int, batched: Operands, operands: Operands) -> Operands:
    """The operands of n calls as those of one; pages that all calls share stay as they are."""
    in_pages = keys_are_in_pages(options, operands)
    own_keys = not in_pages or batched.k or batched.v
    kept = ("sinks", "q_scale", "k_scale", "v_scale", *(() if own_keys else ("k", "v")))
    each = Operands(*(each_call(size, *pair) for pair in zip(batched, operands, strict=True)))
    rows = {name: as_rows(x) for name, x in each._asdict().items() if x is not None}
    rows.update({name: getattr(operands, name) for name in kept if getattr(operands, name) is not None})
    if options.dense:
        return Operands(**rows)

    def of_sequences(name: str, default: int) -> Array:
        values = getattr(each, name)
        return with_another(jnp.full((size, num_seqs), default, jnp.int32) if values is None else values)

    num_seqs = each.cu_seqlens_q.shape[1] - 1
    total_q, total_k = operands.q.shape[int(batched.q)], operands.k.shape[int(batched.k)]
    rows["cu_seqlens_q"] = starts_of_calls(each.cu_seqlens_q, total_q)
    if in_pages:
        rows["cu_seqlens_k"] = jnp.zeros((0,), jnp.int32)
        rows["block_table"] = with_another(table_of_calls(each.block_table, total_k) if own_keys else each.block_table)
    else:
        rows["cu_seqlens_k"] = starts_of_calls(each.cu_seqlens_k, total_k)
    rows["seqused_q"], rows["seqused_k"] = (of_sequences(name, _ALL) for name in ("seqused_q", "seqused_k"))
    if operands.leftpad_k is not None:
        rows["leftpad_k"] = of_sequences("leftpad_k", 0)
    if operands.alibi_slopes is not None:
        rows["alibi_slopes"] = folded_slopes(size, batched.alibi_slopes, operands.alibi_slopes, num_seqs)
    return Operands(**rows)


def with_another(values: Array) -> Array:
    """``[n, B, ...]`` as ``[n (B + 1), ...]``: behind each call's sequences one of zeros."""
    return as_rows(jnp.concatenate([values, jnp.zeros_like(values, shape=(values.shape[0], 1, *values.shape[2:]))], 1))


def folded_slopes(size: int, batched: bool, slopes: Array, num_seqs: int) -> Array:
    """ALiBi's slopes of n calls, of heads or of sequences and heads."""
    if slopes.ndim - int(batched) == 1:
        if not batched:
            return slopes  # of all sequences, whatever the call
        slopes = jnp.repeat(slopes[:, None], num_seqs, 1)
    return with_another(each_call(size, batched or slopes.ndim == 3, slopes))


def starts_of_calls(starts: Array, total: Any) -> Array:  # noqa: ANN401
    """``cu_seqlens`` of n calls of `total` rows, ``[n, B + 1]``, within their rows; behind them the end of all."""
    size = starts.shape[0]
    starts = jnp.clip(starts, 0, total) + jnp.arange(size, dtype=jnp.int32)[:, None] * total
    return jnp.concatenate([starts.reshape(-1).astype(jnp.int32), jnp.full((1,), size * total, jnp.int32)])


def table_of_calls(tables: Array, pages: int) -> Array:
    """Block tables ``[n, B, M]`` of n calls, each of which reads `pages` pages of its own."""
    first = jnp.arange(tables.shape[0], dtype=tables.dtype)[:, None, None] * pages
    return jnp.clip(tables, 0, pages - 1) + first
