"""mla_paged_attention in torch."""

import functools
from collections.abc import Mapping

import torch

from .._documentation import documented
from .._operators import operator
from .._options import length_hint, window_pair
from ._call import Call, Result, Workspace, f32_operand, index_operand, output_dtype, scale_operand
from ._define import define, scale_tensor
from ._plan import planned

_TARGET = "xla_gpu_mla_paged_attention"
# The alternative that has a gradient.
UP_PROJECTED = "flash_attn_varlen over up-projected keys and values"


@documented(_TARGET)
@planned
def mla_paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    *,
    softmax_scale: float,
    head_dim_v: int = 512,
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Multi-head latent attention (MLA) in its absorbed form, over a paged cache of latent rows.

    All query heads attend to the same rows. A row is the key, and its first ``head_dim_v`` columns are also the value,
    so that a cache holds one row per token: the compressed K and V (``kv_lora_rank`` columns), then the key part that
    carries positions, rotated. Queries have the same two parts: the first one multiplied by the up-projection of K, the
    second one rotated. The output is still to be multiplied by the up-projection of V.

    Sequence b has the query rows ``cu_seqlens_q[b] : cu_seqlens_q[b + 1]``, which are the last tokens of its
    ``seqused_k[b]`` keys. The rows of the new tokens must already be in the cache; `mla_paged_attention_update` writes
    them too. ``docs/semantics.md#mla_paged_attention`` defines the result.

    Parameters
    ----------
    q : Tensor
    kv_cache : Tensor
    cu_seqlens_q : Tensor
    seqused_k : Tensor
    block_table : Tensor
    softmax_scale : float
        ... It is that of the heads before absorption, such as ``(128 + 64) ** -0.5``, and not of D.
    head_dim_v : int
        Dv: how many columns of a row are its value.
    num_seqs : Tensor or int, optional
    causal : bool
    window : tuple of int
        ``(left, right)``: how many keys before and after its own position a query attends to; -1 is no limit.
    softcap : float
    sinks : Tensor, optional
    kv_scale : Tensor or float, optional
    max_seqlen_q : int
        ... 0 is unknown.
    max_seqlen_k : int
        ... 0 is unknown.
    batch_invariant : bool
    return_lse : bool
        Whether to return `softmax_lse` too.
    out_dtype : dtype, optional
        The query's dtype (the default) or f32, for partial results that are merged.

    Returns
    -------
    out : Tensor
        ``[Tq, Hq, Dv]``. Rows that attend to no key, and rows that belong to no sequence, are 0.
    softmax_lse : Tensor
        ``f32[Hq, Tq]``: natural logarithm of the softmax denominators, sinks included; -inf for rows that attend to
        neither a key nor a sink. Only with ``return_lse=True``.

    Raises
    ------
    ValueError
        Shapes, dtypes or options do not fit together; the text names the operand and what was expected.
    NotImplementedError
        A combination of dtypes, or a head dimension, that there is no kernel for; or a gradient.

    Examples
    --------
    A decode step of two sequences with DeepSeek's sizes and 16 heads.

    >>> import torch
    >>> from xla_attention.torch import mla_paged_attention
    >>> q, kv_cache = torch.randn(2, 16, 576), torch.randn(8, 64, 576)
    >>> starts, lens, table = torch.tensor([0, 1, 2]), torch.tensor([70, 5]), torch.tensor([[3, 0], [5, 1]])
    >>> out = mla_paged_attention(q, kv_cache, starts, lens, table, softmax_scale=192**-0.5, causal=True)
    >>> out.shape
    torch.Size([2, 16, 512])
    """
    ops = torch.ops.xla_gpu
    op = ops.mla_paged_attention_with_lse if return_lse else ops.mla_paged_attention
    return op(
        q,
        kv_cache,
        cu_seqlens_q,
        seqused_k,
        block_table,
        softmax_scale,
        head_dim_v,
        causal,
        *window_pair(window, _TARGET),
        softcap,
        max_seqlen_q,
        max_seqlen_k,
        count_tensor(num_seqs, q),
        sinks,
        scale_tensor(kv_scale, q),
        batch_invariant,
        out_dtype,
    )


def count_tensor(count: torch.Tensor | int | None, like: torch.Tensor) -> torch.Tensor | None:
    """A number of sequences as a tensor on the device of `like`."""
    if count is None or isinstance(count, torch.Tensor):
        return count
    return torch.full((1,), count, dtype=torch.int32, device=like.device)


def lower(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    head_dim_v: int = 512,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    num_seqs: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
    *,
    with_lse: bool,
    target: str = _TARGET,
    new_tokens: Mapping[str, torch.Tensor] | None = None,
) -> Call:
    """The call of `mla_paged_attention`, or of `target`, which has the operands `new_tokens` after the first five."""
    workspace = None
    if q.dim() == 3 and cu_seqlens_q.dim() == 1:
        rows = (q.shape[0], cu_seqlens_q.shape[0] - 1)
        workspace = Workspace(q.shape[1], 1, q.shape[2], head_dim_v, q.dtype, batch_invariant, *rows)
    lse = Result((*q.shape[1:2], *q.shape[:1]), torch.float32) if with_lse else None
    return Call(
        target,
        {
            "q": q,
            "kv_cache": kv_cache,
            "cu_seqlens_q": index_operand("cu_seqlens_q", cu_seqlens_q),
            "seqused_k": index_operand("seqused_k", seqused_k),
            "block_table": index_operand("block_table", block_table),
            **(new_tokens or {}),
            "num_seqs": index_operand("num_seqs", num_seqs),
            "sinks": f32_operand(sinks),
            "kv_scale": scale_operand(kv_scale),
        },
        (Result((*q.shape[:-1], head_dim_v), output_dtype(q, out_dtype)), lse),
        operator(target).typed(
            {
                "batch_invariant": batch_invariant,
                "causal": causal,
                "max_seqlen_k": length_hint(max_seqlen_k),
                "max_seqlen_q": length_hint(max_seqlen_q),
                "softcap": softcap,
                "softmax_scale": softmax_scale,
                "window_left": window_left,
                "window_right": window_right,
            }
        ),
        strided=(0, 1),
        workspace=workspace,
    )


def schema(target: str, head_dim_v: str, returns: str, *, in_place: bool = False) -> str:
    """The arguments and results of `mla_paged_attention`, or of `target`, as a torch schema.

    `head_dim_v` is the parameter of that name, with a comma, or nothing.
    """
    declared = operator(target)
    return (
        f"({declared.required_tensors(in_place=in_place)}, float softmax_scale, {head_dim_v}bool causal=False, "
        "int window_left=-1, int window_right=-1, float softcap=0.0, int max_seqlen_q=0, int max_seqlen_k=0, "
        f"{declared.optional_tensors()}, bool batch_invariant=False, ScalarType? out_dtype=None) -> {returns}"
    )


define(
    "xla_gpu::mla_paged_attention",
    schema(_TARGET, "int head_dim_v=512, ", "Tensor"),
    functools.partial(lower, with_lse=False),
    lambda results: results[0],
    alternative=UP_PROJECTED,
)
define(
    "xla_gpu::mla_paged_attention_with_lse",
    schema(_TARGET, "int head_dim_v=512, ", "(Tensor, Tensor)"),
    functools.partial(lower, with_lse=True),
    tuple,
    alternative=UP_PROJECTED,
)
