"""Validation and conversion of options that are Python values in every front-end."""

import operator
from collections.abc import Sequence

import numpy as np

# The attribute kv_layout: docs/semantics.md#kv-caches.
_LAYOUTS = {
    None: np.int64(0),  # K and V in two buffers
    "interleaved": np.int64(1),  # [P, page_size, 2*Hkv, D], K of head h at 2h, V at 2h+1
    "stacked": np.int64(2),  # [2, P, page_size, Hkv, D], as vLLM has it
    "per_page": np.int64(3),  # [P, 2, page_size, Hkv, D], as FlashInfer has it
}


def kv_layout_number(name: str | None) -> np.int64:
    """The attribute ``kv_layout``; None where K and V are in two buffers."""
    if name not in _LAYOUTS:
        raise ValueError(
            f"kv_layout is {name!r}, expected 'interleaved', 'stacked' or 'per_page', or None for K and V apart"
        )
    return _LAYOUTS[name]


def length_hint(length: int) -> np.int64:
    """The attribute ``max_seqlen_q`` or ``max_seqlen_k``: rounded up to a power of two, so that few programs differ.

    0 stands for unknown. A negative number is kept, and the library rejects it. The result is at most 2^62.
    """
    return np.int64(length if length <= 0 else min(1 << (length - 1).bit_length(), 1 << 62))


def reject_kv_layout(kv_layout: str | None) -> None:
    """Raise ValueError for a `kv_layout` beside a cache in two buffers."""
    if kv_layout is not None:
        raise ValueError(f"kv_layout is {kv_layout!r}, which K and V apart do not have")


def validate_sliding_window(sliding_window: int | None, target: str = "") -> None:
    """Raise ValueError for a window that is too small for the query's own key."""
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"{target}sliding_window is {sliding_window}, expected >= 1, or None")


def window_pair(window: Sequence[int], target: str = "xla_gpu_flash_attn_varlen") -> tuple[int, int]:
    """The window of a call of `target` as (left, right); anything else is a ValueError."""
    try:
        left, right = map(operator.index, window)
    except (TypeError, ValueError):
        text = f"{target}: window is {window!r}, expected (left, right), two integers, -1 for no limit"
        raise ValueError(text) from None
    return left, right


def reject_dropout(function: str, name: str, rate: object) -> None:
    """Raise NotImplementedError for a dropout rate, the argument `name` of `function`, other than 0."""
    try:
        is_zero = bool(rate == 0)
    except TypeError:  # a value that JAX traces
        is_zero = False
    if not is_zero:
        raise NotImplementedError(f"{function}: there is no dropout; {name} is {rate}, expected 0")


def validate_values(v: object, kv_layout: str | None, a_value: str) -> None:
    """Raise ValueError unless exactly one of `v` and `kv_layout` is given; `a_value` describes a `v` in the error."""
    if (v is None) == (kv_layout is None):
        expected = a_value if v is None else "None: with kv_layout k holds the values too"
        raise ValueError(f"xla_gpu_flash_attn_varlen: v is {'None' if v is None else a_value}, expected {expected}")


def require_key_lengths(block_table: object, seqused_k: object) -> None:
    """Raise ValueError for paged keys without `seqused_k`, in a call without `cu_seqlens_k`."""
    if block_table is not None and seqused_k is None:
        raise ValueError("xla_gpu_flash_attn_varlen: a block_table needs seqused_k or cu_seqlens_k, which tell lengths")


def unsupported_gradient(*, in_pages: bool, is_scaled: bool) -> str | None:
    """Why a call of flash_attn_varlen has no gradient, to follow "there is no gradient"; None if it has one."""
    if in_pages:
        return "through keys in pages; pass packed keys [Tk, Hkv, D]"
    if is_scaled:
        return "of a call with q_scale, k_scale or v_scale; multiply q, k or v, or softmax_scale"
    return None


# Bits per word of `tree_mask`.
TREE_WORD_BITS = 32


def wrong_tree_dtype(dtype: object) -> TypeError:
    """The error for a `tree_mask` that is neither i32 nor u32."""
    return TypeError(f"tree_mask has dtype {dtype}, expected int32 or uint32; pack_tree_mask packs booleans")


def tree_words(shape: Sequence[int], dtype: object, *, is_bool: bool) -> int:
    """The words per row of what `pack_tree_mask` packs; a ValueError for other than ``bool[..., q_max, q_max]``."""
    if not is_bool or len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f"pack_tree_mask: mask is {dtype}{list(shape)}, expected booleans [..., q_max, q_max]")
    return -(-shape[-1] // TREE_WORD_BITS)
