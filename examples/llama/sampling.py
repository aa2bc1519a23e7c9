"""Choosing the next token in a compiled program: penalties, temperature, top-k, top-p, min-p and log-probabilities.

What a sequence gets depends on its logits, its options, its seed and the position alone, not on its place in the batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .options import MAX_TOP_LOGPROBS


class SamplingBatch(NamedTuple):
    """Options of the sequences of one step; unused entries have slot `max_num_seqs`."""

    slots: np.ndarray  # i32 [S], the sequence slot
    is_first: np.ndarray  # bool [S], whether the chunk is the first of its sequence
    predicts: np.ndarray  # bool [S]
    positions: np.ndarray  # i32 [S], place of the token to choose
    seeds: np.ndarray  # u32 [S, 2]
    top_k: np.ndarray  # i32 [S]
    temperature: np.ndarray  # f32 [S], as the rest
    top_p: np.ndarray
    min_p: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    repetition: np.ndarray
    count_rows: np.ndarray  # i32 [T], row of `counts` in which each token of the step counts


def sampling_layout(num_tokens: int, num_seqs: int) -> SamplingBatch:
    """Dtype and shape of each array."""
    whole, real, flag = ((dtype, (num_seqs,)) for dtype in (np.int32, np.float32, np.bool_))
    reals = [real] * 6
    return SamplingBatch(
        whole, flag, flag, whole, (np.uint32, (num_seqs, 2)), whole, *reals, count_rows=(np.int32, (num_tokens,))
    )


class Sampled(NamedTuple):
    """The choices of one step, and log-probabilities before penalties and temperature."""

    tokens: jax.Array  # i32 [S]
    logprobs: jax.Array  # f32 [S], of the chosen token
    top_tokens: jax.Array  # i32 [S, N], most likely first
    top_logprobs: jax.Array  # f32 [S, N]


def make_counts(max_num_seqs: int, vocab_size: int) -> jax.Array:
    """Zeroed counts `[2 * slots, V]` of each sequence slot's tokens: those of prompts, then the generated ones."""
    return jnp.zeros((2 * max_num_seqs, vocab_size), jnp.int32)


def sample(
    counts: jax.Array, last_tokens: jax.Array, logits: jax.Array, token_ids: jax.Array, batch: SamplingBatch
) -> tuple[Sampled, jax.Array, jax.Array]:
    """Choose a token per sequence; returns the choices, `counts` with the step's tokens, and `last_tokens`.

    `token_ids` `[T]` are the tokens that the step computed. `counts` is right for sequences all of whose tokens were
    computed in steps that sampled.
    """
    num_slots = last_tokens.shape[0]
    cleared = jnp.zeros(num_slots, bool).at[batch.slots].set(batch.is_first, mode="drop")
    counts = jnp.where(jnp.tile(cleared, 2)[:, None], 0, counts)
    counts = counts.at[batch.count_rows, token_ids].add(1, mode="drop")
    in_prompt = counts.at[batch.slots].get(mode="clip") > 0
    generated = counts.at[batch.slots + num_slots].get(mode="clip")

    penalised = penalise(logits, in_prompt, generated, batch)
    is_random = batch.temperature > 0
    scaled = penalised / jnp.where(is_random, batch.temperature, 1.0)[:, None]
    kept = jnp.where(likely_enough(scaled, batch), scaled, -jnp.inf)
    noise = jax.vmap(gumbel, (0, 0, None))(batch.seeds, batch.positions, logits.shape[1])
    drawn = jnp.argmax(kept + noise, axis=-1)
    tokens = jnp.where(is_random, drawn, jnp.argmax(penalised, axis=-1)).astype(jnp.int32)

    raw = jax.nn.log_softmax(logits, axis=-1)
    top, top_tokens = jax.lax.top_k(raw, min(MAX_TOP_LOGPROBS, raw.shape[1]))
    chosen = jnp.take_along_axis(raw, tokens[:, None], axis=-1)[:, 0]
    last_tokens = last_tokens.at[jnp.where(batch.predicts, batch.slots, num_slots)].set(tokens, mode="drop")
    return Sampled(tokens, chosen, top_tokens, top), counts, last_tokens


def penalise(logits: jax.Array, in_prompt: jax.Array, generated: jax.Array, batch: SamplingBatch) -> jax.Array:
    """The logits less the penalties; with neutral penalties they keep their bits."""
    repetition = batch.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_prompt | (generated > 0), repeated, logits)
    return logits - batch.frequency[:, None] * generated - batch.presence[:, None] * (generated > 0)


def gumbel(seed: jax.Array, position: jax.Array, count: int) -> jax.Array:
    """`count` random numbers; the largest sum of a logit and its number is a draw from the softmax."""
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (count,))


def likely_enough(scaled: jax.Array, batch: SamplingBatch) -> jax.Array:
    """Which tokens top-k, top-p and min-p leave, bool `[S, V]`."""
    order = ordered_bits(scaled)
    above = order >= largest_threshold(order, jnp.ones_like(scaled), batch.top_k.astype(jnp.float32))[:, None]
    keep = jnp.where((batch.top_k > 0)[:, None], above, True)
    share = jnp.exp(scaled - scaled.max(axis=-1, keepdims=True))
    mass = jnp.where(keep, share, 0.0)
    above = order >= largest_threshold(order, mass, batch.top_p * mass.sum(axis=-1))[:, None]
    keep &= jnp.where((batch.top_p < 1)[:, None], above, True)
    return keep & (share >= batch.min_p[:, None])


def ordered_bits(x: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the floats `x`."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def largest_threshold(order: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest threshold of each row such that the `weights` of entries at or above it sum to `wanted`.

    It is found bit by bit, which needs no sorted vocabulary.
    """

    def with_bit(step: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        reached = jnp.where(order >= candidate[:, None], weights, 0.0).sum(axis=-1) >= wanted
        return jnp.where(reached, candidate, threshold)

    return jax.lax.fori_loop(0, 32, with_bit, jnp.zeros(order.shape[0], jnp.uint32))
