"""One step of the decoder on a ragged batch: embeds T tokens, updates the paged cache, predicts S next tokens."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xla_attention.jax import kv_cache_update, paged_attention, paged_attention_update

from .batch import StepBatch
from .config import LlamaConfig
from .weights import DecoderLayer, LlamaWeights

# A function like `update_and_attend`.
Attend = Callable[..., tuple[jax.Array, jax.Array]]


class StepState(NamedTuple):
    """What steps leave on the device for the next one, which is given it for good."""

    caches: list[jax.Array]
    last_tokens: jax.Array  # i32 [slots], what the sequence of each slot predicted last
    counts: jax.Array  # see sampling.make_counts


class Predicted(NamedTuple):
    """The results of a step for its S sequences; those of unused entries are unspecified."""

    tokens: jax.Array  # i32 [S], the most likely ones
    logits: jax.Array  # f32 [S, V]
    token_ids: jax.Array  # i32 [T], the tokens that were computed


def make_caches(config: LlamaConfig, num_pages: int, page_size: int, dtype: jnp.dtype) -> list[jax.Array]:
    """One zeroed cache `[P, page_size, 2 * Hkv, D]` per layer, K of head h at 2h and V at 2h + 1.

    They are separate arrays, so that each update of a donated cache is in place.
    """
    shape = (num_pages, page_size, 2 * config.num_kv_heads, config.head_dim)
    return [jnp.zeros(shape, dtype) for _ in range(config.num_layers)]


def update_and_attend(
    kv_cache: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, batch: StepBatch
) -> tuple[jax.Array, jax.Array]:
    """Write the rows' keys and values into the cache and attend over it: `out` `[T, Hq, D]` and the updated cache."""
    sequences = batch.context_lens, batch.block_tables, batch.query_start_loc, batch.num_seqs
    new = key, value, batch.slot_mapping
    return paged_attention_update(query, kv_cache, *sequences, *new, scale=query.shape[-1] ** -0.5)


def update_and_attend_by_row(
    kv_cache: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array, batch: StepBatch
) -> tuple[jax.Array, jax.Array]:
    """`update_and_attend` with the same bits for a token however its sequence is cut into chunks.

    Attention is batch-invariant for sequences of the same lengths, so every row becomes a sequence of one query.
    """
    kv_cache = kv_cache_update(kv_cache, key, value, batch.slot_mapping)
    rows = jnp.arange(query.shape[0] + 1, dtype=jnp.int32)
    entries = jnp.searchsorted(batch.query_start_loc[1:-1], rows[:-1], side="right")
    sequences = batch.positions + 1, batch.block_tables[entries], rows, batch.query_start_loc[-1:]
    out = paged_attention(query, kv_cache, *sequences, scale=query.shape[-1] ** -0.5, batch_invariant=True)
    return out, kv_cache


def step(
    config: LlamaConfig, attend: Attend, weights: LlamaWeights, state: StepState, batch: StepBatch
) -> tuple[Predicted, StepState]:
    """Compute the rows of `batch` and predict greedily; `attend` updates a layer's cache and attends over it.

    Returns the predictions and the state with the rows' keys and values written. `state` is meant to be donated.
    """
    before = state.last_tokens.at[-1 - batch.token_ids].get(mode="clip")
    token_ids = jnp.where(batch.token_ids < 0, before, batch.token_ids)
    x = weights.embed[token_ids]
    angles = batch.positions[:, None].astype(jnp.float32) * weights.inv_freq
    rotation = (jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :])  # two of [T, 1, D/2]
    new_caches = []
    for layer, kv_cache in zip(weights.layers, state.caches, strict=True):
        x, kv_cache = decoder_layer(config, attend, layer, kv_cache, x, rotation, batch)
        new_caches.append(kv_cache)
    # The product with the vocabulary is by far the largest, so that only rows which predict take part.
    x = rms_norm(x[batch.last_rows], weights.final_norm, config.rms_norm_eps)
    head = weights.embed if weights.lm_head is None else weights.lm_head
    logits = jnp.einsum("se,ve->sv", x, head, preferred_element_type=jnp.float32)
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    last_tokens = state.last_tokens.at[batch.predicting_slots].set(tokens, mode="drop")
    return Predicted(tokens, logits, token_ids), StepState(new_caches, last_tokens, state.counts)


# Jitted separately, so that it is traced once and not per layer.
@partial(jax.jit, static_argnums=(0, 1))
def decoder_layer(
    config: LlamaConfig,
    attend: Attend,
    layer: DecoderLayer,
    kv_cache: jax.Array,
    x: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    batch: StepBatch,
) -> tuple[jax.Array, jax.Array]:
    """Attention and feed-forward block on `x` `[T, E]`; returns the new `x` and the updated cache."""
    num_tokens, head_dim = x.shape[0], config.head_dim
    h = rms_norm(x, layer.attn_norm, config.rms_norm_eps)
    query = (h @ layer.q_proj).reshape(num_tokens, config.num_heads, head_dim)
    key = (h @ layer.k_proj).reshape(num_tokens, config.num_kv_heads, head_dim)
    value = (h @ layer.v_proj).reshape(num_tokens, config.num_kv_heads, head_dim)
    query, key = rotate(query, rotation), rotate(key, rotation)

    out, kv_cache = attend(kv_cache, query, key, value, batch)
    x = x + out.reshape(num_tokens, -1) @ layer.o_proj

    h = rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
    x = x + (jax.nn.silu(h @ layer.gate_proj) * (h @ layer.up_proj)) @ layer.down_proj
    return x, kv_cache


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x` `[T, E]` over its root mean square, times `weight` `[E]`; the mean is taken in f32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding of `x` `[T, H, D]`: the pair (i, i + D/2) is rotated by the angle with the given cos and sin."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
