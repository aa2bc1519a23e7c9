"""paged_attention_update in torch, functional and in place."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._documentation import documented
from ._call import Call, Result
from ._define import define, scale_tensor
from ._kv_cache_update import donate, slots
from ._paged_attention import NEWER, PACKED, lower, schema
from ._plan import planned

_TARGET = "xla_gpu_paged_attention_update"
_TENSORS_AFTER_CACHE = 7  # context_lens to slot_mapping


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
    kv_scale_cache: torch.Tensor | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
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
    kv_scale_cache : Tensor, optional
        ... The call computes those of the new tokens; it is updated as `kv_cache` is.

    Returns
    -------
    out : Tensor
        ``[T, Hq, D]``, see `paged_attention`.
    softmax_lse : Tensor
        ``f32[Hq, T]``, see `paged_attention`. Only with ``return_lse=True``.
    kv_cache : Tensor
        The updated cache, last but for its scales.
    kv_scale_cache : Tensor
        The updated scales. Only with `kv_scale_cache`.

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
    op = _op("", return_lse, kv_scale_cache)
    rows = (query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, key, value, slot_mapping)
    scales = (scale_tensor(s, query) for s in (q_scale, k_scale, v_scale))
    scores = (scale, sliding_window, soft_cap, alibi_slopes, sinks, *scales)
    scale_cache = () if kv_scale_cache is None else (kv_scale_cache,)
    return op(*rows, *scale_cache, *scores, batch_invariant, out_dtype, k_start, k_end, tree_mask)


@planned
def paged_attention_update_(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    *rest: Any,  # noqa: ANN401
    return_lse: bool = False,
    kv_scale_cache: torch.Tensor | None = None,
    **options: Any,  # noqa: ANN401
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention_update` in place on every device; returns ``out``, or ``out, softmax_lse``.

    Arguments and errors are those of `paged_attention_update`; `kv_scale_cache` is written as the cache is. As with
    `update_cache_`, the kernel writes to the cache on CPU and CUDA, also under
    ``torch.compile(backend="inductor")``, and on XLA the cache's buffer is donated.

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
    caches = (kv_cache,) if kv_scale_cache is None else (kv_cache, kv_scale_cache)
    if kv_cache.device.type == "xla":
        donate(*caches)
        if kv_scale_cache is not None:
            options["kv_scale_cache"] = kv_scale_cache
        results = paged_attention_update(query, kv_cache, *rest, return_lse=return_lse, **options)
        for cache, updated in zip(caches, results[-len(caches) :], strict=True):
            cache.copy_(updated)
        return results[:2] if return_lse else results[0]
    for name in ("q_scale", "k_scale", "v_scale"):
        options[name] = scale_tensor(options.get(name), query)
    if kv_scale_cache is not None:
        # It comes after slot_mapping.
        if len(rest) > _TENSORS_AFTER_CACHE:
            rest = (*rest[:_TENSORS_AFTER_CACHE], kv_scale_cache, *rest[_TENSORS_AFTER_CACHE:])
        else:
            options["kv_scale_cache"] = kv_scale_cache
    return _op("_", return_lse, kv_scale_cache)(query, kv_cache, *rest, **options)


def _op(in_place: str, return_lse: bool, kv_scale_cache: torch.Tensor | None) -> Callable[..., Any]:
    """The operator of torch: in place with the suffix ``_``, with a log-sum-exp, with scales of the cache's rows."""
    scaled = "" if kv_scale_cache is None else "_scaled"
    return getattr(torch.ops.xla_gpu, f"paged_attention_update{scaled}{'_with_lse' * return_lse}{in_place}")


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


def _lower_scaled(*arguments: Any, with_lse: bool, **named: Any) -> Call:  # noqa: ANN401
    """The call of an operator with scales, which are its tenth argument."""
    arguments, named = list(arguments), dict(named)
    scales = named.pop("kv_scale_cache") if "kv_scale_cache" in named else arguments.pop(9)
    call = _lower(*arguments, with_lse=with_lse, kv_scale_cache=scales, **named)
    # The None is the place of the workspace.
    return dataclasses.replace(call, results=(*call.results, None, Result(scales.shape, scales.dtype)))


_lower_out, _lower_with_lse = (functools.partial(_lower, with_lse=with_lse) for with_lse in (False, True))
# The scales of the operators without them are no operand, because those could return none.
_schema = functools.partial(schema, _TARGET, newer=[name for name in NEWER if name != "kv_scale_cache"])


def _define_scaled(name: str, returned: Sequence[int], **options: Any) -> None:  # noqa: ANN401
    """Define the operators with scales: as the other operators, but for a required operand, and a result."""
    with_lse, in_place = "_with_lse" in name, options.get("in_place", False)
    tensors = ", ".join(["Tensor"] * len(returned))
    returns = tensors if len(returned) == 1 else f"({tensors})"
    mutated = "(b!)" if in_place else ""
    for overload, num_seqs in (("", "Tensor"), (".int", "int")):
        define(
            f"xla_gpu::{name}{overload}",
            _schema(num_seqs, returns, in_place=in_place, scales=f", Tensor{mutated} kv_scale_cache"),
            functools.partial(_lower_scaled, with_lse=with_lse),
            operator.itemgetter(*returned),
            alternative=PACKED,
            **options,
        )


_OUT, _CACHE, _LSE, _SCALES = 0, 1, 2, 4  # indices of results

_define_scaled("paged_attention_update_scaled", (_OUT, _CACHE, _SCALES))
_define_scaled("paged_attention_update_scaled_with_lse", (_OUT, _LSE, _CACHE, _SCALES))
_define_scaled("paged_attention_update_scaled_", (_OUT,), in_place=True)
_define_scaled("paged_attention_update_scaled_with_lse_", (_OUT, _LSE), in_place=True)

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
