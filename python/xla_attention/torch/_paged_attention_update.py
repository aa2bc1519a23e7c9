"""paged_attention_update in torch, functional and in place."""

import dataclasses
import functools
from typing import Any

import torch

from .._documentation import documented
from ._call import Call, Result
from ._define import define, scale_tensor
from ._kv_cache_update import donate, slots
from ._paged_attention import PACKED, lower, schema
from ._plan import planned

_TARGET = "xla_gpu_paged_attention_update"


@documented("xla_gpu_paged_attention_update")
@planned
def paged_attention_update(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    *,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | float | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    k_start: torch.Tensor | None = None,
    k_end: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add the keys and values of new tokens to a paged cache and attend over it, in one call.

    The results are those of `kv_cache_update` and then `paged_attention`, bit for bit. The given cache is not modified;
    `paged_attention_update_` writes to it. ``docs/semantics.md#paged_attention_update`` defines the result.

    Parameters
    ----------
    query, context_lens, block_tables, query_start_loc, num_seqs
        As for `paged_attention`.
    kv_cache : Tensor
        ... The slots of the new tokens may hold anything.
    key : Tensor
    value : Tensor
    slot_mapping : Tensor
        ... It has to be the slot where `block_tables` has the token's key: otherwise the rows of that sequence, and of
        any other that reads the slot, are unspecified.
    scale, sliding_window, soft_cap, alibi_slopes, sinks, q_scale, k_start, k_end, tree_mask
        As for `paged_attention`.
    batch_invariant, return_lse, out_dtype
        As for `paged_attention`.
    k_scale : Tensor or float, optional
    v_scale : Tensor or float, optional

    Returns
    -------
    out : Tensor
        ``[T, Hq, D]``, see `paged_attention`.
    softmax_lse : Tensor
        ``f32[Hq, T]``, see `paged_attention`. Only with ``return_lse=True``.
    kv_cache : Tensor
        The updated cache, always last.

    Raises
    ------
    ValueError, NotImplementedError
        As for `paged_attention`.

    Examples
    --------
    A sequence of two keys in page 1 gets its third.

    >>> import torch
    >>> from xla_attention.torch import paged_attention_update
    >>> cache, row = torch.zeros(2, 4, 2, 8), torch.ones(1, 1, 8)
    >>> sequence = torch.tensor([3]), torch.tensor([[1]]), torch.tensor([0, 1]), torch.tensor([1])
    >>> out, new = paged_attention_update(0 * row, cache, *sequence, row, 6 * row, torch.tensor([4 + 2]), scale=1.0)
    >>> round(out[0, 0, 0].item(), 4), new[1, 2, :, 0].tolist(), cache.any().item()
    (2.0, [1.0, 6.0], False)
    """
    ops = torch.ops.xla_gpu
    op = ops.paged_attention_update_with_lse if return_lse else ops.paged_attention_update
    rows = (query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, key, value, slot_mapping)
    scales = (scale_tensor(s, query) for s in (q_scale, k_scale, v_scale))
    scores = (scale, sliding_window, soft_cap, alibi_slopes, sinks, *scales)
    return op(*rows, *scores, batch_invariant, out_dtype, k_start, k_end, tree_mask)


@planned
def paged_attention_update_(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    *rest: Any,  # noqa: ANN401
    return_lse: bool = False,
    **options: Any,  # noqa: ANN401
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention_update` in place on every device; returns ``out``, or ``out, softmax_lse``.

    Arguments and errors are those of `paged_attention_update`. As with `update_cache_`, the kernel writes to the cache
    on CPU and CUDA, also under ``torch.compile(backend="inductor")``, and on XLA the cache's buffer is donated.

    Examples
    --------
    >>> import torch
    >>> from xla_attention.torch import paged_attention_update_
    >>> cache, row = torch.zeros(2, 4, 2, 8), torch.ones(1, 1, 8)
    >>> sequence = torch.tensor([3]), torch.tensor([[1]]), torch.tensor([0, 1]), torch.tensor([1])
    >>> out = paged_attention_update_(0 * row, cache, *sequence, row, 6 * row, torch.tensor([4 + 2]), scale=1.0)
    >>> round(out[0, 0, 0].item(), 4), cache[1, 2, :, 0].tolist()
    (2.0, [1.0, 6.0])
    """
    if kv_cache.device.type == "xla":
        donate(kv_cache)
        *results, updated = paged_attention_update(query, kv_cache, *rest, return_lse=return_lse, **options)
        kv_cache.copy_(updated)
        return tuple(results) if return_lse else results[0]
    ops = torch.ops.xla_gpu
    for name in ("q_scale", "k_scale", "v_scale"):
        options[name] = scale_tensor(options.get(name), query)
    op = ops.paged_attention_update_with_lse_ if return_lse else ops.paged_attention_update_
    return op(query, kv_cache, *rest, **options)


def _lower(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    *options: Any,  # noqa: ANN401
    with_lse: bool,
    **named: Any,  # noqa: ANN401
) -> Call:
    sequences = (query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs)
    new_tokens = {"key": key, "value": value, "slot_mapping": slots(slot_mapping)}
    attention = lower(*sequences, *options, with_lse=with_lse, target=_TARGET, new_tokens=new_tokens, **named)
    out, lse = attention.results
    return dataclasses.replace(
        attention,
        results=(out, Result(kv_cache.shape, kv_cache.dtype), lse),
        # Not the cache: one that is copied first, because it is not updated in place, has to be dense.
        strided=(0, 6, 7),
    )


_schema = functools.partial(schema, _TARGET)
_lower_out, _lower_with_lse = (functools.partial(_lower, with_lse=with_lse) for with_lse in (False, True))

for _overload, _num_seqs in (("", "Tensor"), (".int", "int")):
    define(
        "xla_gpu::paged_attention_update" + _overload,
        _schema(_num_seqs, "(Tensor, Tensor)"),
        _lower_out,
        lambda results: (results[0], results[1]),
        alternative=PACKED,
    )
    define(
        "xla_gpu::paged_attention_update_with_lse" + _overload,
        _schema(_num_seqs, "(Tensor, Tensor, Tensor)"),
        _lower_with_lse,
        lambda results: (results[0], results[2], results[1]),
        alternative=PACKED,
    )
    define(
        "xla_gpu::paged_attention_update_" + _overload,
        _schema(_num_seqs, "Tensor", in_place=True),
        _lower_out,
        lambda results: results[0],
        in_place=True,
        alternative=PACKED,
    )
    define(
        "xla_gpu::paged_attention_update_with_lse_" + _overload,
        _schema(_num_seqs, "(Tensor, Tensor)", in_place=True),
        _lower_with_lse,
        lambda results: (results[0], results[2]),
        in_place=True,
        alternative=PACKED,
    )
