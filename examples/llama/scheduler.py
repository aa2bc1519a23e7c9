"""Continuous batching: which tokens of which sequences are computed in the next step, and on which pages.

Every step takes at most `token_budget` tokens: first one token of each sequence that generates, then as much of the
prompts as fits, split into chunks. Sequences are admitted when a slot and their pages are free. When a generating
sequence needs a page and none is free, the youngest running sequence is evicted: its pages are freed, it waits in
front of the queue, and what it had is recomputed when it is admitted again. The oldest sequence is never evicted for
another, so every sequence finishes. The order of everything follows from the order of `add` alone.

A step can be scheduled before the tokens that the one before it predicts are known: `advance` puts `UNKNOWN` in their
place and `resolve` fills them in. With a prefix cache, full pages stay findable by the hash of all their tokens, and a
prompt that begins alike takes them over.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from .options import Sampling
from .pages import PageAllocator, page_key

# The place of a token that a step still computes.
UNKNOWN = -1


class RequestError(ValueError):
    """A prompt that can never be served with the given cache; the text says which option to raise."""


@dataclass(eq=False)
class Sequence:
    """One prompt and what was generated for it.

    Attributes
    ----------
        index: position in the order of `add`.
        tokens: ids of the prompt, then the generated ids (a stop token included); the last may be `UNKNOWN`.
        prompt_length: how many of `tokens` are the prompt.
        max_new_tokens: the largest number of ids to generate.
        num_cached: how many leading tokens have their keys and values in the cache.
        pages: page ids in order of position; page i holds positions `i * page_size ..`.
        num_evictions: how often the sequence was evicted.
        sampling: how its tokens are chosen.
        stop_tokens: ids that end it.
        slot: its place in the state on the device while it runs, otherwise -1.
        is_done: whether it has finished or was cancelled.
        page_keys: keys of its leading full pages, as far as they were needed.
        num_registered: how many of `pages` the prefix cache has.
    """

    index: int
    tokens: list[int]
    prompt_length: int
    max_new_tokens: int
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    num_evictions: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    slot: int = -1
    is_done: bool = False
    page_keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0

    @property
    def generated(self) -> list[int]:
        """The ids generated so far."""
        return self.tokens[self.prompt_length :]


class Chunk(NamedTuple):
    """The tokens `start .. start + length - 1` of a sequence, computed in one step.

    Attributes
    ----------
        predicts: whether the chunk reaches the last token, so that its last row predicts the next one.
    """

    sequence: Sequence
    start: int
    length: int
    predicts: bool

    @property
    def end(self) -> int:
        """The place of the token after the chunk."""
        return self.start + self.length

    @property
    def is_decode(self) -> bool:
        """Whether the chunk is the one token generated in the step before (not prompt, not recomputation)."""
        return self.length == 1 and self.predicts and self.start >= self.sequence.prompt_length


class Scheduler:
    """Schedules each step, see the module docstring.

    Attributes
    ----------
        waiting: sequences without a slot, next one first.
        running: sequences with a slot and pages, oldest first.
        finishing: sequences whose last token is being computed.
        finished: sequences that are done, in the order in which they finished.
        num_evictions: how often a sequence was evicted.
        prefix_queries, prefix_hits: tokens of admitted sequences, and how many of them the prefix cache had.
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
        prefix_cache: bool = False,
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
        self.prefix_cache = prefix_cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.finishing: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.num_evictions = self.prefix_queries = self.prefix_hits = 0
        self._num_added = 0
        self._free_slots = list(reversed(range(max_num_seqs)))

    def add(
        self,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008 - immutable
        stop_tokens: frozenset[int] | None = None,
    ) -> Sequence:
        """Queue a prompt. `RequestError` if it could not finish even with the whole cache to itself.

        Tokens of `stop_tokens` end the text instead of the scheduler's.
        """
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
        sequence = Sequence(self._num_added, list(prompt), len(prompt), max_new_tokens, sampling=sampling)
        sequence.stop_tokens = self.stop_tokens if stop_tokens is None else stop_tokens
        self._num_added += 1
        self.waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence and free its pages, between two steps; one that has finished stays as it is."""
        if not sequence.is_done:
            self._drop(sequence)

    @property
    def has_work(self) -> bool:
        """Whether a sequence is running or waiting."""
        return bool(self.running or self.waiting)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; their pages are allocated.

        There is at least one while `has_work`, unless tokens that were not read yet are waited for.
        """
        chunks: list[Chunk] = []
        budget = self.token_budget
        has_evicted = False
        position = 0
        while position < len(self.running) and budget:
            sequence = self.running[position]
            while (missing := self._missing_pages(sequence)) and missing > self.allocator.num_free:
                has_evicted = True
                if self._evict_youngest() is sequence:
                    break
            else:
                budget -= self._take_chunk(sequence, missing, budget, chunks)
                position += 1
        # Admitting in the step of an eviction would give the freed pages to the evicted sequence.
        while not has_evicted and budget and (sequence := self._admit()) is not None:
            budget -= self._take_chunk(sequence, self._missing_pages(sequence), budget, chunks)
        return chunks

    def complete(self, chunks: list[Chunk], next_tokens: list[int]) -> None:
        """Record a step that has been computed: `next_tokens[i]` is what the last row of `chunks[i]` predicts."""
        self.advance(chunks)
        self.resolve(chunks, next_tokens)

    def advance(self, chunks: list[Chunk]) -> None:
        """Record that a step is being computed; what it predicts is `UNKNOWN` until `resolve`."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_cached = chunk.end
            if not chunk.predicts:
                continue
            sequence.tokens.append(UNKNOWN)
            if len(sequence.tokens) - sequence.prompt_length == sequence.max_new_tokens:
                self._leave_running(sequence)
                self.finishing.append(sequence)

    def resolve(self, chunks: list[Chunk], next_tokens: list[int]) -> list[int]:
        """Fill in what the oldest step not yet resolved predicted.

        Returns which chunks gave their sequence a token: not those of sequences that are done, because a stop token
        or a cancellation was found after the step was scheduled.
        """
        gave = []
        for index, (chunk, token) in enumerate(zip(chunks, next_tokens, strict=True)):
            sequence, end = chunk.sequence, chunk.start + chunk.length
            if sequence.is_done:
                continue
            if self.prefix_cache and end // self.page_size > sequence.num_registered:
                self._register_pages(sequence, end)
            if not chunk.predicts:
                continue
            gave.append(index)
            sequence.tokens[end] = token
            is_stop = token in sequence.stop_tokens
            if is_stop or end + 1 - sequence.prompt_length == sequence.max_new_tokens:
                del sequence.tokens[end + 1 :]
                self._drop(sequence)
                self.finished.append(sequence)
        return gave

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _missing_pages(self, sequence: Sequence) -> int:
        # Written out, because it is called for every sequence of every step.
        return -(-len(sequence.tokens) // self.page_size) - len(sequence.pages)

    def _admit(self) -> Sequence | None:
        """Give the first waiting sequence a slot and what the prefix cache has of it, if it fits."""
        if not self.waiting or len(self.running) == self.max_num_seqs:
            return None
        sequence = self.waiting[0]
        # One that was evicted is computed again from its tokens, which may not have been read yet.
        if sequence.tokens[-1] == UNKNOWN:
            return None
        pages = self._cached_pages(sequence)
        # One page per running sequence is reserved for its growth; otherwise the new one would soon be evicted.
        needed = self._missing_pages(sequence) - len(pages) + len(self.running)
        if needed > self.allocator.num_free - self.allocator.num_unused(pages):
            return None
        self.waiting.popleft()
        self.running.append(sequence)
        self.allocator.acquire(pages)
        sequence.slot = self._free_slots.pop()
        sequence.pages = pages
        sequence.num_registered = len(pages)
        sequence.num_cached = len(pages) * self.page_size
        self.prefix_queries += len(sequence.tokens)
        self.prefix_hits += sequence.num_cached
        return sequence

    def _cached_pages(self, sequence: Sequence) -> list[int]:
        """The pages that the prefix cache has of a waiting sequence; its last token is computed in any case."""
        # Penalties count the tokens of the steps that computed them.
        if not self.prefix_cache or sequence.sampling.has_penalties:
            return []
        count = (len(sequence.tokens) - 1) // self.page_size
        self._extend_keys(sequence, count)
        return self.allocator.find(sequence.page_keys[:count])

    def _extend_keys(self, sequence: Sequence, count: int) -> None:
        keys, size = sequence.page_keys, self.page_size
        for page in range(len(keys), count):
            keys.append(page_key(keys[-1] if keys else b"", sequence.tokens[page * size : (page + 1) * size]))

    def _register_pages(self, sequence: Sequence, num_known: int) -> None:
        """Let the prefix cache have the full pages of the first `num_known` tokens, which are computed."""
        count = min(num_known // self.page_size, len(sequence.pages))
        self._extend_keys(sequence, count)
        for page in range(sequence.num_registered, count):
            self.allocator.register(sequence.pages[page], sequence.page_keys[page])
        sequence.num_registered = max(count, sequence.num_registered)

    def _take_chunk(self, sequence: Sequence, missing: int, budget: int, chunks: list[Chunk]) -> int:
        """Give the sequence its missing pages, append its chunk of at most `budget` tokens, return its length."""
        if missing:
            sequence.pages += self.allocator.allocate(missing)
        left = len(sequence.tokens) - sequence.num_cached
        length = min(left, budget)
        chunks.append(Chunk(sequence, sequence.num_cached, length, length == left))
        return length

    def _evict_youngest(self) -> Sequence:
        youngest = self.running[-1]
        self._leave_running(youngest)
        self._release_pages(youngest)
        youngest.num_evictions += 1
        self.num_evictions += 1
        self.waiting.appendleft(youngest)
        return youngest

    def _leave_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _drop(self, sequence: Sequence) -> None:
        """Take a sequence out of wherever it is, for good."""
        sequence.is_done = True
        if sequence.slot >= 0:
            self._leave_running(sequence)
        elif sequence in self.finishing:
            self.finishing.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release_pages(sequence)

    def _release_pages(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.pages)
        sequence.pages = []
        sequence.num_cached = sequence.num_registered = 0
