"""Runs the schedule: one compiled step per token bucket, the caches, and statistics."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np

from .batch import StepBatch, build_batch, empty_batch
from .config import LlamaConfig
from .model import make_caches, step, update_and_attend
from .scheduler import Chunk, RequestError, Scheduler, Sequence
from .spread import Spread
from .weights import LlamaWeights


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the compiled steps and of the cache."""

    num_pages: int
    page_size: int
    max_num_seqs: int
    token_budget: int


@dataclass
class Throughput:
    """Tokens and seconds of the steps of one kind."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0

    def record(self, tokens: int, seconds: float) -> None:
        """Add one step."""
        self.tokens += tokens
        self.seconds += seconds
        self.steps += 1

    @property
    def rate(self) -> float:
        """Tokens per second; 0 without a step."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class EngineStats:
    """Times and counts. A step with any prompt (or recomputed) token counts as prefill, with all its rows."""

    prefill: Throughput = field(default_factory=Throughput)
    decode: Throughput = field(default_factory=Throughput)
    mixed_steps: int = 0
    compile_seconds: float = 0.0

    def record(self, chunks: list[Chunk], seconds: float) -> None:
        """Add the step that computed `chunks` (as they were scheduled) in `seconds`."""
        num_decoding = sum(chunk.is_decode for chunk in chunks)
        kind = self.decode if num_decoding == len(chunks) else self.prefill
        kind.record(sum(chunk.length for chunk in chunks), seconds)
        self.mixed_steps += 0 < num_decoding < len(chunks)


class Engine:
    """Generates greedily for many prompts at once.

    Attributes
    ----------
        config: hyperparameters of the model.
        sizes: fixed sizes of the steps and the cache.
        scheduler: the state of all sequences.
        caches: one `[P, page_size, 2 * Hkv, D]` per layer; every step writes them in place.
        stats: times and counts so far.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        sizes: EngineConfig,
        stop_tokens: frozenset[int] = frozenset(),
        spread: Spread | None = None,
    ) -> None:
        self.config = config
        self.sizes = sizes
        self.max_pages_per_seq = min(sizes.num_pages, -(-config.context_length // sizes.page_size))
        self.stats = EngineStats()
        self.scheduler = self.new_scheduler(sizes.num_pages, sizes.token_budget, stop_tokens)
        make, attend = make_caches, update_and_attend
        if spread is not None:
            weights, make, attend = spread.place_weights(weights), spread.make_caches, spread.attend
        self._weights = weights
        self.caches = make(config, sizes.num_pages, sizes.page_size, weights.embed.dtype)
        self._step = jax.jit(partial(step, config, attend), donate_argnums=1)
        self._compiled: dict[int, jax.stages.Compiled] = {}

    def new_scheduler(self, num_pages: int, token_budget: int, stop_tokens: frozenset[int]) -> Scheduler:
        """A scheduler whose batches the compiled steps of this engine accept: at most its pages and its budget."""
        if num_pages > self.sizes.num_pages or token_budget > self.sizes.token_budget:
            raise ValueError(f"num_pages {num_pages} or token_budget {token_budget} is above the engine's {self.sizes}")
        return Scheduler(
            num_pages=num_pages,
            page_size=self.sizes.page_size,
            max_num_seqs=self.sizes.max_num_seqs,
            max_pages_per_seq=self.max_pages_per_seq,
            token_budget=token_budget,
            stop_tokens=stop_tokens,
        )

    def add(self, prompt: list[int], max_new_tokens: int) -> Sequence:
        """Queue a prompt; `RequestError` if the model's context or the cache can never hold it."""
        if len(prompt) + max_new_tokens > self.config.context_length:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} generated ones exceed the model's context of "
                f"{self.config.context_length}"
            )
        return self.scheduler.add(prompt, max_new_tokens)

    def run(
        self,
        on_step: Callable[["Engine"], None] | None = None,
        on_compile: Callable[[int], None] | None = None,
    ) -> list[Sequence]:
        """Compute until no sequence is left and return all of them in the order in which they were added.

        `on_step` is called after every step, `on_compile` with the number of rows before a step is compiled.
        """
        while self.scheduler.has_work:
            self.step(on_compile)
            if on_step:
                on_step(self)
        return sorted(self.scheduler.finished, key=lambda sequence: sequence.index)

    def step(self, on_compile: Callable[[int], None] | None = None) -> list[Chunk]:
        """Schedule and compute one step while `scheduler.has_work`; returns its chunks, their tokens recorded."""
        chunks = self.scheduler.schedule()
        bucket = self._bucket(sum(chunk.length for chunk in chunks))
        if bucket not in self._compiled:
            if on_compile:
                on_compile(bucket)
            self._compile(bucket)
        start = time.perf_counter()
        batch = build_batch(chunks, bucket, self.sizes.max_num_seqs, self.max_pages_per_seq, self.sizes.page_size)
        next_tokens = self._execute(bucket, batch)
        self.stats.record(chunks, time.perf_counter() - start)
        self.scheduler.complete(chunks, next_tokens[: len(chunks)].tolist())
        return chunks

    def compile_all(self) -> Iterator[int]:
        """Compile the step of every bucket, smallest first; yields the rows of each when it is compiled."""
        bucket = self._bucket(1)
        while bucket <= self._bucket(self.sizes.token_budget):
            if bucket not in self._compiled:
                self._compile(bucket)
            yield bucket
            bucket *= 2

    def compiled_text(self) -> str:
        """The optimised HLO of the smallest step compiled so far; a step must have been compiled."""
        return self._compiled[min(self._compiled)].as_text()

    def _bucket(self, num_tokens: int) -> int:
        """Rows of the step that computes `num_tokens`: a power of two, at least one row per sequence slot."""
        return 1 << (max(num_tokens, self.sizes.max_num_seqs) - 1).bit_length()

    def _compile(self, bucket: int) -> None:
        start = time.perf_counter()
        batch = empty_batch(bucket, self.sizes.max_num_seqs, self.max_pages_per_seq)
        self._compiled[bucket] = self._step.lower(self._weights, self.caches, batch).compile()
        # A step of padding rows writes no cache entry; it loads kernels, which only the first execution does.
        self._execute(bucket, batch)
        self.stats.compile_seconds += time.perf_counter() - start

    def _execute(self, bucket: int, batch: StepBatch) -> np.ndarray:
        next_tokens, self.caches = self._compiled[bucket](self._weights, self.caches, batch)
        return np.asarray(next_tokens)
