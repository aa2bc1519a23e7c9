"""The rows of a ragged batch: the sequence and the position of each, as ``docs/semantics.md#metadata`` defines them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ._call import Array


class RowPlaces(NamedTuple):
    """Where the tokens of the rows stand, ``[T]`` each."""

    sequence: Array  # i32; any sequence for a row that belongs to none
    position: Array  # i32, of the token in its sequence; negative for one of more rows than keys
    has_sequence: Array  # bool


def row_places(kv_lens: Array, cu_q_lens: Array, num_seqs: Array, num_rows: int, capacity: int) -> RowPlaces:
    """The places of the rows of S > 0 sequences, the rows of each of which are its last tokens.

    Parameters
    ----------
    kv_lens, cu_q_lens, num_seqs
        The operands ``context_lens``, ``query_start_loc`` and ``num_seqs``; lengths count the rows.
    num_rows
        T.
    capacity
        The largest length, at most 2^31 - 1.
    """
    seqs = kv_lens.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    starts = jnp.clip(cu_q_lens, 0, num_rows)
    index = jnp.arange(seqs + 1, dtype=jnp.int32)
    # Starts count as their running maximum: sequence b has the row if start b + 1 is the first one after the row.
    is_after = (starts[None] > row[:, None]) & (index <= num_seqs)[None]
    next_seq = jnp.min(jnp.where(is_after, index[None], seqs + 1), axis=1)
    seq = next_seq - 1
    has_sequence = (seq >= 0) & (next_seq <= seqs)
    seq = jnp.clip(seq, 0, seqs - 1)
    position = jnp.clip(kv_lens, 0, capacity)[seq] - (starts[seq + 1] - row)
    return RowPlaces(seq, position, has_sequence)


def used_starts(cu_q_lens: Array, num_seqs: Array) -> Array:
    """The starts with those after the last sequence replaced by its end, so that no row belongs to a later one."""
    last = jnp.clip(num_seqs.reshape(1), 0, cu_q_lens.shape[0] - 1)
    return jnp.where(jnp.arange(cu_q_lens.shape[0]) <= last, cu_q_lens, cu_q_lens[last])


def row_counts(starts: Array, num_rows: int) -> Array:
    """The rows of each sequence, ``i32[S]``."""
    return jnp.diff(lax.cummax(jnp.clip(starts, 0, num_rows)))
