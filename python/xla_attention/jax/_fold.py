"""Batches of calls: an axis of ``jax.vmap`` becomes more sequences of one call.

Packed calls of B sequences over T rows become one call of n (B + 1) sequences over n T rows. Behind the sequences of
each call stands one more, which reaches to the beginning of the next call's first and uses none of its rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ._call import Array
from ._varlen_types import Cotangents, Operands, Options, keys_are_in_pages

_ALL = 2**31 - 1  # rows of a sequence, however many there are


def is_foldable(options: Options, batched: Operands, operands: Operands) -> bool:
    """Keys are not in pages, and what all sequences of a call share is shared by the calls."""
    shared = ("sinks", "q_scale", "k_scale", "v_scale")
    return not keys_are_in_pages(options, operands) and not any(getattr(batched, name) for name in shared)


def one_by_one(function: Callable, batched: tuple, arguments: tuple) -> Any:  # noqa: ANN401
    """`function` of each index of the batched arguments, one after the other."""
    arrays, places = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(batched)
    moving = [x for x, moves in zip(arrays, flags, strict=True) if moves]

    def at(index: list[Array]) -> Any:  # noqa: ANN401
        rest = iter(index)
        return function(*places.unflatten([next(rest) if moves else x for x, moves in zip(arrays, flags, strict=True)]))

    return jax.lax.map(at, moving)


def unfolded(rows: Array, size: int) -> Array:
    """``[n T, ...]`` as ``[n, T, ...]``."""
    return rows.reshape(size, -1, *rows.shape[1:])


def unfolded_lse(lse: Array, size: int) -> Array:
    """``[Hq, n T]`` as ``[n, Hq, T]``; dense: ``[Hq, n B, T]`` as ``[n, Hq, B, T]``."""
    return jnp.moveaxis(lse.reshape(lse.shape[0], size, -1, *lse.shape[2:]), 1, 0)


def folded_cotangents(size: int, batched: Cotangents, cotangents: Cotangents) -> Cotangents:
    """Of n calls, as those of one."""
    dout, out, lse, dlse = (_each(size, *pair) for pair in zip(batched, cotangents, strict=True))
    return Cotangents(_rows(dout), _rows(out), *(None if x is None else _columns(x) for x in (lse, dlse)))


def _each(size: int, batched: bool | None, array: Array | None) -> Array | None:
    """The array of each call: ``[n, ...]``."""
    if array is None or batched:
        return array
    return jnp.broadcast_to(array[None], (size, *array.shape))


def _rows(array: Array) -> Array:
    return array.reshape(-1, *array.shape[2:])


def _columns(array: Array) -> Array:
    """``[n, Hq, T, ...]`` as ``[Hq, n T, ...]``."""
    array = jnp.moveaxis(array, 0, 1)
    return array.reshape(array.shape[0], -1, *array.shape[3:])


def folded(options: Options, size: int, batched: Operands, operands: Operands, *, shares_keys: bool) -> Operands:
    """The operands of n calls as those of one; `shares_keys` leaves keys that all calls share as they are."""
    shares_keys = shares_keys and not options.dense and not batched.k and not batched.v
    kept = ("sinks", "q_scale", "k_scale", "v_scale", *(("k", "v") if shares_keys else ()))
    each = Operands(*(_each(size, *pair) for pair in zip(batched, operands, strict=True)))
    rows = {name: _rows(x) for name, x in each._asdict().items() if x is not None}
    rows.update({name: getattr(operands, name) for name in kept if getattr(operands, name) is not None})
    if options.dense:
        return Operands(**rows)

    def with_another(name: str, spare: int, default: int) -> Array:
        """``[n, B, ...]`` as ``[n (B + 1), ...]``."""
        values = getattr(each, name)
        if values is None:
            values = jnp.full((size, num_seqs), default, jnp.int32)
        return _rows(
            jnp.concatenate([values, jnp.full_like(values[:, :1], spare, shape=(size, 1, *values.shape[2:]))], 1)
        )

    num_seqs = each.cu_seqlens_q.shape[1] - 1
    total_q, total_k = operands.q.shape[int(batched.q)], operands.k.shape[int(batched.k)]
    rows["cu_seqlens_q"] = _starts(each.cu_seqlens_q, total_q, total_q)
    rows["cu_seqlens_k"] = _starts(each.cu_seqlens_k, total_k, 0 if shares_keys else total_k)
    rows["seqused_q"], rows["seqused_k"] = (with_another(name, 0, _ALL) for name in ("seqused_q", "seqused_k"))
    if operands.leftpad_k is not None:
        rows["leftpad_k"] = with_another("leftpad_k", 0, 0)
    slopes = operands.alibi_slopes
    if slopes is not None:
        if slopes.ndim - int(batched.alibi_slopes) == 1:  # of heads, whatever the sequence
            if not batched.alibi_slopes:
                return Operands(**{**rows, "alibi_slopes": slopes})
            each = each._replace(alibi_slopes=jnp.repeat(slopes[:, None], num_seqs, 1))
        rows["alibi_slopes"] = with_another("alibi_slopes", 0, 0)
    return Operands(**rows)


def _starts(starts: Array, total: Any, step: Any) -> Array:  # noqa: ANN401
    """``cu_seqlens`` of n calls, ``[n, B + 1]``, each within its own rows, and behind them the end of all."""
    size = starts.shape[0]
    starts = jnp.clip(starts, 0, total) + jnp.arange(size, dtype=jnp.int32)[:, None] * step
    end = jnp.full((1,), total + (size - 1) * step, jnp.int32)
    return jnp.concatenate([starts.reshape(-1).astype(jnp.int32), end])
