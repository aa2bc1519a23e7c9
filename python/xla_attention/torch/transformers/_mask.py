"""The mask interface: what a forward pass says about padding and packing, for all its layers, as a small tensor.

transformers passes what `mask` returns through the model's layers to `attention`, and may pass it to another forward
pass, which takes a tensor of four dimensions for a finished mask. One of these forms stands for what would be a matrix
of queries and keys:

======================  ==========================================================================================
None                    every key is valid, and the last query stands at the last key
``i32[0, 1, W, 1]``      the same
``i32[1, N + 1, W, 1]``  `cu_seqlens` of N sequences packed in the rows of the batch
``i32[3, B, W, 1]``      of each sequence the first valid key, the end of the valid keys, and the number of queries
``i8[B, S + T, W, 1]``   which of S keys and then which of T queries are valid, in any order
======================  ==========================================================================================

W is 2 under a sliding window that hides keys, and 1 otherwise: the window itself is an argument of `attention`, which
some models leave out.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

MaskFunction = Callable[[Any, Any, Any, Any], Any]

# Inner functions of transformers.masking_utils that a pattern may consist of.
_CAUSAL = "causal_mask_function"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_WINDOWS = {
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
}
_SUPPORTED = {_CAUSAL, "bidirectional_mask_function", _PACKED, *_WINDOWS}
# Functions that apply all of the functions in their closure.
_CONJUNCTIONS = {"and_masks.<locals>.and_mask", "remap_positions_for_packed_sequence.<locals>.inner_mask"}


# Compilers do not see which functions a mask consists of.
@torch.compiler.disable
def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    *,
    beside_cu_seqlens: bool = False,
    **kwargs: Any,  # noqa: ANN401
) -> torch.Tensor | None:
    """The mask of a forward pass; the parameters are those of transformers' mask functions.

    Query i stands at key ``i + q_offset - kv_offset`` of those that the layers get. With `beside_cu_seqlens` the layers
    get `cu_seqlens` too, which say all about the sequences. Nothing is read from the device then: transformers captures
    such forward passes as CUDA graphs.
    """
    patterns = {_CAUSAL: {}} if mask_function is None else dict(_patterns(mask_function))
    unsupported = patterns.keys() - _SUPPORTED
    if unsupported:
        raise NotImplementedError(
            f"xla_attention: the model's mask has the pattern {', '.join(sorted(unsupported))}; expected causal or "
            "bidirectional attention with padding, packed sequences or a sliding window: use "
            "attn_implementation='sdpa' or 'eager'"
        )
    hides = any(variables["sliding_window"] < kv_length for name, variables in patterns.items() if name in _WINDOWS)
    if beside_cu_seqlens:
        if attention_mask is not None:
            raise NotImplementedError("xla_attention: attention_mask is given in continuous batching, expected None")
        form = None
    elif _PACKED in patterns:
        form = _packed(mask_function, batch_size, q_length, device)[None]
    else:
        lengths = (q_length, kv_length, q_offset, kv_offset)
        form = _padded(
            batch_size, *lengths, attention_mask, device, _CAUSAL in patterns, bool(patterns.keys() & _WINDOWS)
        )
    if form is None:
        return torch.empty(0, 1, 2, 1, dtype=torch.int32, device=device) if hides else None
    return form[:, :, None, None].expand(-1, -1, 2 if hides else 1, -1)


def form_of(mask: torch.Tensor, batch_size: int, q_length: int, kv_length: int) -> str | None:
    """Which form a mask has; None for a tensor of another origin."""
    if mask.dim() != 4 or mask.shape[3] != 1 or mask.shape[2] > 2:
        return None
    if mask.dtype == torch.int8:
        return "tokens" if mask.shape[:2] == (batch_size, kv_length + q_length) else None
    if mask.dtype != torch.int32:
        return None
    return {0: "all", 1: "packed", 3: "ranges"}.get(mask.shape[0])


def _padded(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor,
    kv_offset: int,
    attention_mask: torch.Tensor | None,
    device: torch.device | str,
    is_causal: bool,
    has_window: bool,
) -> torch.Tensor | None:
    """The form of a batch with padding, without its last two dimensions."""
    shift = q_offset - kv_offset
    # Static caches have room for more keys than there are.
    end = shift + q_length if is_causal else kv_length
    if attention_mask is None:
        if not isinstance(end, torch.Tensor) and end == kv_length:
            return None
        rows = torch.zeros(3, batch_size, dtype=torch.int32, device=device)
        rows[1], rows[2] = end, q_length
        return rows
    positions = torch.arange(kv_length, device=attention_mask.device)
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    valid = torch.nn.functional.pad(attention_mask.bool(), (0, max(missing, 0)))[:, kv_offset : kv_offset + kv_length]
    if is_causal:
        valid = valid & (positions < end)
    # Where queries and keys are the same tokens and their distance counts, a token that is no key is no query either.
    are_tokens = is_causal or has_window
    first = valid.int().argmax(-1)
    last = first + valid.sum(-1)
    are_ranges = (valid == ((positions >= first[:, None]) & (positions < last[:, None]))).all()
    are_ranges, are_all = torch.stack([are_ranges, valid.all()]).tolist()
    if are_all:
        return None
    if are_ranges:
        queries = (last - shift).clamp(0, q_length) if are_tokens else torch.full_like(last, q_length)
        return torch.stack([first, last, queries]).int()
    queries = valid.new_ones(batch_size, q_length)
    if are_tokens:
        own = torch.arange(q_length, device=valid.device) + shift
        queries = valid[:, own.clamp(0, kv_length - 1)]
    return torch.cat([valid, queries], -1).to(torch.int8)


def _patterns(function: MaskFunction) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions whose conjunction a mask function is: their names and the variables of their closures."""
    name = getattr(function, "__qualname__", repr(function))
    variables = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    if name not in _CONJUNCTIONS:
        yield name, variables
        return
    for inner in variables.get("mask_functions") or (variables["mask_function"],):
        yield from _patterns(inner)


def _packed(mask_function: MaskFunction, batch_size: int, length: int, device: torch.device | str) -> torch.Tensor:
    """`cu_seqlens` of packed sequences: one begins at each token that does not attend to the token before it."""
    rows = torch.arange(batch_size, device=device)[:, None]
    tokens = torch.arange(length, device=device)[None]
    attends = mask_function(rows, torch.zeros_like(rows), tokens, (tokens - 1).clamp(min=0))
    return starts_of(((tokens == 0) | ~attends).expand(batch_size, length))


def starts_of(begins: torch.Tensor) -> torch.Tensor:
    """`cu_seqlens` of packed rows, from whether a sequence begins at each of them."""
    return torch.nn.functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel()).int()
