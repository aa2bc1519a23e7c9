"""gather_kv_cache in torch."""

import torch

from .._documentation import documented
from .._operators import operator
from .._options import kv_layout_number, reject_kv_layout
from ._call import Call, Result, index_operand, scale_operand
from ._define import define, scale_tensor
from ._plan import planned

_OPERATOR = operator("xla_gpu_gather_kv_cache")


@documented("xla_gpu_gather_kv_cache")
@planned
def gather_kv_cache(
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    capacity: int,
    dtype: torch.dtype | None = None,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    kv_scale_cache: torch.Tensor | None = None,
    kv_layout: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy the keys and values of sequences out of a paged cache into packed rows, those of a sequence in order.

    The inverse of `kv_cache_update`: for exporting a prefix, for attention over a long context in chunks
    (`flash_attn_varlen` over the gathered rows, then `merge_attention_states`), and for inspecting a cache.
    ``docs/semantics.md#gather_kv_cache`` defines the result.

    Parameters
    ----------
    kv_cache : Tensor or pair of Tensors
        K and V in one buffer, see `kv_layout`; or in two, ``[P, page_size, Hkv, D]`` and
        ``[P, page_size, Hkv, Dv]``. f16, bf16, f32, ``float8_e4m3fn`` or ``float8_e5m2``; with
        `kv_scale_cache` ``int8`` or ``float8_e4m3fn``.
    block_tables : Tensor
    context_lens : Tensor
    capacity : int
        N, the number of rows of the results. Tokens beyond it are dropped; rows after the last token are 0.
    dtype : torch.dtype, optional
        The dtype of keys and values: by default that of the cache, or bf16 for an 8-bit cache, whose keys and values
        may also be f16 or f32.
    k_scale : Tensor or float, optional
        ... The scale that `kv_cache_update` was given.
    v_scale : Tensor or float, optional
        ... The scale that `kv_cache_update` was given.
    kv_scale_cache : Tensor, optional
        ... ``docs/quantized_cache.md`` explains such caches.
    kv_layout : str, optional
        The layout of a cache in one buffer: ``"interleaved"`` (the default), ``[P, page_size, 2*Hkv, D]`` with K of
        head h at index 2h and V at 2h+1; ``"stacked"``, ``[2, P, page_size, Hkv, D]``; ``"per_page"``,
        ``[P, 2, page_size, Hkv, D]``.

    Returns
    -------
    keys : Tensor
        ``[N, Hkv, D]``
    values : Tensor
        ``[N, Hkv, Dv]``
    cu_seqlens : Tensor
        ``i32[S+1]``: the first row of each sequence and, last, the end; at most N.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices do not fit together; the text names the operand.
    NotImplementedError
        A head dimension that there is no kernel for.

    Examples
    --------
    >>> import torch
    >>> from xla_attention.torch import gather_kv_cache, kv_cache_update
    >>> rows = torch.arange(3.0)[:, None, None].expand(3, 1, 8).contiguous()
    >>> cache = kv_cache_update(torch.zeros(2, 2, 2, 8), rows, -rows, torch.tensor([2, 3, 0]))
    >>> keys, values, cu_seqlens = gather_kv_cache(cache, torch.tensor([[1, 0]]), torch.tensor([3]), capacity=4)
    >>> keys[:, 0, 0].tolist(), values[:, 0, 0].tolist(), cu_seqlens.tolist()
    ([0.0, 1.0, 2.0, 0.0], [-0.0, -1.0, -2.0, 0.0], [0, 3])
    """
    if isinstance(kv_cache, torch.Tensor):
        k_cache, v_cache = kv_cache, kv_cache.new_empty(0)
        kv_layout = kv_layout or "interleaved"
    else:
        k_cache, v_cache = kv_cache
        reject_kv_layout(kv_layout)
    scales = scale_tensor(k_scale, k_cache), scale_tensor(v_scale, k_cache)
    return torch.ops.xla_gpu.gather_kv_cache(
        k_cache, v_cache, block_tables, context_lens, capacity, *scales, kv_layout, dtype, kv_scale_cache
    )


def _lower(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    capacity: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_layout: str | None = None,
    dtype: torch.dtype | None = None,
    kv_scale_cache: torch.Tensor | None = None,
) -> Call:
    if isinstance(capacity, int) and capacity < 0:
        raise ValueError(f"{_OPERATOR.target}: capacity is {capacity}, expected >= 0")
    if dtype is None:
        dtype = torch.bfloat16 if k_cache.dtype.itemsize == 1 else k_cache.dtype
    heads = k_cache.shape[-2] // (2 if kv_layout == "interleaved" else 1)
    dims = k_cache.shape[-1], (v_cache if kv_layout is None else k_cache).shape[-1]
    return Call(
        _OPERATOR.target,
        {
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_tables": index_operand("block_tables", block_tables),
            "context_lens": index_operand("context_lens", context_lens),
            "k_scale": scale_operand(k_scale),
            "v_scale": scale_operand(v_scale),
            "kv_scale_cache": kv_scale_cache,
        },
        (
            *(Result((capacity, heads, dim), dtype) for dim in dims),
            Result(tuple(size + 1 for size in context_lens.shape[:1]), torch.int32),
        ),
        {"kv_layout": kv_layout_number(kv_layout)},
        strided=(0, 1, 2),
    )


define(
    "xla_gpu::gather_kv_cache",
    f"({_OPERATOR.required_tensors()}, SymInt capacity, {_OPERATOR.optional_tensors(without=('kv_scale_cache',))}, "
    "str? kv_layout=None, ScalarType? dtype=None, Tensor? kv_scale_cache=None) -> (Tensor, Tensor, Tensor)",
    _lower,
    tuple,
    alternative="the cache indexed by page and offset",
)
