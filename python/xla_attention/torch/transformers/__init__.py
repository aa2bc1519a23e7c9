"""Attention of models of Hugging Face transformers, as ``attn_implementation="xla_attention"``.

Needs transformers 5.23 or newer, which is imported when `register` is called. ``docs/transformers.md`` says what is
supported.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from ._attention import attention, attention_of_packed_rows
from ._mask import mask

__all__ = ["continuous_batching", "register"]

_NAME = "xla_attention"
# transformers batches continuously only with implementations that have "flash" in their names.
_FLASH_NAME = "xla_flash_attention"


def register() -> None:
    """Make ``attn_implementation="xla_attention"`` work in transformers.

    Afterwards models of the process may be loaded with it or switched to it, by ``from_pretrained``, ``from_config`` or
    ``set_attn_implementation``. It calls ``register`` of transformers' ``AttentionInterface`` and
    ``AttentionMaskInterface`` and replaces nothing. A second call has no effect.

    Raises
    ------
    ImportError
        There is no transformers, or one without these interfaces.
    NotImplementedError
        Raised by a model's forward call for what is not supported: dropout, a matrix of attention weights
        (``output_attentions``), masks other than causal or bidirectional ones with padding, packing and a sliding
        window, a position bias.

    Examples
    --------
    ::

        from transformers import AutoModelForCausalLM
        import xla_attention.torch

        xla_attention.torch.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="xla_attention")
    """
    import transformers

    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        version = transformers.__version__
        raise ImportError(
            f"xla_attention.torch.transformers: transformers {version} has no AttentionMaskInterface, expected 5.23 or "
            "newer"
        ) from None
    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, mask)
    AttentionInterface.register(_FLASH_NAME, attention_of_packed_rows)
    AttentionMaskInterface.register(_FLASH_NAME, functools.partial(mask, beside_cu_seqlens=True))


@contextlib.contextmanager
def continuous_batching(model: Any) -> Iterator[None]:  # noqa: ANN401
    """Let a model's ``generate_batch`` and its continuous batching manager use this attention.

    transformers refuses to batch continuously with an implementation whose name has no "flash" in it. Within the
    context, the model's implementation has such a name. transformers then gathers the keys of each sequence from its
    paged cache; its fused path with block tables is for flash-attn alone.

    Parameters
    ----------
    model : transformers.PreTrainedModel

    Raises
    ------
    ValueError
        The model's implementation is another one.

    Examples
    --------
    ::

        with xla_attention.torch.transformers.continuous_batching(model):
            outputs = model.generate_batch(inputs, generation_config)
    """
    name = model.config._attn_implementation
    if name != _NAME:
        raise ValueError(
            f"continuous_batching: the model's attn_implementation is {name!r}, expected {_NAME!r}: "
            f"model.set_attn_implementation({_NAME!r})"
        )
    model.config._attn_implementation = _FLASH_NAME
    try:
        yield
    finally:
        model.config._attn_implementation = name
