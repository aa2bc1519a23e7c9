"""The compiled programs of a step, and what they leave on the device. A thread of its own launches them in order.

XLA runs a step on the GPU as a CUDA graph, which it brings up to date before a launch if the address of a buffer has
changed. So every buffer of a step stays where it is: its inputs are copied into an array that is kept, and its results
are written over those of the step before.
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
    """What a launched step gives.

    Attributes
    ----------
        tokens: i32 [S], on their way to the host.
        sampled: the choices, where the step sampled.
        is_late: whether the step before had ended at the launch, so that the device waited for the host.
    """

    tokens: jax.Array
    sampled: Sampled | None
    is_late: bool


@dataclass
class Kept:
    """The arrays of a step that stay at their addresses: its packed inputs and its results."""

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
    ) -> None:
        make: Callable = make_caches
        self._attend: Attend = update_and_attend_by_row if batch_invariant else update_and_attend
        self._place: Callable = lambda arrays: arrays
        if spread is not None:
            weights, make, self._attend = spread.place_weights(weights), spread.make_caches, spread.attend
            self._place = partial(jax.device_put, device=spread.sharding())
        self._config, self._weights, self._builder = config, weights, builder
        slots = builder.max_num_seqs
        on_all = self._place((jnp.zeros(slots, jnp.int32), make_counts(slots, config.vocab_size)))
        self._state = StepState(make(config, *cache_shape, weights.embed.dtype), *on_all)
        self._kept: dict[int, Kept] = {}
        self._steps: dict[int, jax.stages.Compiled] = {}
        self._samplers: dict[int, jax.stages.Compiled] = {}
        self._last_tokens: jax.Array | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="launch")
        sys.setswitchinterval(SWITCH_SECONDS)

    @property
    def caches(self) -> list[jax.Array]:
        """One `[P, page_size, 2 * Hkv, D]` per layer; every step writes them in place."""
        return self._state.caches

    def launch(self, bucket: int, batch: StepBatch, options: SamplingBatch | None, follows: bool) -> Future[Results]:
        """Have the device compute a step, which samples if there are `options`, behind those launched before.

        `follows`: whether the results of the step before have not been read yet.
        """
        return self._thread.submit(self._launch, bucket, pack(batch), options, follows)

    def is_compiled(self, bucket: int, samples: bool) -> bool:
        """Whether a step of so many rows has its programs."""
        return bucket in self._steps and (not samples or bucket in self._samplers)

    def compile(self, bucket: int, samples: bool) -> None:
        """Compile the programs of a bucket that are missing, and run them once, which loads their kernels."""
        self._keep([bucket])
        if bucket not in self._steps:
            self._steps[bucket] = self._in_thread(self._compiled_step, bucket)
        if samples and bucket not in self._samplers:
            self._samplers[bucket] = self._in_thread(self._compiled_sampler, bucket)
        self._run_padding(bucket, samples)

    def compile_all(self, buckets: list[int]) -> Iterator[int]:
        """Compile what is missing of all buckets, several at a time; yields the bucket of each program.

        The threads that do it have JAX's global configuration, not what a context manager of the caller changes.
        """
        self._keep(buckets)
        kinds = (self._steps, self._compiled_step), (self._samplers, self._compiled_sampler)
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILING)) as pool:
            programs = {
                pool.submit(compiled, bucket): (to, bucket)
                for to, compiled in kinds
                for bucket in buckets
                if bucket not in to
            }
            for done in as_completed(programs):
                to, bucket = programs[done]
                to[bucket] = done.result()
                yield bucket
        for bucket in buckets:
            self._run_padding(bucket, True)

    def compiled_text(self) -> str:
        """The optimised HLO of the smallest step compiled so far; a step must have been compiled."""
        return self._steps[min(self._steps)].as_text()

    def _in_thread(self, function: Callable[..., Value], *arguments: object) -> Value:
        return self._thread.submit(function, *arguments).result()

    def _keep(self, buckets: list[int]) -> None:
        """Make the arrays of buckets that have none yet."""
        for bucket in buckets:
            if bucket not in self._kept:
                entries = self._builder.num_entries(bucket)
                predicted = Predicted(
                    jnp.zeros(entries, jnp.int32),
                    jnp.zeros((entries, self._config.vocab_size), jnp.float32),
                    jnp.zeros(bucket, jnp.int32),
                )
                packed = jnp.asarray(pack(self._builder.build([], bucket)))
                self._kept[bucket] = Kept(*self._place((packed, predicted)))

    def _compiled_step(self, bucket: int) -> jax.stages.Compiled:
        sizes = bucket, self._builder.num_entries(bucket), self._builder.max_pages_per_seq
        run = partial(packed_step, self._config, self._attend, sizes)
        kept = self._kept[bucket]
        # A result takes the place of the next donated array of its shape, so both have the same order.
        donated = kept.predicted, self._state
        shardings = jax.tree.map(lambda array: array.sharding, donated)
        jitted = jax.jit(run, donate_argnums=(1, 2), keep_unused=True, out_shardings=shardings)
        return jitted.lower(self._weights, *donated, kept.packed).compile()

    def _compiled_sampler(self, bucket: int) -> jax.stages.Compiled:
        options, predicted = self._builder.build_sampling([], bucket), self._kept[bucket].predicted
        arguments = self._state.counts, self._state.last_tokens, predicted.logits, predicted.token_ids, options
        return jax.jit(sample, donate_argnums=(0, 1)).lower(*arguments).compile()

    def _run_padding(self, bucket: int, samples: bool) -> None:
        """A step of padding rows, which writes no cache entry."""
        options = self._builder.build_sampling([], bucket) if samples else None
        results = self.launch(bucket, self._builder.build([], bucket), options, False).result()
        jax.block_until_ready(results.tokens)

    def _launch(self, bucket: int, packed: np.ndarray, options: SamplingBatch | None, follows: bool) -> Results:
        is_late = follows and self._last_tokens.is_ready()
        kept = self._kept[bucket]
        kept.packed = replaced(kept.packed, packed)
        kept.predicted, self._state = self._steps[bucket](self._weights, kept.predicted, self._state, kept.packed)
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
    return jax.lax.dynamic_update_slice(old, new, (0,))


@jax.jit
def copied(array: jax.Array) -> jax.Array:
    """A copy that a later step does not overwrite."""
    return array + 0


def packed_step(
    config: LlamaConfig,
    attend: Attend,
    sizes: tuple[int, int, int],
    weights: LlamaWeights,
    _: Predicted,
    state: StepState,
    packed: jax.Array,
) -> tuple[Predicted, StepState]:
    """`step` on the arrays that `pack` made one, of `sizes` T, S and M; the results of the step before are donated."""
    return step(config, attend, weights, state, unpack(packed, *sizes))
