"""The decoder's weights as one tree of device arrays, filled from a model file or folder."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .config import LlamaConfig, ModelError


class DecoderLayer(NamedTuple):
    """Weights of one layer; a matrix is `[in_features, out_features]`, which is fastest for few rows on the CPU.

    The columns of q and k are in the checkpoint's order: rotary embedding rotates the pair (i, i + D/2) of a head.
    """

    attn_norm: jax.Array  # [E]
    q_proj: jax.Array  # [E, Hq * D]
    k_proj: jax.Array  # [E, Hkv * D]
    v_proj: jax.Array  # [E, Hkv * D]
    o_proj: jax.Array  # [Hq * D, E]
    mlp_norm: jax.Array  # [E]
    gate_proj: jax.Array  # [E, F]
    up_proj: jax.Array  # [E, F]
    down_proj: jax.Array  # [F, E]


class LlamaWeights(NamedTuple):
    """All weights of the decoder, in the dtype it computes in, except `inv_freq`."""

    embed: jax.Array  # [V, E]
    layers: tuple[DecoderLayer, ...]
    final_norm: jax.Array  # [E]
    lm_head: jax.Array | None  # [V, E]; None: the embedding is used
    inv_freq: jax.Array  # f32 [D/2], radians per position


class ModelSource(Protocol):
    """The interface of a model file or folder (`GgufModel`, `HfModel`)."""

    path: object
    config: LlamaConfig

    def tensor_names(self) -> set[str]:
        """Names of all stored weights."""

    def stored_name(self, field: str, layer: int | None = None) -> str:
        """The stored name of a field of `LlamaWeights` (layer None) or of `DecoderLayer`."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor."""

    def read(self, name: str) -> np.ndarray:
        """A stored tensor as f32, matrices `[out_features, in_features]`."""

    def rope_factors(self) -> np.ndarray | None:
        """The divisors of the rotary frequencies, f32 `[D/2]`; None for no scaling."""


def stored_layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The stored shape of every field of `DecoderLayer`: matrices are stored `[out_features, in_features]`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "attn_norm": (hidden,),
        "q_proj": (q_rows, hidden),
        "k_proj": (kv_rows, hidden),
        "v_proj": (kv_rows, hidden),
        "o_proj": (hidden, q_rows),
        "mlp_norm": (hidden,),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def load_weights(source: ModelSource, dtype: jnp.dtype) -> LlamaWeights:
    """Read every weight of `source` onto the default device as `dtype`, one tensor at a time.

    Raises `ModelError` for a tensor that is missing, has another shape than the hyperparameters say, or holds a value
    that is not finite, and `NotImplementedError` for a tensor that a plain Llama does not have (biases, experts).
    """
    config = source.config
    check_tensor_set(source)

    def read(shape: tuple[int, ...], field: str, layer: int | None = None) -> np.ndarray:
        name = source.stored_name(field, layer)
        if source.shape(name) != shape:
            raise ModelError(
                f"{source.path}: tensor {name} has shape {list(source.shape(name))}, expected {list(shape)}"
            )
        values = source.read(name)
        if not np.isfinite(values).all():
            raise ModelError(f"{source.path}: tensor {name} holds values that are not finite")
        return values

    def load_layer(layer: int) -> DecoderLayer:
        shapes = stored_layer_shapes(config)
        return DecoderLayer(**{name: jnp.asarray(read(shapes[name], name, layer).T, dtype) for name in shapes})

    embedding_shape = (config.vocab_size, config.hidden_size)
    is_tied = source.stored_name("lm_head") not in source.tensor_names()
    return LlamaWeights(
        embed=jnp.asarray(read(embedding_shape, "embed"), dtype),
        layers=tuple(load_layer(layer) for layer in range(config.num_layers)),
        final_norm=jnp.asarray(read((config.hidden_size,), "final_norm"), dtype),
        lm_head=None if is_tied else jnp.asarray(read(embedding_shape, "lm_head"), dtype),
        inv_freq=jnp.asarray(rotary_frequencies(config, source.rope_factors())),
    )


def check_tensor_set(source: ModelSource) -> None:
    """Compare the stored tensors with those of a Llama decoder of the configured depth."""
    stored, known = source.tensor_names(), {source.stored_name("lm_head"), "rope_freqs.weight"}
    # One name at a time, so that a corrupted depth of billions ends at the first missing layer.
    for name in required_tensor_names(source):
        if name not in stored:
            raise ModelError(f"{source.path}: tensor {name} is missing, expected {source.config.num_layers} layers")
        known.add(name)
    if unknown := sorted(stored - known):
        raise NotImplementedError(
            f"{source.path}: tensor {unknown[0]} does not belong to a Llama decoder of {source.config.num_layers} "
            f"layers without biases ({len(unknown)} such tensors)"
        )


def required_tensor_names(source: ModelSource) -> Iterator[str]:
    """The stored names of the tensors that every Llama decoder has."""
    yield source.stored_name("embed")
    yield source.stored_name("final_norm")
    for layer in range(source.config.num_layers):
        for field in DecoderLayer._fields:
            yield source.stored_name(field, layer)


def rotary_frequencies(config: LlamaConfig, factors: np.ndarray | None) -> np.ndarray:
    """Angle per position of each rotated pair, f32 `[D/2]`: `theta ** (-2i / D) / factors[i]`."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = config.rope_theta**-exponents
    return (frequencies if factors is None else frequencies / factors).astype(np.float32)
