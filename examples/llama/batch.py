"""The ragged batch of one step as fixed-shape index arrays."""

from typing import NamedTuple

import jax
import numpy as np

from .sampling import SamplingBatch, sampling_layout
from .scheduler import UNKNOWN, Chunk, Sequence

# A slot outside the cache is skipped by kv_cache_update.
NO_SLOT = -1


class StepBatch(NamedTuple):
    """Rows of all chunks one after another, padded to T rows; entries of unused sequences are 0."""

    token_ids: np.ndarray  # i32 [T]; -1 - s stands for what the sequence in slot s predicted last
    positions: np.ndarray  # i32 [T], place of the token in its sequence
    slot_mapping: np.ndarray  # i32 [T], page * page_size + offset; NO_SLOT for padding rows
    context_lens: np.ndarray  # i32 [S], tokens of the sequence up to the end of its chunk
    block_tables: np.ndarray  # i32 [S, M]
    query_start_loc: np.ndarray  # i32 [S + 1]
    num_seqs: np.ndarray  # i32 [1]
    last_rows: np.ndarray  # i32 [S], the row that ends the chunk
    predicting_slots: np.ndarray  # i32 [S], the sequence slot, or the number of slots for a chunk that predicts nothing


def shapes(num_tokens: int, num_seqs: int, max_pages_per_seq: int) -> StepBatch:
    """The shape of each array."""
    rows, entries = (num_tokens,), (num_seqs,)
    return StepBatch(
        *(rows, rows, rows, entries, (num_seqs, max_pages_per_seq), (num_seqs + 1,), (1,), entries, entries)
    )


def pack(arrays: StepBatch | SamplingBatch) -> np.ndarray:
    """All arrays as one of i32; other dtypes keep their bits."""
    return np.concatenate([(a.astype(np.int32) if a.dtype == np.bool_ else a.view(np.int32)).ravel() for a in arrays])


def unpack(
    packed: jax.Array, num_tokens: int, num_seqs: int, max_pages_per_seq: int
) -> tuple[StepBatch, SamplingBatch]:
    """The arrays of `BatchBuilder.packed`."""
    begin = 0

    def take(dtype: type, shape: tuple[int, ...]) -> jax.Array:
        nonlocal begin
        end = begin + int(np.prod(shape))
        words, begin = packed[begin:end].reshape(shape), end
        return words != 0 if dtype is np.bool_ else jax.lax.bitcast_convert_type(words, dtype)

    batch = StepBatch(*(take(np.int32, shape) for shape in shapes(num_tokens, num_seqs, max_pages_per_seq)))
    return batch, SamplingBatch(*(take(*of) for of in sampling_layout(num_tokens, num_seqs)))


class BatchBuilder:
    """Lays chunks out in rows; keeps each sequence's block table between steps."""

    def __init__(self, max_num_seqs: int, max_pages_per_seq: int, page_size: int) -> None:
        self.max_num_seqs, self.max_pages_per_seq, self.page_size = max_num_seqs, max_pages_per_seq, page_size
        self._tables = np.zeros((max_num_seqs, max_pages_per_seq), np.int32)  # of each sequence slot
        self._no_sampling: dict[int, np.ndarray] = {}  # by rows
        # Of each slot: whose table it is, after how many evictions, and how many of its pages are in it.
        self._filled: list[tuple[Sequence | None, int, int]] = [(None, 0, 0)] * max_num_seqs

    def num_entries(self, num_tokens: int) -> int:
        """Sequences in a batch of `num_tokens` rows at most."""
        return min(self.max_num_seqs, num_tokens)

    def build(self, chunks: list[Chunk], num_tokens: int) -> StepBatch:
        """The batch of `num_tokens` rows in which chunk i is sequence i; without chunks all rows are padding."""
        entries = self.num_entries(num_tokens)
        batch = StepBatch(*(np.zeros(s, np.int32) for s in shapes(num_tokens, entries, self.max_pages_per_seq)))
        batch.slot_mapping[:] = NO_SLOT
        batch.predicting_slots[:] = self.max_num_seqs
        batch.num_seqs[0] = count = len(chunks)
        if not chunks:
            return batch
        for chunk in chunks:
            sequence = chunk.sequence
            if self._filled[sequence.slot] != (sequence, sequence.num_evictions, len(sequence.pages)):
                self._update_table(sequence)
        slots, starts, lengths, predicts = np.array([(c.sequence.slot, *c[1:]) for c in chunks], np.int32).T
        ends = np.cumsum(lengths, dtype=np.int32)
        total = ends[-1]
        if total == count:  # every chunk is one token: the usual step, without its repetitions
            tokens, row_slots = np.array([c.sequence.tokens[c.start] for c in chunks], np.int32), slots
            positions = starts
        else:
            tokens = np.array([t for c in chunks for t in c.sequence.tokens[c.start : c.end]], np.int32)
            row_slots = np.repeat(slots, lengths)
            positions = np.arange(total, dtype=np.int32) + np.repeat(starts - (ends - lengths), lengths)
        pages, offsets = np.divmod(positions, self.page_size)
        batch.token_ids[:total] = np.where(tokens == UNKNOWN, -1 - row_slots, tokens)
        batch.positions[:total] = positions
        batch.slot_mapping[:total] = self._tables[row_slots, pages] * self.page_size + offsets
        batch.context_lens[:count] = starts + lengths
        batch.block_tables[:count] = self._tables[slots]
        batch.query_start_loc[1 : count + 1] = ends
        batch.query_start_loc[count + 1 :] = total
        batch.last_rows[:count] = ends - 1
        batch.predicting_slots[:count] = np.where(predicts, slots, self.max_num_seqs)
        return batch

    def build_sampling(self, chunks: list[Chunk], num_tokens: int) -> SamplingBatch:
        """The sampling options of the same sequences."""
        entries, count = self.num_entries(num_tokens), len(chunks)

        def column(values: list, dtype: type, unused: float = 0) -> np.ndarray:
            array = np.full(entries, unused, dtype)
            array[:count] = values
            return array

        options = [chunk.sequence.sampling for chunk in chunks]
        seeds = np.zeros((entries, 2), np.uint32)
        seeds[:count] = [(o.seed >> 32, o.seed & 0xFFFFFFFF) for o in options] or 0
        count_rows = np.full(num_tokens, 2 * self.max_num_seqs, np.int32)
        row = 0
        for chunk in chunks:
            prompt = min(max(chunk.sequence.prompt_length - chunk.start, 0), chunk.length)
            count_rows[row : row + prompt] = chunk.sequence.slot
            count_rows[row + prompt : row + chunk.length] = chunk.sequence.slot + self.max_num_seqs
            row += chunk.length
        return SamplingBatch(
            slots=column([chunk.sequence.slot for chunk in chunks], np.int32, self.max_num_seqs),
            is_first=column([chunk.start == 0 for chunk in chunks], bool),
            predicts=column([chunk.predicts for chunk in chunks], bool),
            positions=column([chunk.end for chunk in chunks], np.int32),
            seeds=seeds,
            top_k=column([o.top_k for o in options], np.int32),
            temperature=column([o.temperature for o in options], np.float32),
            top_p=column([o.top_p for o in options], np.float32, 1),
            min_p=column([o.min_p for o in options], np.float32),
            presence=column([o.presence_penalty for o in options], np.float32),
            frequency=column([o.frequency_penalty for o in options], np.float32),
            repetition=column([o.repetition_penalty for o in options], np.float32, 1),
            count_rows=count_rows,
        )

    def packed(self, chunks: list[Chunk], num_tokens: int, samples: bool) -> np.ndarray:
        """The batch and the sampling options as one array of i32, so that a step has one transfer to the device."""
        if samples:
            options = pack(self.build_sampling(chunks, num_tokens))
        else:
            if num_tokens not in self._no_sampling:
                self._no_sampling[num_tokens] = pack(self.build_sampling([], num_tokens))
            options = self._no_sampling[num_tokens]
        return np.concatenate([pack(self.build(chunks, num_tokens)), options])

    def _update_table(self, sequence: Sequence) -> None:
        owner, evictions, filled = self._filled[sequence.slot]
        if owner is not sequence or evictions != sequence.num_evictions:
            filled = 0
        self._tables[sequence.slot, filled : len(sequence.pages)] = sequence.pages[filled:]
        self._filled[sequence.slot] = sequence, sequence.num_evictions, len(sequence.pages)
