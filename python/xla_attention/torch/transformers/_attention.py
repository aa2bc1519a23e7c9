"""The attention interface: a layer's call of transformers as one call of flash_attn_varlen."""

import threading
import weakref
from typing import Any

import torch

from ..._options import reject_dropout
from .._flash_attn_varlen import flash_attn_varlen
from ..flash_attn_interface._attention import padded, starts
from ._mask import form_of, starts_of

_FUNCTION = "xla_attention"
# Arguments that change the result and that there is no kernel for, with what to do instead.
_UNSUPPORTED = {
    "output_attentions": "there is no matrix of attention weights; use attn_implementation='eager'",
    "position_bias": "there is no bias other than ALiBi; use attn_implementation='sdpa' or 'eager'",
    "block_table": "keys are gathered from the pages instead; leave max_blocks_per_request at 0",
}


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,  # noqa: ANN401
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    deterministic: bool | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, None]:
    """The attention of a layer; the parameters are those of transformers' attention functions.

    query is ``[B, Hq, T, D]``, key and value are ``[B, Hkv, S, D]``, and the result is ``[B, T, Hq, Dv]``.
    """
    reject_dropout(_FUNCTION, "dropout (the model's attention_dropout in training)", dropout)
    for name, advice in _UNSUPPORTED.items():
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise NotImplementedError(f"{_FUNCTION}: {name} is not supported; {advice}")
    if cache is not None:
        # A cache of continuous batching, which sets cu_seq_lens_k of this layer in kwargs.
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    q, k, v = (padded(x.transpose(1, 2)) for x in _cast(query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and getattr(getattr(module, "config", None), "is_causal", None) is not False
    window = -1 if sliding_window is None else sliding_window - 1
    options = {
        "softmax_scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "causal": causal,
        "window": (window, window),
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "deterministic": torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
    }
    form, mask = _form(attention_mask, q, k, sliding_window)
    if cu_seq_lens_q is not None:
        if form not in ("all", "packed"):
            raise ValueError(f"{_FUNCTION}: attention_mask is given beside cu_seq_lens_q; packed rows have no padding")
        cu_seq_lens_k = kwargs.get("cu_seq_lens_k")
        longest = {f"max_seqlen_{x}": kwargs.get(f"max_length_{x}") for x in ("q", "k")}
        hints = {name: length for name, length in longest.items() if isinstance(length, int)}
        cu_seqlens = (cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k)
        out = _packed(q, k, v, *cu_seqlens, options | hints)
    elif form == "tokens":
        out = _compacted(q, k, v, mask, options)
    elif form == "ranges":
        out = _dense(q, k, v, mask, options)
    else:
        cu_seqlens = mask[0] if form == "packed" else _packed_positions(position_ids, q, k)
        out = (
            _dense(q, k, v, None, options) if cu_seqlens is None else _packed(q, k, v, cu_seqlens, cu_seqlens, options)
        )
    return out[..., : value.shape[-1]], None


def attention_of_packed_rows(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, None]:
    """`attention` in continuous batching, where every call has `cu_seq_lens_q` and no mask is made."""
    if cu_seq_lens_q is None:
        raise ValueError(
            f"{_FUNCTION}: a call without cu_seq_lens_q within continuous_batching, which is for generate_batch alone"
        )
    return attention(module, query, key, value, attention_mask, cu_seq_lens_q=cu_seq_lens_q, **kwargs)


def _form(
    attention_mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, sliding_window: int | None
) -> tuple[str, torch.Tensor | None]:
    """The form of a mask, see `_mask`, and its content."""
    if attention_mask is None:
        return "all", None
    form = form_of(attention_mask, *q.shape[:2], k.shape[1])
    if form is None:
        raise NotImplementedError(
            f"{_FUNCTION}: attention_mask has shape {list(attention_mask.shape)} in a layer, a mask of queries and "
            "keys; expected padding [batch, keys] in the model, or attn_implementation='sdpa' or 'eager'"
        )
    if attention_mask.shape[2] == 2 and sliding_window is None:
        raise NotImplementedError(
            f"{_FUNCTION}: the model's mask has a sliding window, and the layer passes no sliding_window; use "
            "attn_implementation='sdpa' or 'eager'"
        )
    if attention_mask.shape[2] == 2 and form == "tokens":
        raise NotImplementedError(
            f"{_FUNCTION}: attention_mask hides tokens between others, and the layer has a sliding window, which "
            "counts them; expected padding on the left or right: use attn_implementation='sdpa' or 'eager'"
        )
    return form, attention_mask[:, :, 0, 0]


def _cast(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands in autocast's dtype where it is enabled, as torch's own attention takes them."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return operands
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in operands)


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention of the sequences that are packed in the rows of the batch."""
    out = flash_attn_varlen(*(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens_q, cu_seqlens_k, **options)
    return out.unflatten(0, q.shape[:2])


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """Attention of each sequence over its range of valid keys, see `_mask`; over all of them by default."""
    (batch, length_q), length_k = q.shape[:2], k.shape[1]
    leftpad_k, seqused_k, seqused_q = (None, None, None) if ranges is None else ranges
    lengths = {"max_seqlen_q": length_q, "max_seqlen_k": length_k, "leftpad_k": leftpad_k, "seqused_q": seqused_q}
    cu_seqlens_q = starts(batch, length_q, q.device)
    rows = q.flatten(0, 1)
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if length_q < length_k and not needs_gradient and q.device.type != "xla":
        # A cache is [B, Hkv, S, D] in memory: as pages it is read in place, as packed rows it would be copied.
        pages = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
        lens = seqused_k if ranges is not None else torch.full_like(pages[:, 0], length_k)
        out = flash_attn_varlen(rows, k, v, cu_seqlens_q, seqused_k=lens, block_table=pages, **lengths, **options)
    else:
        cu_seqlens_k = cu_seqlens_q if length_k == length_q else starts(batch, length_k, q.device)
        keys = (x.flatten(0, 1) for x in (k, v))
        out = flash_attn_varlen(rows, *keys, cu_seqlens_q, cu_seqlens_k, seqused_k=seqused_k, **lengths, **options)
    return out.unflatten(0, (batch, length_q))


def _compacted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Attention of the valid queries over the valid keys, which are moved to the front first."""
    length_q, length_k = q.shape[1], k.shape[1]
    valid = valid.bool()
    orders = [(~x).int().argsort(dim=-1, stable=True) for x in valid.split([length_k, length_q], -1)]
    batch = torch.arange(q.shape[0], device=q.device)[:, None]
    counts = [x.sum(-1) for x in valid.split([length_k, length_q], -1)]
    ranges = torch.stack([torch.zeros_like(counts[0]), *counts]).int()
    out = _dense(q[batch, orders[1]], k[batch, orders[0]], v[batch, orders[0]], ranges, options)
    return out[batch, orders[1].argsort(-1)]


class _Packing(threading.local):
    """Whether the positions of the last call, the same in all layers of a model, are those of packed sequences."""

    positions: weakref.ref | None = None
    version: int = 0
    cu_seqlens: torch.Tensor | None = None


_PACKING = _Packing()


def _packed_positions(position_ids: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """`cu_seqlens` of a batch of one row in which positions start again, as transformers' flash attention has it.

    Where there is a cache, even an empty one, transformers does not look for packed sequences when it makes masks.
    """
    if position_ids is None or position_ids.dim() != 2 or q.shape[0] != 1 or not 1 < q.shape[1] == k.shape[1]:
        return None
    if position_ids.shape != q.shape[:2] or torch.compiler.is_compiling():
        return None
    version = None if position_ids.is_inference() else position_ids._version
    known = _PACKING.positions
    if version is None or known is None or known() is not position_ids or _PACKING.version != version:
        begins = position_ids == position_ids.min()
        begins[:, 0] = True
        cu_seqlens = starts_of(begins)
        _PACKING.positions, _PACKING.version = weakref.ref(position_ids), version
        _PACKING.cu_seqlens = None if len(cu_seqlens) == 2 else cu_seqlens
    return _PACKING.cu_seqlens
