"""Runs the schedule: what each step computes, its results, and statistics.

Steps are scheduled and launched while those before them run: the tokens that they need are on the device already. The
results are read two launches late, so that neither the device nor the launching thread waits for what is done with
them. A sequence that a stop token ends has a row computed in each step launched until then, which are dropped.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from .batch import BatchBuilder
from .config import LlamaConfig
from .options import Sampling
from .programs import Results, StepPrograms
from .scheduler import Chunk, RequestError, Scheduler, Sequence
from .spread import Spread
from .weights import LlamaWeights

# Launches, each of `steps_per_launch` steps, before the results of the one before them are read.
READ_LAG = 2


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the compiled steps and of the cache, and how it is used.

    Attributes
    ----------
        prefix_cache: whether prompts that begin alike share pages.
        batch_invariant: whether the results of a sequence are the same bits whatever else is computed. All steps are
            then one program, with `token_budget` rows, and chunks of prompts are attended to row by row.
        steps_per_launch: how many steps are launched at a time where the same number of rows is computed in each and
            all sample or none does. Their tokens arrive together. 1 with `batch_invariant`.
    """

    num_pages: int
    page_size: int
    max_num_seqs: int
    token_budget: int
    prefix_cache: bool = False
    batch_invariant: bool = False
    steps_per_launch: int = 1

    def __post_init__(self) -> None:
        if self.steps_per_launch < 1 or (self.batch_invariant and self.steps_per_launch > 1):
            limits = "1 because of batch_invariant" if self.batch_invariant else "at least 1"
            raise ValueError(f"steps_per_launch is {self.steps_per_launch}, expected {limits}")


class Token(NamedTuple):
    """A generated token; with log-probabilities where its sequence asks for them.

    Attributes
    ----------
        logprob: of the token.
        top: the most likely tokens and their log-probabilities, most likely first.
    """

    sequence: Sequence
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Prepared(NamedTuple):
    """A step that is scheduled but not launched."""

    chunks: list[Chunk]
    start: float
    bucket: int
    samples: bool
    packed: np.ndarray


@dataclass(frozen=True)
class Launched:
    """A step that the device computes, the step `index` of its launch."""

    chunks: list[Chunk]
    start: float
    results: Future[Results]
    index: int


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
    launches: int = 0
    late_launches: int = 0  # made when the launch before had ended: the device waited for the host
    compile_seconds: float = 0.0

    @property
    def num_steps(self) -> int:
        """All steps."""
        return self.prefill.steps + self.decode.steps

    def record(self, chunks: list[Chunk], seconds: float) -> None:
        """Add the step that computed `chunks` in `seconds`."""
        num_decoding = sum(chunk.is_decode for chunk in chunks)
        kind = self.decode if num_decoding == len(chunks) else self.prefill
        kind.record(sum(chunk.length for chunk in chunks), seconds)
        self.mixed_steps += 0 < num_decoding < len(chunks)


class Engine:
    """Generates for many prompts at once.

    Attributes
    ----------
        config: hyperparameters of the model.
        sizes: fixed sizes of the steps and the cache.
        scheduler: the state of all sequences.
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
        self._builder = BatchBuilder(sizes.max_num_seqs, self.max_pages_per_seq, sizes.page_size)
        cache_shape = sizes.num_pages, sizes.page_size
        self._programs = StepPrograms(
            config, weights, self._builder, cache_shape, sizes.batch_invariant, spread, sizes.steps_per_launch
        )
        self._in_flight: deque[Launched] = deque()
        self._last_read = 0.0

    @property
    def caches(self) -> list[jax.Array]:
        """One `[P, page_size, 2 * Hkv, D]` per layer; every step writes them in place."""
        return self._programs.caches

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
            prefix_cache=self.sizes.prefix_cache,
        )

    def add(
        self,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008 - immutable
        stop_tokens: frozenset[int] | None = None,
    ) -> Sequence:
        """Queue a prompt; `RequestError` if the model's context or the cache can never hold it."""
        if len(prompt) + max_new_tokens > self.config.context_length:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} generated ones exceed the model's context of "
                f"{self.config.context_length}"
            )
        return self.scheduler.add(prompt, max_new_tokens, sampling, stop_tokens)

    @property
    def has_work(self) -> bool:
        """Whether a sequence is left or a step has not been read."""
        return self.scheduler.has_work or bool(self._in_flight)

    def run(
        self,
        on_step: Callable[["Engine"], None] | None = None,
        on_compile: Callable[[int], None] | None = None,
    ) -> list[Sequence]:
        """Compute until no sequence is left and return all of them in the order in which they were added.

        `on_step` is called after every step, `on_compile` with the number of rows before a step is compiled.
        """
        while self.has_work:
            self.step(on_compile)
            if on_step:
                on_step(self)
        return sorted(self.scheduler.finished, key=lambda sequence: sequence.index)

    def step(self, on_compile: Callable[[int], None] | None = None) -> list[Token]:
        """Launch the next steps, if it is time and there are any, and then read the oldest one likewise: its tokens."""
        lag = READ_LAG * self.sizes.steps_per_launch
        launches = len(self._in_flight) <= lag and self._launch_next(on_compile)
        if self._in_flight and (not launches or len(self._in_flight) > lag):
            return self._read(self._in_flight.popleft())
        return []

    @property
    def num_programs(self) -> int:
        """How many programs `compile_all` compiles at most."""
        return self._programs.num_programs(self._buckets())

    def compile_all(self) -> Iterator[None]:
        """Compile the programs of every bucket that has none yet, several at a time; yields after each.

        The threads that do it have JAX's global configuration, not what a context manager of the caller changes.
        """
        start = time.perf_counter()
        yield from self._programs.compile_all(self._buckets())
        self.stats.compile_seconds += time.perf_counter() - start

    def compiled_text(self) -> str:
        """The optimised HLO of the smallest step compiled so far; a step must have been compiled."""
        return self._programs.compiled_text()

    def _buckets(self) -> list[int]:
        largest = self._bucket(self.sizes.token_budget)
        return [largest] if self.sizes.batch_invariant else [1 << i for i in range(largest.bit_length())]

    def _bucket(self, num_tokens: int) -> int:
        """Rows of the step that computes `num_tokens`: a power of two, the same for all if it is batch-invariant."""
        return 1 << ((self.sizes.token_budget if self.sizes.batch_invariant else num_tokens) - 1).bit_length()

    def _launch_next(self, on_compile: Callable[[int], None] | None) -> bool:
        """Launch the next steps, one if the device has nothing to do; False if there is none."""
        prepared: list[Prepared] = []
        most = self.sizes.steps_per_launch if self._in_flight else 1
        while len(prepared) < most and self.scheduler.has_work and (chunks := self.scheduler.schedule()):
            prepared.append(self._prepare(chunks, on_compile))
            self.scheduler.advance(chunks)
        if len(prepared) == self.sizes.steps_per_launch and self._are_one_launch(prepared):
            self._launch(prepared)
        else:
            for one in prepared:
                self._launch([one])
        return bool(prepared)

    def _are_one_launch(self, prepared: list[Prepared]) -> bool:
        bucket, samples = prepared[0].bucket, prepared[0].samples
        if any((one.bucket, one.samples) != (bucket, samples) for one in prepared):
            return False
        return self._programs.is_compiled(bucket, samples, len(prepared))

    def _prepare(self, chunks: list[Chunk], on_compile: Callable[[int], None] | None) -> Prepared:
        bucket = self._bucket(sum(chunk.length for chunk in chunks))
        samples = not all(chunk.sequence.sampling.is_argmax for chunk in chunks)
        if not self._programs.is_compiled(bucket, samples):
            if on_compile:
                on_compile(bucket)
            start = time.perf_counter()
            self._programs.compile(bucket, samples)
            self.stats.compile_seconds += time.perf_counter() - start
        start = time.perf_counter()
        return Prepared(chunks, start, bucket, samples, self._builder.packed(chunks, bucket, samples))

    def _launch(self, prepared: list[Prepared]) -> None:
        first, packed = prepared[0], np.stack([one.packed for one in prepared])
        logprobs = first.samples and any(chunk.sequence.sampling.logprobs for one in prepared for chunk in one.chunks)
        results = self._programs.launch(first.bucket, packed, first.samples, logprobs, bool(self._in_flight))
        self._in_flight += (Launched(one.chunks, one.start, results, index) for index, one in enumerate(prepared))

    def _read(self, launched: Launched) -> list[Token]:
        chunks, results = launched.chunks, launched.results.result()
        tokens = np.asarray(results.tokens)[launched.index, : len(chunks)].tolist()
        now = time.perf_counter()
        self.stats.record(chunks, now - max(launched.start, self._last_read))
        if launched.index == 0:
            self.stats.launches += 1
            self.stats.late_launches += results.is_late
        self._last_read = now
        logprobs = None
        if any(chunk.sequence.sampling.logprobs for chunk in chunks):
            logprobs = [np.asarray(array)[launched.index].tolist() for array in results.sampled[1:]]
        given = []
        for index in self.scheduler.resolve(chunks, tokens):
            sequence = chunks[index].sequence
            if sequence.sampling.logprobs:
                chosen, ids, values = (column[index] for column in logprobs)
                given.append(Token(sequence, tokens[index], chosen, tuple(zip(ids, values, strict=True))))
            else:
                given.append(Token(sequence, tokens[index]))
        return given
