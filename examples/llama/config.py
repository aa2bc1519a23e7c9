"""Hyperparameters of a Llama-architecture decoder, and the one error that loading raises for a bad model."""

from dataclasses import dataclass


class ModelError(ValueError):
    """A model that cannot be read: one line that names the file, what is wrong and what was expected."""


def one_line(error: Exception) -> str:
    """The class and text of an exception of another package, on one line, for the text of a `ModelError`."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of the decoder; construction raises `ModelError` for values that do not fit together."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "context_length",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ModelError(f"{name} is {value}, expected at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_kv_heads is {self.num_kv_heads}, expected a divisor of num_heads = {self.num_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}, expected an even number (rotary embedding rotates pairs)")
        if not 0 < self.rms_norm_eps < 1:
            raise ModelError(f"rms_norm_eps is {self.rms_norm_eps}, expected a number between 0 and 1")
        if not 1 < self.rope_theta < float("inf"):
            raise ModelError(f"rope_theta is {self.rope_theta}, expected a finite number above 1")
