"""A Llama-architecture GGUF file as a source of hyperparameters, tensors and tokenizer metadata."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize

from .config import LlamaConfig, ModelError, one_line

# More than any real vocabulary or merge list. For a corrupted length above it, the reader would create a Python object
# per byte of the file before it fails.
MAX_ARRAY_LENGTH = 1 << 22

GLOBAL_TENSORS = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}
LAYER_TENSORS = {
    "attn_norm": "blk.{}.attn_norm.weight",
    "q_proj": "blk.{}.attn_q.weight",
    "k_proj": "blk.{}.attn_k.weight",
    "v_proj": "blk.{}.attn_v.weight",
    "o_proj": "blk.{}.attn_output.weight",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "gate_proj": "blk.{}.ffn_gate.weight",
    "up_proj": "blk.{}.ffn_up.weight",
    "down_proj": "blk.{}.ffn_down.weight",
}
ROPE_FACTORS = "rope_freqs.weight"


class BoundedReader(GGUFReader):
    """`GGUFReader` that raises at a read past the end of the file, for which its parent returns fewer elements."""

    def _get(self, offset, dtype, count=1, override_order=None):  # noqa: ANN001, ANN202 (the parent's signature)
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > self.data.size:
            raise ValueError(f"it ends at byte {self.data.size}, an entry reaches to byte {end}")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs, raw_type):  # noqa: ANN001, ANN202 (the parent's signature)
        if raw_type == GGUFValueType.ARRAY:
            # An array is: u32 element type, u64 length, elements.
            length = int(self._get(orig_offs + 4, np.uint64)[0])
            if length > MAX_ARRAY_LENGTH:
                raise ValueError(f"a metadata array has {length} elements, expected at most {MAX_ARRAY_LENGTH}")
        return super()._get_field_parts(orig_offs, raw_type)


class GgufModel:
    """One opened GGUF file.

    Attributes
    ----------
        path: the file.
        config: hyperparameters from the metadata.

    Raises `ModelError` for a file that is missing, damaged or inconsistent, `NotImplementedError` for a sound file
    of a kind that this package does not run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = open_reader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.metadata("general.architecture", str)
        if architecture != "llama":
            raise NotImplementedError(f"{path}: general.architecture is {architecture!r}, expected 'llama'")
        self.config = self._read_config()

    def metadata(self, key: str, kind: type, default: Any = None) -> Any:
        """The metadata value `key` as `kind` (int, float, bool, str or list); without a default it must exist."""
        field = self._reader.fields.get(key)
        if field is None:
            if default is None:
                raise ModelError(f"{self.path}: metadata key {key} is missing")
            return default
        try:
            value = field.contents()
        except (ValueError, IndexError) as error:
            raise ModelError(f"{self.path}: metadata key {key} cannot be read: {one_line(error)}") from error
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.path}: metadata key {key} is a {type(value).__name__}, expected {kind.__name__}")
        return value

    def tensor_names(self) -> set[str]:
        """Names of all tensors stored in the file."""
        return set(self._tensors)

    def stored_name(self, field: str, layer: int | None = None) -> str:
        """The file's name for a field of `LlamaWeights` (layer None) or of `DecoderLayer`."""
        return GLOBAL_TENSORS[field] if layer is None else LAYER_TENSORS[field].format(layer)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`, outermost dimension first."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))  # GGUF lists the innermost first

    def read(self, name: str) -> np.ndarray:
        """Tensor `name` dequantised to f32, rows outermost: a matrix is `[out_features, in_features]`."""
        tensor = self._tensors[name]
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # the caller rejects values that are not finite
                values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{self.path}: tensor {name} has type {tensor.tensor_type.name}: {error}"
            ) from None
        # llama.cpp's rotary embedding rotates neighbouring rows (2i, 2i + 1), so its converter stores the rows of q and
        # k of each head in the order 0, D/2, 1, D/2 + 1, ... The order of the checkpoint is 0 .. D - 1.
        if name.endswith("attn_q.weight"):
            return restore_rotary_rows(values, self.config.num_heads)
        if name.endswith("attn_k.weight"):
            return restore_rotary_rows(values, self.config.num_kv_heads)
        return values

    def rope_factors(self) -> np.ndarray | None:
        """The divisors of the rotary frequencies, f32 `[D/2]`; None when the model does not scale them."""
        half = self.config.head_dim // 2
        if ROPE_FACTORS in self._tensors:
            factors = self.read(ROPE_FACTORS)
            if factors.shape != (half,):
                raise ModelError(
                    f"{self.path}: tensor {ROPE_FACTORS} has shape {list(factors.shape)}, expected [{half}]"
                )
            return factors
        scaling = self.metadata("llama.rope.scaling.type", str, "none")
        if scaling == "none":
            return None
        if scaling == "linear":
            return np.full(half, self.metadata("llama.rope.scaling.factor", float), np.float32)
        raise NotImplementedError(f"{self.path}: llama.rope.scaling.type is {scaling!r}, supported are none and linear")

    def _read_config(self) -> LlamaConfig:
        if self.metadata("llama.expert_count", int, 0):
            raise NotImplementedError(f"{self.path}: a mixture of experts (llama.expert_count), expected a dense model")
        embedding = GLOBAL_TENSORS["embed"]
        if embedding not in self._tensors or len(self.shape(embedding)) != 2:
            raise ModelError(f"{self.path}: tensor {embedding} of shape [vocab_size, hidden_size] is missing")
        hidden_size = self.metadata("llama.embedding_length", int)
        num_heads = self.metadata("llama.attention.head_count", int)
        if num_heads < 1 or (hidden_size % num_heads and "llama.attention.key_length" not in self._reader.fields):
            raise ModelError(
                f"{self.path}: llama.attention.head_count is {num_heads}, "
                f"expected a divisor of llama.embedding_length = {hidden_size}"
            )
        head_dim = self.metadata("llama.attention.key_length", int, hidden_size // num_heads)
        for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
            if (value := self.metadata(key, int, head_dim)) != head_dim:
                raise NotImplementedError(f"{self.path}: {key} is {value}, expected the head dimension {head_dim}")
        try:
            return LlamaConfig(
                num_layers=self.metadata("llama.block_count", int),
                hidden_size=hidden_size,
                intermediate_size=self.metadata("llama.feed_forward_length", int),
                num_heads=num_heads,
                num_kv_heads=self.metadata("llama.attention.head_count_kv", int, num_heads),
                head_dim=head_dim,
                vocab_size=self.shape(embedding)[0],
                context_length=self.metadata("llama.context_length", int),
                rms_norm_eps=self.metadata("llama.attention.layer_norm_rms_epsilon", float),
                rope_theta=self.metadata("llama.rope.freq_base", float, 10000.0),
            )
        except ModelError as error:
            raise error if str(self.path) in str(error) else ModelError(f"{self.path}: {error}") from None


def open_reader(path: Path) -> BoundedReader:
    """Parse header, metadata and tensor table of the file at `path`; `ModelError` if that fails in any way."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file: it begins with {magic!r}, expected b'GGUF'")
    try:
        with np.errstate(all="raise"):  # a damaged offset overflows
            return BoundedReader(path)
    except Exception as error:  # the reader raises all kinds of exceptions for a damaged file
        raise ModelError(f"{path}: corrupted or truncated GGUF file: {one_line(error)}") from error


def restore_rotary_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows of `weight` `[num_heads * D, E]` from llama.cpp's order (0, D/2, 1, ...) to 0 .. D - 1 per head."""
    # rows: [head, pair, half] -> [head, half, pair]
    return weight.reshape(num_heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
