"""The ragged batch of one step as fixed-shape index arrays."""

from typing import NamedTuple

import numpy as np

from .scheduler import Chunk

# A slot outside the cache is skipped by kv_cache_update.
NO_SLOT = -1


class StepBatch(NamedTuple):
    """Rows of all chunks one after another, padded to T rows; entries of unused sequence slots are 0."""

    token_ids: np.ndarray  # i32 [T]
    positions: np.ndarray  # i32 [T], place of the token in its sequence
    slot_mapping: np.ndarray  # i32 [T], page * page_size + offset; NO_SLOT for padding rows
    context_lens: np.ndarray  # i32 [S], tokens of the sequence up to the end of its chunk
    block_tables: np.ndarray  # i32 [S, M]
    query_start_loc: np.ndarray  # i32 [S + 1]
    num_seqs: np.ndarray  # i32 [1]
    last_rows: np.ndarray  # i32 [S], the row that ends the chunk


def empty_batch(num_tokens: int, max_num_seqs: int, max_pages_per_seq: int) -> StepBatch:
    """A batch of `num_tokens` padding rows and no sequence."""
    return StepBatch(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.zeros(num_tokens, np.int32),
        slot_mapping=np.full(num_tokens, NO_SLOT, np.int32),
        context_lens=np.zeros(max_num_seqs, np.int32),
        block_tables=np.zeros((max_num_seqs, max_pages_per_seq), np.int32),
        query_start_loc=np.zeros(max_num_seqs + 1, np.int32),
        num_seqs=np.zeros(1, np.int32),
        last_rows=np.zeros(max_num_seqs, np.int32),
    )


def build_batch(
    chunks: list[Chunk], num_tokens: int, max_num_seqs: int, max_pages_per_seq: int, page_size: int
) -> StepBatch:
    """Lay `chunks` out in `num_tokens` rows; chunk i becomes sequence slot i."""
    batch = empty_batch(num_tokens, max_num_seqs, max_pages_per_seq)
    batch.num_seqs[0] = len(chunks)
    row = 0
    for slot, chunk in enumerate(chunks):
        sequence, end = chunk.sequence, chunk.start + chunk.length
        rows = slice(row, row + chunk.length)
        positions = np.arange(chunk.start, end, dtype=np.int32)
        pages = np.asarray(sequence.pages, np.int32)
        batch.token_ids[rows] = sequence.tokens[chunk.start : end]
        batch.positions[rows] = positions
        batch.slot_mapping[rows] = pages[positions // page_size] * page_size + positions % page_size
        batch.context_lens[slot] = end
        batch.block_tables[slot, : len(pages)] = pages
        row += chunk.length
        batch.last_rows[slot] = row - 1
        batch.query_start_loc[slot + 1 :] = row
    return batch
