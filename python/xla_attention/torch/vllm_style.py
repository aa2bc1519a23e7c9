"""Attention with the arguments of a vLLM attention backend.

The ``forward`` of a backend gets one step's query, key and value, the layer's cache, and metadata: slots of the new
tokens, block tables and lengths. One call here writes the new tokens and attends.
"""

import torch

from .._options import validate_sliding_window
from ._flash_attn_varlen import flash_attn_varlen
from ._kv_cache_update import update_cache_

__all__ = ["attention"]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    max_query_len: int = 0,
    max_seq_len: int = 0,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    kv_layout: str = "stacked",
) -> torch.Tensor:
    """Write the step's keys and values into the cache, in place, and attend causally over the pages.

    ``docs/semantics.md#kv_cache_update`` and ``docs/semantics.md#flash_attn_varlen`` define the two steps.

    Parameters
    ----------
    query : Tensor
        ``[T, Hq, D]``
    key, value : Tensor
        ``[T, Hkv, D]``
    kv_cache : Tensor
        vLLM's ``[2, P, page_size, Hkv, D]``, or another `kv_layout` of `update_cache_`.
    slot_mapping : Tensor
        ``i32[T]`` or ``i64[T]``: the slot of each token, ``page * page_size + offset``; -1 for padding.
    block_table : Tensor
        ``i32[B, M]``: the pages of each sequence, in order.
    seq_lens : Tensor
        ``i32[B]``: keys per sequence, the new tokens included.
    query_start_loc : Tensor
        ``i32[B + 1]``: the first query row of each sequence and, last, the end.
    scale : float
        Multiplies ``q . k``.
    max_query_len, max_seq_len : int
        Lengths of the longest sequences, 0 for unknown; see `max_seqlen_q` of `flash_attn_varlen`.
    sliding_window : int, optional
        The number of keys that a query attends to, its own included.
    logits_soft_cap, alibi_slopes, sinks, k_scale, v_scale
        As for `flash_attn_varlen`; the scales also divide the keys and values that are stored.

    Returns
    -------
    Tensor
        ``[T, Hq, D]``; 0 in rows of padding.

    Raises
    ------
    ValueError, NotImplementedError
        As for `update_cache_` and `flash_attn_varlen`.

    Examples
    --------
    Two sequences: a prompt of 3 tokens, and the sixth token of another.

    >>> import torch
    >>> from xla_attention.torch import vllm_style
    >>> cache = torch.zeros(2, 4, 16, 2, 64)
    >>> q, k, v = torch.randn(4, 8, 64), torch.randn(4, 2, 64), torch.randn(4, 2, 64)
    >>> slots, table = torch.tensor([16, 17, 18, 37]), torch.tensor([[1], [2]])
    >>> lens, starts = torch.tensor([3, 6]), torch.tensor([0, 3, 4])
    >>> vllm_style.attention(q, k, v, cache, slots, table, lens, starts, scale=0.125).shape
    torch.Size([4, 8, 64])
    """
    validate_sliding_window(sliding_window)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    update_cache_(kv_cache, key, value, slot_mapping, **scales, kv_layout=kv_layout)
    return flash_attn_varlen(
        query,
        kv_cache,
        None,
        query_start_loc,
        max_seqlen_q=max_query_len,
        max_seqlen_k=max_seq_len,
        softmax_scale=scale,
        causal=True,
        window=(-1 if sliding_window is None else sliding_window - 1, -1),
        softcap=0.0 if logits_soft_cap is None else logits_soft_cap,
        seqused_k=seq_lens,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        **scales,
        kv_layout=kv_layout,
    )
