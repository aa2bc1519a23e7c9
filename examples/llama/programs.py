"""The compiled programs of steps, and what they leave on the device. A thread of its own launches them in order.

XLA runs a step on the GPU as a CUDA graph, which it brings up to date before a launch if the address of a buffer has
changed. So every buffer of a step stays where it is: its inputs are copied into an array that is kept, and its results
are written over those of the step before. A launch takes about as much of the host's time as a small model's step takes
of the GPU's, so there is also a program of several steps, without sampling, for each number of rows that decode has.
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

from .batch import BatchBuilder, StepBatch, pack, unpack
from .config import LlamaConfig
from .model import Attend, Predicted, StepState, make_caches, step, update_and_attend, update_and_attend_by_row
from .sampling import Sampled, SamplingBatch, make_counts, sample
from .spread import Spread
from .weights import LlamaWeights

# Programs that are compiled at one time.
MAX_COMPILING = 8
# How long the launching thread waits for the interpreter, several times per step. Python's default is 5 ms.
SWITCH_SECONDS = 2e-5

Value = TypeVar("Value")


class Results(NamedTuple):
    """What a launch gives.

    Attributes
    ----------
        tokens: i32 [N, S] of N steps, on their way to the host; [S] where it sampled.
        sampled: the choices, where the step sampled.
        is_late: whether the launch before had ended, so that the device waited for the host.
    """

    tokens: jax.Array
    sampled: Sampled | None
    is_late: bool


@dataclass
class Kept:
    """The arrays of a program that stay at their addresses: its packed inputs `[N, ...]` and its results."""

    packed: jax.Array
    predicted: Predicted


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
        # By bucket and number of steps.
        self._kept: dict[tuple[int, int], Kept] = {}
        self._steps: dict[tuple[int, int], jax.stages.Compiled] = {}
        self._samplers: dict[int, jax.stages.Compiled] = {}
        self._last_tokens: jax.Array | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="launch")
        sys.setswitchinterval(SWITCH_SECONDS)

    @property
    def caches(self) -> list[jax.Array]:
        """One `[P, page_size, 2 * Hkv, D]` per layer; every step writes them in place."""
        return self._state.caches

    def launch(
        self, bucket: int, batches: list[StepBatch], options: SamplingBatch | None, follows: bool
    ) -> Future[Results]:
        """Have the device compute steps behind those launched before. A single step samples if there are `options`.

        `follows`: whether the results of the launch before have not been read yet.
        """
        return self._thread.submit(self._launch, bucket, np.stack([pack(batch) for batch in batches]), options, follows)

    def is_compiled(self, bucket: int, samples: bool, num_steps: int = 1) -> bool:
        """Whether a launch of steps of so many rows has its programs."""
        return (bucket, num_steps) in self._steps and (not samples or bucket in self._samplers)

    def compile(self, bucket: int, samples: bool) -> None:
        """Compile what a single step of a bucket needs and lacks, and run it once, which loads the kernels."""
        one = bucket, 1
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
        for bucket, num_steps in keys:
            self._run_padding(bucket, num_steps, num_steps == 1)

    def num_programs(self, buckets: list[int]) -> int:
        """How many programs `compile_all` compiles at most."""
        return len(self._step_keys(buckets)) + len(buckets)

    def compiled_text(self) -> str:
        """The optimised HLO of the smallest step compiled so far; a step must have been compiled."""
        return self._steps[min(self._steps)].as_text()

    def _in_thread(self, function: Callable[..., Value], *arguments: object) -> Value:
        return self._thread.submit(function, *arguments).result()

    def _step_keys(self, buckets: list[int]) -> list[tuple[int, int]]:
        """The programs of one step, and those of several for the buckets of decode."""
        keys = [(bucket, 1) for bucket in buckets]
        if self._steps_per_launch > 1:
            keys += [(b, self._steps_per_launch) for b in buckets if b < 2 * self._builder.max_num_seqs]
        return keys

    def _keep(self, keys: list[tuple[int, int]]) -> None:
        """Make the arrays of programs that have none yet."""
        for bucket, num_steps in keys:
            if (bucket, num_steps) not in self._kept:
                entries = self._builder.num_entries(bucket)
                predicted = Predicted(
                    jnp.zeros((num_steps, entries), jnp.int32),
                    jnp.zeros((entries, self._config.vocab_size), jnp.float32),
                    jnp.zeros(bucket, jnp.int32),
                )
                packed = jnp.asarray(np.tile(pack(self._builder.build([], bucket)), (num_steps, 1)))
                self._kept[bucket, num_steps] = Kept(*self._place((packed, predicted)))

    def _compiled_step(self, key: tuple[int, int]) -> jax.stages.Compiled:
        bucket, _ = key
        sizes = bucket, self._builder.num_entries(bucket), self._builder.max_pages_per_seq
        run = partial(packed_steps, self._config, self._attend, sizes)
        kept = self._kept[key]
        # A result takes the place of the next donated array of its shape, so both have the same order.
        donated = kept.predicted, self._state
        shardings = jax.tree.map(lambda array: array.sharding, donated)
        jitted = jax.jit(run, donate_argnums=(1, 2), keep_unused=True, out_shardings=shardings)
        return jitted.lower(self._weights, *donated, kept.packed).compile()

    def _compiled_sampler(self, bucket: int) -> jax.stages.Compiled:
        options, predicted = self._builder.build_sampling([], bucket), self._kept[bucket, 1].predicted
        arguments = self._state.counts, self._state.last_tokens, predicted.logits, predicted.token_ids, options
        return jax.jit(sample, donate_argnums=(0, 1)).lower(*arguments).compile()

    def _run_padding(self, bucket: int, num_steps: int, samples: bool) -> None:
        """Steps of padding rows, which write no cache entry."""
        options = self._builder.build_sampling([], bucket) if samples else None
        results = self.launch(bucket, [self._builder.build([], bucket)] * num_steps, options, False).result()
        jax.block_until_ready(results.tokens)

    def _launch(self, bucket: int, packed: np.ndarray, options: SamplingBatch | None, follows: bool) -> Results:
        is_late = follows and self._last_tokens.is_ready()
        key = bucket, len(packed)
        kept = self._kept[key]
        kept.packed = replaced(kept.packed, packed)
        kept.predicted, self._state = self._steps[key](self._weights, kept.predicted, self._state, kept.packed)
        if options is None:
            sampled, tokens = None, copied(kept.predicted.tokens)
        else:
            counts, last_tokens, predicted = self._state.counts, self._state.last_tokens, kept.predicted
            sampled, counts, last_tokens = self._samplers[bucket](
                counts, last_tokens, predicted.logits, predicted.token_ids, options
            )
            self._state = self._state._replace(counts=counts, last_tokens=last_tokens)
            tokens = sampled.tokens
        # By this thread, because a copy that another one begins waits until the next launch has ended.
        for array in (tokens, *(sampled or ())):
            array.copy_to_host_async()
        self._last_tokens = tokens
        return Results(tokens, sampled, is_late)


@partial(jax.jit, donate_argnums=0)
def replaced(old: jax.Array, new: jax.Array) -> jax.Array:
    """`new` in the memory of `old`."""
    return jax.lax.dynamic_update_slice(old, new, (0, 0))


@jax.jit
def copied(array: jax.Array) -> jax.Array:
    """A copy that a later step does not overwrite."""
    return array + 0


def packed_steps(
    config: LlamaConfig,
    attend: Attend,
    sizes: tuple[int, int, int],
    weights: LlamaWeights,
    _: Predicted,
    state: StepState,
    packed: jax.Array,
) -> tuple[Predicted, StepState]:
    """`step` on each row of `packed`, the arrays that `pack` made one, of `sizes` T, S and M.

    The tokens are those of each step, the rest of the predictions is of the last. The results of the launch before are
    donated.
    """
    tokens = []
    for row in packed:
        predicted, state = step(config, attend, weights, state, unpack(row, *sizes))
        tokens.append(predicted.tokens)
    return predicted._replace(tokens=jnp.stack(tokens)), state
