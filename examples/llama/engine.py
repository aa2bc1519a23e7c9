"""Runs the schedule: compiled steps, the state on the device, and statistics.

A step is scheduled and launched while the one before it runs: the tokens that it needs are on the device already. The
results are read one step late, so a sequence that a stop token ends has one more row computed, which is dropped.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .batch import BatchBuilder, StepBatch, pack, unpack
from .config import LlamaConfig
from .model import Attend, Predicted, StepState, make_caches, step, update_and_attend, update_and_attend_by_row
from .options import Sampling
from .sampling import Sampled, make_counts, sample
from .scheduler import Chunk, RequestError, Scheduler, Sequence
from .spread import Spread
from .weights import LlamaWeights

# Programs that are compiled at one time.
MAX_COMPILING = 8


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of the compiled steps and of the cache, and how it is used.

    Attributes
    ----------
        prefix_cache: whether prompts that begin alike share pages.
        batch_invariant: whether the results of a sequence are the same bits whatever else is computed. All steps are
            then one program, with `token_budget` rows, and chunks of prompts are attended to row by row.
    """

    num_pages: int
    page_size: int
    max_num_seqs: int
    token_budget: int
    prefix_cache: bool = False
    batch_invariant: bool = False


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


@dataclass(frozen=True)
class Launched:
    """A step that the device computes."""

    chunks: list[Chunk]
    start: float
    tokens: jax.Array
    sampled: Sampled | None


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
    late_steps: int = 0  # launched when the step before had ended: the device waited for the host
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
        make = make_caches
        attend = update_and_attend_by_row if sizes.batch_invariant else update_and_attend
        if spread is not None:
            weights, make, attend = spread.place_weights(weights), spread.make_caches, spread.attend
        self._weights = weights
        self._state = StepState(
            make(config, sizes.num_pages, sizes.page_size, weights.embed.dtype),
            jnp.zeros(sizes.max_num_seqs, jnp.int32),
            make_counts(sizes.max_num_seqs, config.vocab_size),
        )
        if spread is not None:
            on_all = jax.device_put(self._state[1:], spread.sharding())
            self._state = StepState(self._state.caches, *on_all)
        self._attend = attend
        self._builder = BatchBuilder(sizes.max_num_seqs, self.max_pages_per_seq, sizes.page_size)
        self._steps: dict[int, jax.stages.Compiled] = {}
        self._samplers: dict[int, jax.stages.Compiled] = {}
        self._in_flight: Launched | None = None
        self._last_read = 0.0

    @property
    def caches(self) -> list[jax.Array]:
        """One `[P, page_size, 2 * Hkv, D]` per layer; every step writes them in place."""
        return self._state.caches

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
        return self.scheduler.has_work or self._in_flight is not None

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
        """Launch the next step, if there is one, and then read the one launched by the call before: its tokens."""
        chunks = self.scheduler.schedule() if self.scheduler.has_work else []
        launched = self._launch(chunks, on_compile) if chunks else None
        to_read, self._in_flight = self._in_flight, launched
        return self._read(to_read) if to_read else []

    @property
    def num_programs(self) -> int:
        """How many programs `compile_all` compiles at most: a step and a sampler per bucket."""
        return 2 * len(self._buckets())

    def compile_all(self) -> Iterator[int]:
        """Compile the programs of every bucket that has none yet, several at a time; yields the rows of each.

        The threads that do it have JAX's global configuration, not what a context manager of the caller changes.
        """
        start = time.perf_counter()
        buckets = self._buckets()
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILING)) as pool:
            steps = {pool.submit(self._compiled_step, b): b for b in buckets if b not in self._steps}
            for done in as_completed(steps):
                self._steps[steps[done]] = done.result()
                yield steps[done]
            # The first executions load kernels. They come when no thread needs the state, which they donate.
            predicted = {bucket: self._execute_padding(bucket) for bucket in buckets}
            samplers = {
                pool.submit(self._compiled_sampler, b, predicted[b]): b for b in buckets if b not in self._samplers
            }
            for done in as_completed(samplers):
                self._samplers[samplers[done]] = done.result()
                yield samplers[done]
        for bucket in buckets:
            jax.block_until_ready(self._sample(bucket, predicted[bucket], []))
        self.stats.compile_seconds += time.perf_counter() - start

    def compiled_text(self) -> str:
        """The optimised HLO of the smallest step compiled so far; a step must have been compiled."""
        return self._steps[min(self._steps)].as_text()

    def _buckets(self) -> list[int]:
        largest = self._bucket(self.sizes.token_budget)
        return [largest] if self.sizes.batch_invariant else [1 << i for i in range(largest.bit_length())]

    def _bucket(self, num_tokens: int) -> int:
        """Rows of the step that computes `num_tokens`: a power of two, the same for all if it is batch-invariant."""
        return 1 << ((self.sizes.token_budget if self.sizes.batch_invariant else num_tokens) - 1).bit_length()

    def _launch(self, chunks: list[Chunk], on_compile: Callable[[int], None] | None) -> Launched:
        bucket = self._bucket(sum(chunk.length for chunk in chunks))
        is_sampled = not all(chunk.sequence.sampling.is_argmax for chunk in chunks)
        if bucket not in self._steps or (is_sampled and bucket not in self._samplers):
            if on_compile:
                on_compile(bucket)
            if bucket not in self._steps:
                self._compile(bucket)
            if is_sampled:
                self._compile_sampler(bucket)
        start = time.perf_counter()
        batch = self._builder.build(chunks, bucket)
        self.stats.late_steps += self._in_flight is not None and self._in_flight.tokens.is_ready()
        predicted = self._execute(bucket, batch)
        sampled = self._sample(bucket, predicted, chunks) if is_sampled else None
        tokens = predicted.tokens if sampled is None else sampled.tokens
        for array in (tokens, *(sampled or ())):
            array.copy_to_host_async()
        self.scheduler.advance(chunks)
        return Launched(chunks, start, tokens, sampled)

    def _read(self, launched: Launched) -> list[Token]:
        chunks, sampled = launched.chunks, launched.sampled
        tokens = np.asarray(launched.tokens)[: len(chunks)].tolist()
        now = time.perf_counter()
        self.stats.record(chunks, now - max(launched.start, self._last_read))
        self._last_read = now
        logprobs = None
        if any(chunk.sequence.sampling.logprobs for chunk in chunks):
            logprobs = [np.asarray(array).tolist() for array in sampled[1:]]
        given = []
        for index in self.scheduler.resolve(chunks, tokens):
            sequence = chunks[index].sequence
            if sequence.sampling.logprobs:
                chosen, ids, values = (column[index] for column in logprobs)
                given.append(Token(sequence, tokens[index], chosen, tuple(zip(ids, values, strict=True))))
            else:
                given.append(Token(sequence, tokens[index]))
        return given

    def _compile(self, bucket: int) -> None:
        start = time.perf_counter()
        self._steps[bucket] = self._compiled_step(bucket)
        self._execute_padding(bucket)
        self.stats.compile_seconds += time.perf_counter() - start

    def _compile_sampler(self, bucket: int) -> None:
        start = time.perf_counter()
        predicted = self._execute_padding(bucket)
        self._samplers[bucket] = self._compiled_sampler(bucket, predicted)
        jax.block_until_ready(self._sample(bucket, predicted, []))
        self.stats.compile_seconds += time.perf_counter() - start

    def _compiled_step(self, bucket: int) -> jax.stages.Compiled:
        sizes = bucket, self._builder.num_entries(bucket), self.max_pages_per_seq
        run = partial(packed_step, self.config, self._attend, sizes)
        shardings = jax.tree.map(lambda array: array.sharding, self._state)
        jitted = jax.jit(run, donate_argnums=1, out_shardings=(None, shardings))
        empty = pack(self._builder.build([], bucket))
        return jitted.lower(self._weights, self._state, empty).compile()

    def _compiled_sampler(self, bucket: int, predicted: Predicted) -> jax.stages.Compiled:
        options = self._builder.build_sampling([], bucket)
        arguments = self._state.counts, self._state.last_tokens, predicted.logits, predicted.token_ids, options
        return jax.jit(sample, donate_argnums=(0, 1)).lower(*arguments).compile()

    def _execute_padding(self, bucket: int) -> Predicted:
        """Run a step of padding rows, which writes no cache entry."""
        return jax.block_until_ready(self._execute(bucket, self._builder.build([], bucket)))

    def _execute(self, bucket: int, batch: StepBatch) -> Predicted:
        predicted, self._state = self._steps[bucket](self._weights, self._state, pack(batch))
        return predicted

    def _sample(self, bucket: int, predicted: Predicted, chunks: list[Chunk]) -> Sampled:
        options = self._builder.build_sampling(chunks, bucket)
        counts, last_tokens = self._state.counts, self._state.last_tokens
        sampled, counts, last_tokens = self._samplers[bucket](
            counts, last_tokens, predicted.logits, predicted.token_ids, options
        )
        self._state = self._state._replace(counts=counts, last_tokens=last_tokens)
        return sampled


def packed_step(
    config: LlamaConfig,
    attend: Attend,
    sizes: tuple[int, int, int],
    weights: LlamaWeights,
    state: StepState,
    packed: jax.Array,
) -> tuple[Predicted, StepState]:
    """`step` on the arrays that `pack` made one, of `sizes` T, S and M."""
    return step(config, attend, weights, state, unpack(packed, *sizes))
