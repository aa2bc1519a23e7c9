"""paged_attention in torch."""

import functools
from collections.abc import Mapping, Sequence

import torch

from .._documentation import documented
from .._operators import operator
from .._options import validate_sliding_window
from ._call import Call, Result, Workspace, f32_operand, index_operand, output_dtype, scale_operand
from ._define import define, scale_tensor
from ._plan import planned
from ._tree_mask import tree_operand

_TARGET = "xla_gpu_paged_attention"
NEWER = ("k_start", "k_end", "tree_mask", "kv_scale_cache")  # operands that are newer than torch's operators
# The alternative that has a gradient.
PACKED = "flash_attn_varlen over packed keys"


@documented("xla_gpu_paged_attention")
@planned
def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a ragged batch of query tokens over a paged key/value cache.

    Prefill chunks and decode tokens may be mixed: sequence b has the query rows
    ``query_start_loc[b] : query_start_loc[b + 1]``, which are the last tokens of its ``context_lens[b]`` keys. The keys
    and values of the new tokens must already be in the cache (`update_cache_`). ``docs/semantics.md#paged_attention``
    defines the result.

    Parameters
    ----------
    query : Tensor
        ... On CPU and CUDA it may be strided.
    kv_cache : Tensor
    context_lens : Tensor
    block_tables : Tensor
    query_start_loc : Tensor
    num_seqs : Tensor or int
        ... An int becomes a constant of an XLA program, which is recompiled for each value.
    scale : float
    sliding_window : int, optional
    soft_cap : float, optional
    alibi_slopes : Tensor, optional
    sinks : Tensor, optional
    q_scale : Tensor or float, optional
    k_scale : Tensor or float, optional
    v_scale : Tensor or float, optional
    k_start : Tensor, optional
    k_end : Tensor, optional
    tree_mask : Tensor, optional
        ... `pack_tree_mask` makes it of booleans.
    kv_scale_cache : Tensor, optional
        ... ``docs/quantized_cache.md`` explains such caches.
    batch_invariant : bool
    return_lse : bool
        Whether to return `softmax_lse` too.
    out_dtype : torch.dtype, optional
        bf16 (the default) or f16 for f8e4m3fn queries; otherwise the query's dtype (the default) or f32. For long
        f8e4m3fn sequences with D 128 or 256, Hopper multiplies 8-bit numbers on tensor cores: the error of `out` is
        then about 2 %, that of `softmax_lse` up to 5e-4 (``docs/semantics.md#fp8-queries``).

    Returns
    -------
    out : Tensor
        ``[T, Hq, D]``. Rows that attend to no key, and rows that belong to no sequence, are 0.
    softmax_lse : Tensor
        ``f32[Hq, T]``: natural logarithm of the softmax denominators, sinks included; -inf for rows that attend to
        neither a key nor a sink. Only with ``return_lse=True``.

    Raises
    ------
    ValueError
        Shapes, dtypes, devices or options do not fit together; the text names the operand and what was expected.
    NotImplementedError
        A combination of dtypes, or a head dimension, that there is no kernel for.

    Examples
    --------
    Three new tokens of a prompt of three, and one of a sequence of five.

    >>> import torch
    >>> from xla_attention.torch import paged_attention
    >>> query, kv_cache = torch.randn(4, 2, 64), torch.randn(8, 4, 2, 64)
    >>> lens, tables, starts = torch.tensor([3, 5]), torch.tensor([[3, 0], [5, 1]]), torch.tensor([0, 3, 4])
    >>> paged_attention(query, kv_cache, lens, tables, starts, torch.tensor([2]), scale=0.125).shape
    torch.Size([4, 2, 64])
    """
    scales = (scale_tensor(s, query) for s in (q_scale, k_scale, v_scale))
    arguments = (
        query,
        kv_cache,
        context_lens,
        block_tables,
        query_start_loc,
        num_seqs,
        scale,
        sliding_window,
        soft_cap,
    )
    ops = torch.ops.xla_gpu
    op = ops.paged_attention_with_lse if return_lse else ops.paged_attention
    newer = (k_start, k_end, tree_mask, kv_scale_cache)
    return op(*arguments, alibi_slopes, sinks, *scales, batch_invariant, out_dtype, *newer)


def ragged_paged_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_indices: torch.Tensor,
    cu_q_lens: torch.Tensor,
    num_seqs: torch.Tensor,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    use_kernel: bool = True,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> torch.Tensor:
    """`paged_attention` with the signature of torch_xla 2.9's ``torch.ops.xla.ragged_paged_attention``.

    ``docs/semantics.md#paged_attention`` defines the result.

    Parameters
    ----------
    q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale, sliding_window, soft_cap, k_scale, v_scale
        As query, kv_cache, context_lens, block_tables, query_start_loc, num_seqs, scale and so on of
        `paged_attention`.
    mask_value, use_kernel, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes
        Tuning parameters of the TPU kernel; accepted and ignored.

    Returns
    -------
    Tensor
        ``[T, Hq, D]``. Rows past ``cu_q_lens[num_seqs]`` are 0.

    Examples
    --------
    >>> import torch
    >>> from xla_attention.torch import ragged_paged_attention
    >>> pages, one = torch.ones(2, 16, 2, 128), torch.tensor([1])
    >>> starts = torch.tensor([0, 1])
    >>> ragged_paged_attention(torch.ones(1, 4, 128), pages, one, torch.tensor([[1]]), starts, one).shape
    torch.Size([1, 4, 128])
    """
    del mask_value, use_kernel, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes
    arguments = (q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale, sliding_window, soft_cap)
    return paged_attention(*arguments, k_scale=k_scale, v_scale=v_scale)


def lower(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_seqs: torch.Tensor | int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
    k_start: torch.Tensor | None = None,
    k_end: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    kv_scale_cache: torch.Tensor | None = None,
    *,
    with_lse: bool,
    target: str = _TARGET,
    new_tokens: Mapping[str, torch.Tensor] | None = None,
) -> Call:
    """The call of `paged_attention`, or of `target`, which has the operands `new_tokens` after the first six."""
    validate_sliding_window(sliding_window, f"{target}: ")
    if not isinstance(num_seqs, torch.Tensor):
        num_seqs = torch.full((1,), num_seqs, dtype=torch.int32, device=query.device)
    dtype = output_dtype(query, out_dtype)
    workspace = None
    if query.dim() == 3 and kv_cache.dim() == 4 and context_lens.dim() == 1:
        heads = (query.shape[1], kv_cache.shape[2] // 2)
        dims = (query.shape[2], query.shape[2])
        rows = (query.shape[0], context_lens.shape[0])
        workspace = Workspace(*heads, *dims, query.dtype, batch_invariant, *rows)
    lse = Result((*query.shape[1:2], *query.shape[:1]), torch.float32) if with_lse else None
    return Call(
        target,
        {
            "query": query,
            "kv_cache": kv_cache,
            "context_lens": index_operand("context_lens", context_lens),
            "block_tables": index_operand("block_tables", block_tables),
            "query_start_loc": index_operand("query_start_loc", query_start_loc),
            "num_seqs": index_operand("num_seqs", num_seqs),
            **(new_tokens or {}),
            "alibi_slopes": f32_operand(alibi_slopes),
            "sinks": f32_operand(sinks),
            "q_scale": scale_operand(q_scale),
            "k_scale": scale_operand(k_scale),
            "v_scale": scale_operand(v_scale),
            "k_start": index_operand("k_start", k_start),
            "k_end": index_operand("k_end", k_end),
            "tree_mask": tree_operand(tree_mask),
            "kv_scale_cache": kv_scale_cache,
        },
        (Result(query.shape, dtype), lse),
        operator(target).typed(
            {
                "batch_invariant": batch_invariant,
                "scale": scale,
                "sliding_window": sliding_window,
                "soft_cap": soft_cap,
            }
        ),
        strided=(0, 1),
        workspace=workspace,
    )


def schema(
    target: str, num_seqs: str, returns: str, *, in_place: bool = False, newer: Sequence[str] = NEWER, scales: str = ""
) -> str:
    """The arguments and results of `paged_attention`, or of `target`, as a torch schema.

    `num_seqs` is a type, `newer` has the operands that are newer than torch's operators, and `scales` is that of scales
    that are required.
    """
    declared = operator(target)
    required = declared.required_tensors(in_place=in_place).replace("Tensor num_seqs", f"{num_seqs} num_seqs")
    optional = declared.optional_tensors(without=NEWER)
    newest = ", ".join(f"Tensor? {name}=None" for name in newer)
    return (
        f"({required}{scales}, float scale, int? sliding_window=None, float? soft_cap=None, {optional}, "
        f"bool batch_invariant=False, ScalarType? out_dtype=None, {newest}) -> {returns}"
    )


for _overload, _num_seqs in (("", "Tensor"), (".int", "int")):
    define(
        "xla_gpu::paged_attention" + _overload,
        schema(_TARGET, _num_seqs, "Tensor"),
        functools.partial(lower, with_lse=False),
        lambda results: results[0],
        alternative=PACKED,
    )
    define(
        "xla_gpu::paged_attention_with_lse" + _overload,
        schema(_TARGET, _num_seqs, "(Tensor, Tensor)"),
        functools.partial(lower, with_lse=True),
        tuple,
        alternative=PACKED,
    )
