"""Compare caches of several dtypes by the perplexity of a text: what a language model loses by 8-bit keys and values.

    python examples/quantized_cache.py
    python examples/quantized_cache.py --model path/to/model.gguf --text book.txt --tokens 4096

The text is computed as one prompt through `paged_attention_update`, so that every row attends to keys and values as the
cache has them. The default model is that of `generate.py`, SmolLM2-135M-Instruct. Everything but attention is in f32.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llama.batch import StepBatch
from llama.checkpoint import Checkpoint, default_model_path, load_checkpoint
from llama.model import decoder_layer, rms_norm
from xla_attention.jax import paged_attention_update

PAGE_SIZE = 16
# Rows of logits that are in memory at a time.
LOGIT_ROWS = 256
DEFAULT_TEXT = Path(__file__).parent.parent / "docs" / "semantics.md"


class Kind(NamedTuple):
    """A cache: the dtype of keys and values, and whether each row has a scale."""

    name: str
    dtype: jnp.dtype
    scaled: bool


KINDS = (
    Kind("bfloat16", jnp.bfloat16, scaled=False),
    Kind("int8, a scale per row", jnp.int8, scaled=True),
    Kind("float8_e4m3fn, a scale per row", jnp.float8_e4m3fn, scaled=True),
    Kind("float8_e4m3fn, no scales", jnp.float8_e4m3fn, scaled=False),
)


def attend_over(kind: Kind) -> Callable:
    """`llama.model.update_and_attend` in bf16 over a cache of this kind, a pair of the cache and its scales or None."""

    def attend(cache: tuple, query: jax.Array, key: jax.Array, value: jax.Array, batch: StepBatch) -> tuple:
        kv_cache, scales = cache
        sequences = batch.context_lens, batch.block_tables, batch.query_start_loc, batch.num_seqs
        dtype = kind.dtype if kind.dtype == jnp.bfloat16 else query.dtype
        new = key.astype(dtype), value.astype(dtype), batch.slot_mapping
        options = {"scale": query.shape[-1] ** -0.5, "out_dtype": jnp.float32}
        query = query.astype(jnp.bfloat16)
        out, *cache = paged_attention_update(query, kv_cache, *sequences, *new, kv_scale_cache=scales, **options)
        return out, (*cache, None)[:2]

    return attend


def one_prompt(tokens: np.ndarray) -> StepBatch:
    """The tokens as one sequence in a step."""
    count, pages = len(tokens), -(-len(tokens) // PAGE_SIZE)
    rows = np.arange(count, dtype=np.int32)
    numbers = [[count], [np.arange(pages)], [0, count], [1], [count - 1], [0]]
    return StepBatch(tokens, rows, rows, *(np.asarray(x, np.int32) for x in numbers))


def perplexity(checkpoint: Checkpoint, tokens: np.ndarray, kind: Kind) -> float:
    """Exp of the mean negative log-probability of each token after the first, given those before it."""
    config, weights = checkpoint.config, checkpoint.weights
    batch, attend = one_prompt(tokens), attend_over(kind)
    x = weights.embed[tokens]
    angles = batch.positions[:, None].astype(np.float32) * weights.inv_freq
    rotation = (jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :])
    shape = (batch.block_tables.shape[1], PAGE_SIZE, 2 * config.num_kv_heads, config.head_dim)
    for layer in weights.layers:
        cache = jnp.zeros(shape, kind.dtype), jnp.zeros(shape[:-1]) if kind.scaled else None
        x, _ = decoder_layer(config, attend, layer, cache, x, rotation, batch)
    x = rms_norm(x, weights.final_norm, config.rms_norm_eps)
    head = weights.embed if weights.lm_head is None else weights.lm_head
    total = 0.0
    for first in range(0, len(tokens) - 1, LOGIT_ROWS):
        targets = jnp.asarray(tokens[first + 1 : first + 1 + LOGIT_ROWS])
        log_probabilities = jax.nn.log_softmax(x[first : first + len(targets)] @ head.T)
        total -= float(jnp.take_along_axis(log_probabilities, targets[:, None], 1).sum())
    return float(np.exp(total / (len(tokens) - 1)))


def main(arguments: list[str] | None = None) -> None:
    """Print a table of the caches."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF file or Hugging Face folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, help="the text")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the text, from its beginning")
    options = parser.parse_args(arguments)
    checkpoint = load_checkpoint(options.model or default_model_path(), jnp.float32)
    text = options.text.read_text(encoding="utf-8")
    tokens = np.asarray(checkpoint.tokenizer.encode(text)[: options.tokens], np.int32)
    config = checkpoint.config
    rows = 2 * config.num_layers * config.num_kv_heads
    print(f"{len(tokens)} tokens of {options.text.name}")
    first = None
    for kind in KINDS:
        size = rows * (config.head_dim * jnp.dtype(kind.dtype).itemsize + 4 * kind.scaled)
        found = perplexity(checkpoint, tokens, kind)
        first = first or found
        print(f"{kind.name:32} {size:6} bytes per token, perplexity {found:.4f}, {100 * (found / first - 1):+.3f} %")


if __name__ == "__main__":
    main()
