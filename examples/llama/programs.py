"""The compiled programs of steps, and what they leave on the device. A thread of its own launches them in order.

XLA runs a step on the GPU as a CUDA graph, which it brings up to date before a launch if the address of a buffer has
changed. So every buffer of a step stays where it is: its inputs are copied into an array that is kept, and its results
are written over those of the step before. A launch takes about as much of the host's time as a small model's step takes
of the GPU's, so there are also programs of several steps, for each number of rows that decode has.
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .batch import BatchBuilder, unpack
from .config import LlamaConfig
from .model import Attend, Predicted, StepState, make_caches, step, update_and_attend, update_and_attend_by_row
from .options import MAX_TOP_LOGPROBS
from .sampling import Sampled, make_counts, sample
from .spread import Spread
from .weights import LlamaWeights

# Programs that are compiled at one time.
MAX_COMPILING = 8
# How long the launching thread waits for the interpreter, several times per step. Python's default is 5 ms.
SWITCH_SECONDS = 2e-5

Value = TypeVar("Value")


class StepKey(NamedTuple):
    """A compiled program: so many steps of so many rows. One step is sampled by a second program."""

    bucket: int
    num_steps: int
    samples: bool


class Results(NamedTuple):
    """What a launch of N steps gives, on its way to the host.

    Attributes
    ----------
        tokens: i32 [N, S].
        sampled: the choices of each step, where log-probabilities are wanted.
        is_late: whether the launch before had ended, so that the device waited for the host.
    """

    tokens: jax.Array
    sampled: Sampled | None
    is_late: bool


@dataclass
class Kept:
    """The arrays of a program that stay at their addresses: its packed inputs `[N, ...]` and its results.

    `predicted` has the tokens of each step and the rest of the last one; `sampled` has the choices of each step.
    """

    packed: jax.Array
    predicted: Predicted
    sampled: Sampled


class StepPrograms:
    """Owns the weights, the state on the device and the programs of each bucket, the number of rows of a step.

    Methods that compile or launch are called from one thread.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        builder: BatchBuilder,
        cache_shape: tuple[int, int],
        batch_invariant: bool,
        spread: Spread | None,
        steps_per_launch: int,
    ) -> None:
        make: Callable = make_caches
        self._attend: Attend = update_and_attend_by_row if batch_invariant else update_and_attend
        self._place: Callable = lambda arrays: arrays
        if spread is not None:
            weights, make, self._attend = spread.place_weights(weights), spread.make_caches, spread.attend
            self._place = partial(jax.device_put, device=spread.sharding())
        self._config, self._weights, self._builder = config, weights, builder
        self._steps_per_launch = steps_per_launch
        slots = builder.max_num_seqs
        on_all = self._place((jnp.zeros(slots, jnp.int32), make_counts(slots, config.vocab_size)))
        self._state = StepState(make(config, *cache_shape, weights.embed.dtype), *on_all)
        self._kept: dict[StepKey, Kept] = {}
        self._steps: dict[StepKey, jax.stages.Compiled] = {}
        self._samplers: dict[int, jax.stages.Compiled] = {}
        self._last_tokens: jax.Array | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="launch")
        sys.setswitchinterval(SWITCH_SECONDS)

    @property
    def caches(self) -> list[jax.Array]:
        """One `[P, page_size, 2 * Hkv, D]` per layer; every step writes them in place."""
        return self._state.caches

    def launch(self, bucket: int, packed: np.ndarray, samples: bool, logprobs: bool, follows: bool) -> Future[Results]:
        """Have the device compute a step for each row of `packed`, behind those launched before.

        `samples`: whether tokens are chosen by the options, else the most likely ones are. `logprobs`: whether the
        results have log-probabilities. `follows`: whether those of the launch before have not been read yet.
        """
        return self._thread.submit(self._launch, bucket, packed, samples, logprobs, follows)

    def is_compiled(self, bucket: int, samples: bool, num_steps: int = 1) -> bool:
        """Whether a launch of steps of so many rows has its programs."""
        if num_steps > 1:
            return StepKey(bucket, num_steps, samples) in self._steps
        return StepKey(bucket, 1, False) in self._steps and (not samples or bucket in self._samplers)

    def compile(self, bucket: int, samples: bool) -> None:
        """Compile what a single step of a bucket needs and lacks, and run it once, which loads the kernels."""
        one = StepKey(bucket, 1, False)
        self._keep([one])
        if one not in self._steps:
            self._steps[one] = self._in_thread(self._compiled_step, one)
        if samples and bucket not in self._samplers:
            self._samplers[bucket] = self._in_thread(self._compiled_sampler, bucket)
        self._run_padding(bucket, 1, samples)

    def compile_all(self, buckets: list[int]) -> Iterator[None]:
        """Compile what is missing of all buckets, several programs at a time; yields after each.

        The threads that do it have JAX's global configuration, not what a context manager of the caller changes.
        """
        keys = self._step_keys(buckets)
        self._keep(keys)
        kinds = (self._steps, self._compiled_step, keys), (self._samplers, self._compiled_sampler, buckets)
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILING)) as pool:
            programs = {
                pool.submit(compiled, key): (to, key) for to, compiled, of in kinds for key in of if key not in to
            }
            for done in as_completed(programs):
                to, key = programs[done]
                to[key] = done.result()
                yield
        for key in keys:
            self._run_padding(key.bucket, key.num_steps, key.samples or key.num_steps == 1)

    def num_programs(self, buckets: list[int]) -> int:
        """How many programs `compile_all` compiles at most."""
        return len(self._step_keys(buckets)) + len(buckets)

    def compiled_text(self) -> str:
        """The optimised HLO of the smallest step compiled so far; a step must have been compiled."""
        return self._steps[min(self._steps)].as_text()

    def _in_thread(self, function: Callable[..., Value], *arguments: object) -> Value:
        return self._thread.submit(function, *arguments).result()

    def _step_keys(self, buckets: list[int]) -> list[StepKey]:
        """The programs of one step, and those of several for the buckets of decode."""
        keys = [StepKey(bucket, 1, False) for bucket in buckets]
        if self._steps_per_launch > 1:
            of_decode = [bucket for bucket in buckets if bucket < 2 * self._builder.max_num_seqs]
            keys += [StepKey(b, self._steps_per_launch, samples) for b in of_decode for samples in (False, True)]
        return keys

    def _sizes(self, bucket: int) -> tuple[int, int, int]:
        """Rows, sequences and pages per sequence, as `unpack` takes them."""
        return bucket, self._builder.num_entries(bucket), self._builder.max_pages_per_seq

    def _padding(self, bucket: int, num_steps: int) -> np.ndarray:
        return np.tile(self._builder.packed([], bucket, False), (num_steps, 1))

    def _keep(self, keys: list[StepKey]) -> None:
        """Make the arrays of programs that have none yet."""
        vocabulary = self._config.vocab_size
        for key in keys:
            if key not in self._kept:
                entries = self._builder.num_entries(key.bucket)
                each, top = (key.num_steps, entries), min(MAX_TOP_LOGPROBS, vocabulary)
                predicted = Predicted(
                    jnp.zeros(each, jnp.int32),
                    jnp.zeros((entries, vocabulary), jnp.float32),
                    jnp.zeros(key.bucket, jnp.int32),
                )
                sampled = Sampled(
                    jnp.zeros(each, jnp.int32),
                    jnp.zeros(each, jnp.float32),
                    jnp.zeros((*each, top), jnp.int32),
                    jnp.zeros((*each, top), jnp.float32),
                )
                packed = jnp.asarray(self._padding(key.bucket, key.num_steps))
                self._kept[key] = Kept(*self._place((packed, predicted, sampled)))

    def _compiled_step(self, key: StepKey) -> jax.stages.Compiled:
        run = partial(packed_steps, self._config, self._attend, self._sizes(key.bucket), key.samples)
        kept = self._kept[key]
        # A result takes the place of the next donated array of its shape, so both have the same order.
        donated = (kept.predicted, kept.sampled if key.samples else None), self._state
        shardings = jax.tree.map(lambda array: array.sharding, donated)
        jitted = jax.jit(run, donate_argnums=(1, 2), keep_unused=True, out_shardings=shardings)
        return jitted.lower(self._weights, *donated, kept.packed).compile()

    def _compiled_sampler(self, bucket: int) -> jax.stages.Compiled:
        kept = self._kept[StepKey(bucket, 1, False)]
        donated = kept.sampled, self._state.counts, self._state.last_tokens
        shardings = jax.tree.map(lambda array: array.sharding, donated)
        run = partial(sampled_step, self._sizes(bucket))
        jitted = jax.jit(run, donate_argnums=(0, 1, 2), keep_unused=True, out_shardings=shardings)
        return jitted.lower(*donated, kept.predicted, kept.packed).compile()

    def _run_padding(self, bucket: int, num_steps: int, samples: bool) -> None:
        """Steps of padding rows, which write no cache entry."""
        for logprobs in (False, True) if samples else (False,):
            results = self.launch(bucket, self._padding(bucket, num_steps), samples, logprobs, False).result()
        jax.block_until_ready(results.tokens)

    def _launch(self, bucket: int, packed: np.ndarray, samples: bool, logprobs: bool, follows: bool) -> Results:
        is_late = follows and self._last_tokens.is_ready()
        num_steps = len(packed)
        key = StepKey(bucket, num_steps, samples and num_steps > 1)
        kept = self._kept[key]
        kept.packed = replaced(kept.packed, packed)
        before = kept.predicted, kept.sampled if key.samples else None
        (kept.predicted, sampled), self._state = self._steps[key](self._weights, before, self._state, kept.packed)
        if key.samples:
            kept.sampled = sampled
        elif samples:
            counts, last_tokens = self._state.counts, self._state.last_tokens
            kept.sampled, counts, last_tokens = self._samplers[bucket](
                kept.sampled, counts, last_tokens, kept.predicted, kept.packed
            )
            self._state = self._state._replace(counts=counts, last_tokens=last_tokens)
        chosen = kept.sampled if samples else kept.predicted
        tokens, given = copied((chosen.tokens, kept.sampled if logprobs else None))
        # By this thread, because a copy that another one begins waits until the next launch has ended.
        for array in jax.tree.leaves((tokens, given)):
            array.copy_to_host_async()
        self._last_tokens = tokens
        return Results(tokens, given, is_late)


@partial(jax.jit, donate_argnums=0)
def replaced(old: jax.Array, new: jax.Array) -> jax.Array:
    """`new` in the memory of `old`."""
    return jax.lax.dynamic_update_slice(old, new, (0, 0))


@jax.jit
def copied(arrays: Value) -> Value:
    """Copies that a later launch does not overwrite."""
    return jax.tree.map(lambda array: array + 0, arrays)


def packed_steps(
    config: LlamaConfig,
    attend: Attend,
    sizes: tuple[int, int, int],
    samples: bool,
    weights: LlamaWeights,
    _: tuple[Predicted, Sampled | None],
    state: StepState,
    packed: jax.Array,
) -> tuple[tuple[Predicted, Sampled | None], StepState]:
    """`step` on each row of `packed`, arrays of `BatchBuilder.packed` of `sizes` T, S and M; see `Kept`.

    The results of the launch before are donated.
    """
    tokens, choices = [], []
    for row in packed:
        batch, options = unpack(row, *sizes)
        predicted, state = step(config, attend, weights, state, batch)
        tokens.append(predicted.tokens)
        if samples:
            sampled, counts, last_tokens = sample(
                state.counts, state.last_tokens, predicted.logits, predicted.token_ids, options
            )
            state = state._replace(counts=counts, last_tokens=last_tokens)
            choices.append(sampled)
    sampled = jax.tree.map(lambda *of_steps: jnp.stack(of_steps), *choices) if samples else None
    return (predicted._replace(tokens=jnp.stack(tokens)), sampled), state


def sampled_step(
    sizes: tuple[int, int, int],
    _: Sampled,
    counts: jax.Array,
    last_tokens: jax.Array,
    predicted: Predicted,
    packed: jax.Array,
) -> tuple[Sampled, jax.Array, jax.Array]:
    """`sample` on the results of `packed_steps` of one step; the results of the launch before are donated."""
    _, options = unpack(packed[0], *sizes)
    sampled, *state = sample(counts, last_tokens, predicted.logits, predicted.token_ids, options)
    return jax.tree.map(lambda array: array[None], sampled), *state
