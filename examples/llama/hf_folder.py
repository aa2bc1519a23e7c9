"""A Hugging Face folder of a Llama-architecture model as a source of hyperparameters and tensors."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from .config import LlamaConfig, ModelError, one_line

GLOBAL_TENSORS = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q_proj": "model.layers.{}.self_attn.q_proj.weight",
    "k_proj": "model.layers.{}.self_attn.k_proj.weight",
    "v_proj": "model.layers.{}.self_attn.v_proj.weight",
    "o_proj": "model.layers.{}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate_proj": "model.layers.{}.mlp.gate_proj.weight",
    "up_proj": "model.layers.{}.mlp.up_proj.weight",
    "down_proj": "model.layers.{}.mlp.down_proj.weight",
}
# A buffer that old checkpoints store; it follows from the configuration.
DERIVED_SUFFIX = "rotary_emb.inv_freq"


class HfModel:
    """One opened folder: config.json and model.safetensors, or shards named by model.safetensors.index.json.

    Attributes
    ----------
        path: the folder.
        config: hyperparameters from config.json.

    Raises `ModelError` for what is missing, damaged or inconsistent, `NotImplementedError` for a sound model of a
    kind that this package does not run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = read_json(path / "config.json")
        architectures = self.settings.get("architectures")
        if architectures != ["LlamaForCausalLM"]:
            raise NotImplementedError(
                f"{path / 'config.json'}: architectures is {architectures}, expected ['LlamaForCausalLM']"
            )
        if (activation := self.settings.get("hidden_act", "silu")) != "silu":
            raise NotImplementedError(f"{path / 'config.json'}: hidden_act is {activation!r}, expected 'silu'")
        self.config = self._read_config()
        self._shards = open_shards(path)
        self._shard_of = {name: shard for shard in self._shards for name in shard.keys()}  # noqa: SIM118 (not a dict)

    def setting(self, key: str, kind: type, default: Any = None) -> Any:
        """The entry `key` of config.json as `kind` (int, float or dict); without a default it must exist."""
        value = self.settings.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.path / 'config.json'}: {key} is missing")
            return default
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.path / 'config.json'}: {key} is {value!r}, expected {kind.__name__}")
        return value

    def tensor_names(self) -> set[str]:
        """Names of all weights stored in the folder."""
        return {name for name in self._shard_of if not name.endswith(DERIVED_SUFFIX)}

    def stored_name(self, field: str, layer: int | None = None) -> str:
        """The folder's name for a field of `LlamaWeights` (layer None) or of `DecoderLayer`."""
        return GLOBAL_TENSORS[field] if layer is None else LAYER_TENSORS[field].format(layer)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`."""
        return tuple(self._shard_of[name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` as f32."""
        stored = self._shard_of[name].get_slice(name).get_dtype()
        if stored not in ("F32", "F16", "BF16"):
            raise NotImplementedError(f"{self.path}: tensor {name} has dtype {stored}, expected F32, F16 or BF16")
        return self._shard_of[name].get_tensor(name).astype(np.float32)

    def rope_factors(self) -> np.ndarray | None:
        """The divisors of the rotary frequencies, f32 `[D/2]`; None when the model does not scale them."""
        scaling = self.setting("rope_scaling", dict, {}) or self.setting("rope_parameters", dict, {})
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return None
        try:
            if kind == "linear":
                return np.full(self.config.head_dim // 2, scaling["factor"], np.float32)
            if kind == "llama3":
                return llama3_rope_factors(self.config, scaling)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{self.path / 'config.json'}: rope scaling {scaling} is not usable: {one_line(error)}"
            ) from error
        raise NotImplementedError(
            f"{self.path / 'config.json'}: rope_type is {kind!r}, supported are default, linear and llama3"
        )

    def _read_config(self) -> LlamaConfig:
        hidden_size = self.setting("hidden_size", int)
        num_heads = self.setting("num_attention_heads", int)
        rope_theta = self.setting("rope_parameters", dict, {}).get("rope_theta", 10000.0)
        if not isinstance(rope_theta, int | float):
            raise ModelError(f"{self.path / 'config.json'}: rope_theta is {rope_theta!r}, expected a number")
        try:
            return LlamaConfig(
                num_layers=self.setting("num_hidden_layers", int),
                hidden_size=hidden_size,
                intermediate_size=self.setting("intermediate_size", int),
                num_heads=num_heads,
                num_kv_heads=self.setting("num_key_value_heads", int, num_heads),
                head_dim=self.setting("head_dim", int, hidden_size // max(num_heads, 1)),
                vocab_size=self.setting("vocab_size", int),
                context_length=self.setting("max_position_embeddings", int),
                rms_norm_eps=self.setting("rms_norm_eps", float),
                rope_theta=self.setting("rope_theta", float, float(rope_theta)),
            )
        except ModelError as error:
            raise error if str(self.path) in str(error) else ModelError(f"{self.path}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object stored in the JSON file at `path`; `ModelError` if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def open_shards(path: Path) -> list[Any]:
    """Open the folder's safetensors files: those that the index names, otherwise model.safetensors."""
    from safetensors import SafetensorError, safe_open  # only folders need the package

    index_path = path / "model.safetensors.index.json"
    file_names = ["model.safetensors"]
    if index_path.exists():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index_path}: weight_map is missing")
        for tensor, name in weight_map.items():
            # The index is untrusted: it may only name files in the folder.
            if not isinstance(name, str) or name in ("", ".", "..") or set(name) & {"/", "\\", ":", "\0"}:
                raise ModelError(f"{index_path}: the file of {tensor} is {name!r}, expected a name without a folder")
        file_names = sorted(set(weight_map.values()))
    shards = []
    for file_name in file_names:
        try:
            shards.append(safe_open(path / file_name, framework="numpy"))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path / file_name}: cannot be read as safetensors: {one_line(error)}") from error
    return shards


def llama3_rope_factors(config: LlamaConfig, scaling: dict[str, Any]) -> np.ndarray:
    """Llama 3's divisors f32 `[D/2]`: 1 for short wavelengths, `factor` for long ones, blended between."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original_length = float(scaling["original_max_position_embeddings"])
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    wavelengths = 2 * math.pi * config.rope_theta**exponents
    # blend 0 keeps the scaled frequency, 1 the original one
    blend = np.clip((original_length / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - blend) / factor + blend)).astype(np.float32)
