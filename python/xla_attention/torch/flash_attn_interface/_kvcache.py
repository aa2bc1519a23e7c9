"""flash_attn_with_kvcache: new tokens are rotated and stored in a cache, and queries attend to it."""

import math
from typing import NamedTuple

import torch

from .._kv_cache_update import update_cache_
from ._attention import Options, attention, padded, require_shape, returned_lse, starts
from ._rotary import rotated

_FUNCTION = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over a cache that may grow, as ``flash_attn.flash_attn_with_kvcache`` of flash-attn 2.8.3 computes it.

    With `k` and `v`, the new tokens are written to the caches in place, at the positions from ``cache_seqlens[b]`` on,
    and the queries attend to them too. With `rotary_cos` and `rotary_sin`, the new keys are rotated by their positions.
    The queries are rotated by the positions ``cache_seqlens[b] + i`` if the mask is causal or has a window that is
    shorter than the cache, otherwise all by ``cache_seqlens[b]``. There is no gradient.

    ``docs/semantics.md#kv_cache_update`` and ``docs/semantics.md#attention`` define the two steps.

    Parameters
    ----------
    q : Tensor
        ``[B, S, Hq, D]``, f16, bf16 or f32.
    k_cache, v_cache : Tensor
        ``[Bc, Sc, Hkv, D]`` and ``[Bc, Sc, Hkv, Dv]``, with at least B rows if there is no `cache_batch_idx`; with a
        `block_table` pages ``[P, page_size, Hkv, D]`` and ``[P, page_size, Hkv, Dv]`` of any size (in flash-attn a
        multiple of 256). On CPU and CUDA they may have any strides with a contiguous last dimension.
    k, v : Tensor, optional
        ``[B, S_new, Hkv, D]`` and ``[B, S_new, Hkv, Dv]``. A token past the end of its sequence's cache is not stored.
    rotary_cos, rotary_sin : Tensor, optional
        ``[S_ro, rotary_dim / 2]``, with a row for each position of the cache; only with `k` and `v`.
    cache_seqlens : int or Tensor, optional
        ``i32[B]``: the keys of each sequence in the cache, without the new ones; one number for all. The whole cache by
        default; needed with `k` and `v`.
    cache_batch_idx : Tensor, optional
        ``i32[B]``: the row of the cache that holds each sequence; ``0, 1, ...`` by default. Not with a `block_table`.
    cache_leftpad : Tensor, optional
        ``i32[B]``: the index of each sequence's first key. The keys before it are hidden, and `cache_seqlens` counts
        them. In flash-attn not with a `block_table`.
    block_table : Tensor, optional
        ``i32[B, M]``: the pages of each sequence, in order.
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As for `flash_attn_func`.
    rotary_interleaved : bool
        Whether elements 2m and 2m + 1 are rotated together (GPT-J), or m and ``m + rotary_dim / 2`` (GPT-NeoX, Llama).
    num_splits : int
        Accepted and ignored: the library splits long sequences itself.
    return_softmax_lse : bool
        Whether to return `softmax_lse` too.

    Returns
    -------
    out : Tensor
        ``[B, S, Hq, Dv]``; 0 in rows that attend to no key.
    softmax_lse : Tensor
        ``f32[B, Hq, S]``: natural logarithm of the softmax denominators, +inf in rows that attend to no key. Only with
        ``return_softmax_lse=True``.

    Raises
    ------
    ValueError
        Shapes, dtypes, devices or options do not fit together; the text names the argument and what was expected.
    NotImplementedError
        A dtype or head dimension that there is no kernel for; a gradient.

    Examples
    --------
    One new token for each of two sequences, which have 5 and 9 tokens.

    >>> import torch
    >>> from xla_attention.torch.flash_attn_interface import flash_attn_with_kvcache
    >>> k_cache, v_cache, lens = torch.zeros(2, 16, 2, 64), torch.zeros(2, 16, 2, 64), torch.tensor([5, 9])
    >>> q, k, v = torch.randn(2, 1, 8, 64), torch.ones(2, 1, 2, 64), torch.ones(2, 1, 2, 64)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, causal=True).shape
    torch.Size([2, 1, 8, 64])
    >>> v_cache[:, :, 0, 0].nonzero().tolist()
    [[0, 5], [1, 9]]
    """
    del num_splits
    options = Options(_FUNCTION, softmax_scale, causal, window_size, softcap, alibi_slopes)
    require_shape(_FUNCTION, "q", q, ("batch", "seqlen", "nheads", "headdim"))
    batch, length_q = q.shape[:2]
    cache = _cache(k_cache, v_cache, _block_table(q, k_cache, cache_batch_idx, block_table))
    lens = _lengths(q, cache, cache_seqlens)
    if k is None and v is None:
        if rotary_cos is not None or rotary_sin is not None:
            raise ValueError(f"{_FUNCTION}: rotary_cos and rotary_sin need k and v, the new keys and values")
    else:
        _require_new_tokens(cache, batch, k, v, cache_seqlens)
        positions = lens[:, None]
        if rotary_cos is not None or rotary_sin is not None:
            tables = _tables(rotary_cos, rotary_sin, q.shape[-1], cache.capacity)
            advances = causal or any(0 <= size < cache.capacity for size in options.window())
            k = rotated(k, positions + _arange(k), *tables, interleaved=rotary_interleaved)
            q = rotated(q, positions + _arange(q) * advances, *tables, interleaved=rotary_interleaved)
        _append(cache, k, v, positions + _arange(k))
        lens = lens + k.shape[1]
    out, lse = attention(
        options,
        q.flatten(0, 1),
        cache.k,
        cache.v,
        starts(batch, length_q, q.device),
        max_seqlen_q=length_q,
        seqused_k=lens,
        block_table=cache.block_table,
        leftpad_k=cache_leftpad,
    )
    out = out.unflatten(0, (batch, length_q))
    return (out, returned_lse(lse, batch)) if return_softmax_lse else out


class _Cache(NamedTuple):
    """K and V in pages; a cache without a `block_table` has one page per sequence."""

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    capacity: int  # the number of keys that a sequence has room for


def _cache(k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor) -> _Cache:
    sizes = ("batch_or_blocks", "seqlen_or_page_size", "nheads_k", "headdim")
    require_shape(_FUNCTION, "k_cache", k, sizes)
    require_shape(_FUNCTION, "v_cache", v, (*k.shape[:3], "headdim_v"))
    return _Cache(k, v, block_table, block_table.shape[1] * k.shape[1])


def _append(cache: _Cache, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
    """Store new tokens at these positions of their sequences; those without a place are skipped."""
    if not k.numel() or not cache.capacity:
        return
    page_size = cache.k.shape[1]
    entries = (positions // page_size).clamp(0, cache.block_table.shape[1] - 1)
    slots = cache.block_table.gather(1, entries).long() * page_size + positions % page_size
    slots = slots.masked_fill((positions < 0) | (positions >= cache.capacity), -1).flatten()
    stored = [padded(x) for x in (cache.k, cache.v)]
    update_cache_(tuple(stored), padded(k).flatten(0, 1), padded(v).flatten(0, 1), slots)
    for own, updated in zip((cache.k, cache.v), stored, strict=True):
        if updated is not own:  # a copy with a padded head dimension
            own.copy_(updated[..., : own.shape[-1]])


def _arange(x: torch.Tensor) -> torch.Tensor:
    """``0, 1, ...`` for the tokens of ``[B, S, H, D]``."""
    return torch.arange(x.shape[1], device=x.device)


def _block_table(
    q: torch.Tensor, k_cache: torch.Tensor, cache_batch_idx: torch.Tensor | None, block_table: torch.Tensor | None
) -> torch.Tensor:
    batch = q.shape[0]
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError(f"{_FUNCTION}: cache_batch_idx is given beside a block_table, expected None")
        require_shape(_FUNCTION, "block_table", block_table, (batch, "max_num_blocks_per_seq"))
        return block_table
    if cache_batch_idx is not None:
        require_shape(_FUNCTION, "cache_batch_idx", cache_batch_idx, (batch,))
        return cache_batch_idx[:, None]
    if k_cache.shape[0] < batch:
        raise ValueError(
            f"{_FUNCTION}: k_cache has shape {list(k_cache.shape)}, expected at least {batch} rows, one per sequence "
            "of q, or a cache_batch_idx or block_table"
        )
    return torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]


def _lengths(q: torch.Tensor, cache: _Cache, cache_seqlens: int | torch.Tensor | None) -> torch.Tensor:
    """`cache_seqlens` as a tensor."""
    if isinstance(cache_seqlens, torch.Tensor):
        require_shape(_FUNCTION, "cache_seqlens", cache_seqlens, (q.shape[0],))
        return cache_seqlens
    length = cache.capacity if cache_seqlens is None else cache_seqlens
    return torch.full(q.shape[:1], length, dtype=torch.int32, device=q.device)


def _require_new_tokens(
    cache: _Cache,
    batch: int,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
) -> None:
    if k is None or v is None:
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{_FUNCTION}: {given} is given without {missing}, expected both or none")
    if cache_seqlens is None:
        raise ValueError(f"{_FUNCTION}: cache_seqlens is None, expected lengths: k and v are stored behind them")
    require_shape(_FUNCTION, "k", k, (batch, "seqlen_new", *cache.k.shape[2:]))
    require_shape(_FUNCTION, "v", v, (batch, k.shape[1], *cache.v.shape[2:]))


def _tables(
    cos: torch.Tensor | None, sin: torch.Tensor | None, head_dim: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_cos` and `rotary_sin`, validated."""
    if cos is None or sin is None:
        given, missing = ("rotary_sin", "rotary_cos") if cos is None else ("rotary_cos", "rotary_sin")
        raise ValueError(f"{_FUNCTION}: {given} is given without {missing}, expected both or none")
    require_shape(_FUNCTION, "rotary_cos", cos, ("seqlen_ro", "rotary_dim / 2"))
    require_shape(_FUNCTION, "rotary_sin", sin, cos.shape)
    length, half = cos.shape
    if length < capacity or 2 * half > head_dim:
        raise ValueError(
            f"{_FUNCTION}: rotary_cos has shape {list(cos.shape)}, expected at least {capacity} rows, the room of the "
            f"cache, of at most {math.floor(head_dim / 2)} elements"
        )
    return cos, sin
