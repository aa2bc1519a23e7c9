"""mla_paged_attention_update in torch, functional and in place."""

import dataclasses
import functools
from typing import Any

import torch

from .._documentation import documented
from .._options import window_pair
from ._call import Call, Result
from ._define import define, scale_tensor
from ._kv_cache_update import donate, slots
from ._mla_paged_attention import UP_PROJECTED, count_tensor, lower, schema
from ._plan import planned

_TARGET = "xla_gpu_mla_paged_attention_update"


@documented(_TARGET)
@planned
def mla_paged_attention_update(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    c_kv: torch.Tensor,
    k_pe: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    softmax_scale: float,
    num_seqs: torch.Tensor | int | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_scale: torch.Tensor | float | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add the latent rows of new tokens to a paged cache and attend over it, in one call.

    The row of token t is ``c_kv[t]``, then ``k_pe[t]``, as they are: `k_pe` has to be rotated already. The attention is
    that of `mla_paged_attention` over the updated cache, bit for bit, with Dv the columns of `c_kv`. The given cache is
    not modified; `mla_paged_attention_update_` writes to it. ``docs/semantics.md#mla_paged_attention_update`` defines
    the result.

    Parameters
    ----------
    q, cu_seqlens_q, seqused_k, block_table
        As for `mla_paged_attention`.
    kv_cache : Tensor
        ... The slots of the new tokens may hold anything.
    c_kv : Tensor
    k_pe : Tensor
    slot_mapping : Tensor
        ... It has to be the slot where `block_table` has the token's row: otherwise the rows of that sequence, and of
        any other that reads the slot, are unspecified.
    softmax_scale, num_seqs, causal, window, softcap, sinks, max_seqlen_q, max_seqlen_k, batch_invariant, return_lse
        As for `mla_paged_attention`.
    kv_scale : Tensor or float, optional
    out_dtype : dtype, optional
        As for `mla_paged_attention`.

    Returns
    -------
    out : Tensor
        ``[Tq, Hq, Dv]``, see `mla_paged_attention`.
    softmax_lse : Tensor
        ``f32[Hq, Tq]``, see `mla_paged_attention`. Only with ``return_lse=True``.
    kv_cache : Tensor
        The updated cache, always last.

    Raises
    ------
    ValueError, NotImplementedError
        As for `mla_paged_attention`.

    Examples
    --------
    A sequence of one row in page 1 gets its second.

    >>> import torch
    >>> from xla_attention.torch import mla_paged_attention_update
    >>> cache, q = torch.zeros(2, 4, 16), torch.zeros(1, 2, 16)
    >>> sequence = torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([[1]])
    >>> new = 6 * torch.ones(1, 8), torch.ones(1, 8), torch.tensor([4 + 1])
    >>> out, updated = mla_paged_attention_update(q, cache, *sequence, *new, softmax_scale=1.0)
    >>> round(out[0, 0, 0].item(), 4), updated[1, 1, ::8].tolist(), cache.any().item()
    (3.0, [6.0, 1.0], False)
    """
    ops = torch.ops.xla_gpu
    op = ops.mla_paged_attention_update_with_lse if return_lse else ops.mla_paged_attention_update
    rows = (q, kv_cache, cu_seqlens_q, seqused_k, block_table, c_kv, k_pe, slot_mapping)
    hints = (max_seqlen_q, max_seqlen_k)
    optional = (count_tensor(num_seqs, q), sinks, scale_tensor(kv_scale, q))
    window = window_pair(window, _TARGET)
    return op(*rows, softmax_scale, causal, *window, softcap, *hints, *optional, batch_invariant, out_dtype)


@planned
def mla_paged_attention_update_(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    *rest: Any,  # noqa: ANN401
    return_lse: bool = False,
    **options: Any,  # noqa: ANN401
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`mla_paged_attention_update` in place on every device; returns ``out``, or ``out, softmax_lse``.

    Arguments and errors are those of `mla_paged_attention_update`. As with `update_cache_`, the kernel writes to the
    cache on CPU and CUDA, also under ``torch.compile(backend="inductor")``, and on XLA the cache's buffer is donated.

    Examples
    --------
    >>> import torch
    >>> from xla_attention.torch import mla_paged_attention_update_
    >>> cache, q = torch.zeros(2, 4, 16), torch.zeros(1, 2, 16)
    >>> sequence = torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([[1]])
    >>> new = 6 * torch.ones(1, 8), torch.ones(1, 8), torch.tensor([4 + 1])
    >>> out = mla_paged_attention_update_(q, cache, *sequence, *new, softmax_scale=1.0)
    >>> round(out[0, 0, 0].item(), 4), cache[1, 1, ::8].tolist()
    (3.0, [6.0, 1.0])
    """
    if kv_cache.device.type == "xla":
        donate(kv_cache)
        *results, updated = mla_paged_attention_update(q, kv_cache, *rest, return_lse=return_lse, **options)
        kv_cache.copy_(updated)
        return tuple(results) if return_lse else results[0]
    ops = torch.ops.xla_gpu
    options["window_left"], options["window_right"] = window_pair(options.pop("window", (-1, -1)), _TARGET)
    options["num_seqs"] = count_tensor(options.get("num_seqs"), q)
    options["kv_scale"] = scale_tensor(options.get("kv_scale"), q)
    op = ops.mla_paged_attention_update_with_lse_ if return_lse else ops.mla_paged_attention_update_
    return op(q, kv_cache, *rest, **options)


def _lower(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    c_kv: torch.Tensor,
    k_pe: torch.Tensor,
    slot_mapping: torch.Tensor,
    softmax_scale: float,
    *options: Any,  # noqa: ANN401
    with_lse: bool,
    **named: Any,  # noqa: ANN401
) -> Call:
    sequences = (q, kv_cache, cu_seqlens_q, seqused_k, block_table)
    new_tokens = {"c_kv": c_kv, "k_pe": k_pe, "slot_mapping": slots(slot_mapping)}
    head_dim_v = c_kv.shape[-1] if c_kv.dim() else 0
    others = {"with_lse": with_lse, "target": _TARGET, "new_tokens": new_tokens, **named}
    attention = lower(*sequences, softmax_scale, head_dim_v, *options, **others)
    out, lse = attention.results
    return dataclasses.replace(
        attention,
        results=(out, Result(kv_cache.shape, kv_cache.dtype), lse),
        # Not the cache: one that is copied first, because it is not updated in place, has to be dense.
        strided=(0, 5, 6),
    )


_lower_out, _lower_with_lse = (functools.partial(_lower, with_lse=with_lse) for with_lse in (False, True))

define(
    "xla_gpu::mla_paged_attention_update",
    schema(_TARGET, "", "(Tensor, Tensor)"),
    _lower_out,
    lambda results: (results[0], results[1]),
    alternative=UP_PROJECTED,
)
define(
    "xla_gpu::mla_paged_attention_update_with_lse",
    schema(_TARGET, "", "(Tensor, Tensor, Tensor)"),
    _lower_with_lse,
    lambda results: (results[0], results[2], results[1]),
    alternative=UP_PROJECTED,
)
define(
    "xla_gpu::mla_paged_attention_update_",
    schema(_TARGET, "", "Tensor", in_place=True),
    _lower_out,
    lambda results: results[0],
    in_place=True,
    alternative=UP_PROJECTED,
)
define(
    "xla_gpu::mla_paged_attention_update_with_lse_",
    schema(_TARGET, "", "(Tensor, Tensor)", in_place=True),
    _lower_with_lse,
    lambda results: (results[0], results[2]),
    in_place=True,
    alternative=UP_PROJECTED,
)
