"""Continuous batching: which tokens of which sequences are computed in the next step, and on which pages.

Every step takes at most `token_budget` tokens: first one token of each sequence that generates, then as much of the
prompts as fits, split into chunks. Sequences are admitted when a slot and their pages are free. When a generating
sequence needs a page and none is free, the youngest running sequence is evicted: its pages are freed, it waits in
front of the queue, and what it had is recomputed when it is admitted again. The oldest sequence is never evicted for
another, so every sequence finishes. The order of everything follows from the order of `add` alone.
"""

from collections import deque
from dataclasses import dataclass, field

from .pages import PageAllocator


class RequestError(ValueError):
    """A prompt that can never be served with the given cache; the text says which option to raise."""


@dataclass(eq=False)
class Sequence:
    """One prompt and what was generated for it.

    Attributes
    ----------
        index: position in the order of `add`.
        tokens: ids of the prompt, then the generated ids (a stop token included).
        prompt_length: how many of `tokens` are the prompt.
        max_new_tokens: the largest number of ids to generate.
        num_cached: how many leading tokens have their keys and values in the cache.
        pages: page ids in order of position; page i holds positions `i * page_size ..`.
        num_evictions: how often the sequence was evicted.
    """

    index: int
    tokens: list[int]
    prompt_length: int
    max_new_tokens: int
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    num_evictions: int = 0

    @property
    def generated(self) -> list[int]:
        """The ids generated so far."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True)
class Chunk:
    """The tokens `start .. start + length - 1` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def ends_sequence(self) -> bool:
        """Whether the chunk reaches the last known token, so that its last row predicts the next one."""
        return self.start + self.length == len(self.sequence.tokens)

    @property
    def is_decode(self) -> bool:
        """Whether the chunk is the one token generated in the step before (not prompt, not recomputation)."""
        return self.length == 1 and self.ends_sequence and self.start >= self.sequence.prompt_length


class Scheduler:
    """Schedules each step, see the module docstring.

    Attributes
    ----------
        waiting: sequences without a slot, next one first.
        running: sequences with a slot and pages, oldest first.
        finished: sequences that are done, in the order in which they finished.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_pages_per_seq: int,
        token_budget: int,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        if page_size < 1 or max_num_seqs < 1 or max_pages_per_seq < 1:
            raise ValueError("page_size, max_num_seqs and max_pages_per_seq must be at least 1")
        if token_budget < max_num_seqs:
            raise ValueError(
                f"token_budget is {token_budget}, expected at least max_num_seqs = {max_num_seqs}: "
                "every running sequence computes one token per step"
            )
        self.allocator = PageAllocator(num_pages)
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.max_pages_per_seq = max_pages_per_seq
        self.token_budget = token_budget
        self.stop_tokens = stop_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.finished: list[Sequence] = []
        self._num_added = 0

    def add(self, prompt: list[int], max_new_tokens: int) -> Sequence:
        """Queue a prompt. `RequestError` if it could not finish even with the whole cache to itself."""
        name = f"prompt {self._num_added + 1}"
        if not prompt:
            raise RequestError(f"{name} has no tokens, expected at least one")
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {max_new_tokens} for {name}, expected at least 1")
        # The last generated token is never an input, so it needs no slot.
        pages = self._pages_for(len(prompt) + max_new_tokens - 1)
        available = min(self.allocator.num_pages, self.max_pages_per_seq)
        if pages > available:
            raise RequestError(
                f"{name} can never fit: {len(prompt)} tokens and {max_new_tokens} generated ones need {pages} pages of "
                f"{self.page_size} tokens, a sequence can have {available}"
            )
        sequence = Sequence(self._num_added, list(prompt), len(prompt), max_new_tokens)
        self._num_added += 1
        self.waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence and free its pages, between two steps; one that has finished stays as it is."""
        if sequence in self.running:
            self._release_pages(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    @property
    def has_work(self) -> bool:
        """Whether a sequence is running or waiting."""
        return bool(self.running or self.waiting)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, at least one while `has_work`; their pages are allocated."""
        chunks: list[Chunk] = []
        budget = self.token_budget
        has_evicted = False
        position = 0
        while position < len(self.running) and budget:
            sequence = self.running[position]
            while self._missing_pages(sequence) > self.allocator.num_free:
                has_evicted = True
                if self._evict_youngest() is sequence:
                    break
            else:
                budget -= self._take_chunk(sequence, budget, chunks)
                position += 1
        # Admitting in the step of an eviction would give the freed pages to the evicted sequence.
        while not has_evicted and budget and self._can_admit():
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            budget -= self._take_chunk(sequence, budget, chunks)
        return chunks

    def complete(self, chunks: list[Chunk], next_tokens: list[int]) -> None:
        """Record the step: `next_tokens[i]` is what the last row of `chunks[i]` predicts."""
        for chunk, token in zip(chunks, next_tokens, strict=True):
            sequence = chunk.sequence
            predicts = chunk.ends_sequence
            sequence.num_cached += chunk.length
            if not predicts:
                continue
            sequence.tokens.append(token)
            if token in self.stop_tokens or len(sequence.generated) == sequence.max_new_tokens:
                self._release_pages(sequence)
                self.running.remove(sequence)
                self.finished.append(sequence)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _missing_pages(self, sequence: Sequence) -> int:
        return self._pages_for(len(sequence.tokens)) - len(sequence.pages)

    def _can_admit(self) -> bool:
        if not self.waiting or len(self.running) == self.max_num_seqs:
            return False
        # One page per running sequence is reserved for its growth; otherwise the new one would soon be evicted.
        return self._missing_pages(self.waiting[0]) + len(self.running) <= self.allocator.num_free

    def _take_chunk(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Give the sequence its pages, append its chunk of at most `budget` tokens, and return the chunk's length."""
        sequence.pages += self.allocator.allocate(self._missing_pages(sequence))
        length = min(len(sequence.tokens) - sequence.num_cached, budget)
        chunks.append(Chunk(sequence, sequence.num_cached, length))
        return length

    def _evict_youngest(self) -> Sequence:
        youngest = self.running.pop()
        self._release_pages(youngest)
        youngest.num_evictions += 1
        self.waiting.appendleft(youngest)
        return youngest

    def _release_pages(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.pages)
        sequence.pages = []
        sequence.num_cached = 0
