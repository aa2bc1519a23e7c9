"""rope_kv_cache_update in torch."""

import torch

from .._documentation import documented
from .._operators import operator
from .._options import kv_layout_number
from ._call import Call, Result, index_operand, scale_operand
from ._define import define, scale_tensor
from ._kv_cache_update import slots
from ._plan import planned

_OPERATOR = operator("xla_gpu_rope_kv_cache_update")


@documented("xla_gpu_rope_kv_cache_update")
@planned
def rope_kv_cache_update(
    kv_cache: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    interleaved: bool = False,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    kv_layout: str = "interleaved",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the queries and keys of new tokens by their positions and add keys and values to a paged cache.

    The rotary embedding and `kv_cache_update` in one pass over the rows. The given cache is not modified;
    ``torch.ops.xla_gpu.rope_kv_cache_update_`` writes to it, on CPU and CUDA, and returns only the queries.
    ``docs/semantics.md#rope_kv_cache_update`` defines every bit.

    Parameters
    ----------
    kv_cache : Tensor
        K and V in one buffer, see `kv_layout`. Its dtype is that of `key`, or ``float8_e4m3fn`` or ``float8_e5m2``.
    query : Tensor
    key : Tensor
    value : Tensor
    slot_mapping : Tensor
        ... The queries of a skipped token are rotated too.
    positions : Tensor
    cos_sin : Tensor
    interleaved : bool
    k_scale : Tensor or float, optional
    v_scale : Tensor or float, optional
    kv_layout : str
        As for `kv_cache_update`.

    Returns
    -------
    query : Tensor
        ``[T, Hq, D]``, rotated.
    kv_cache : Tensor
        The updated cache.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices do not fit together; the text names the operand.
    NotImplementedError
        A head dimension that there is no kernel for.

    Examples
    --------
    >>> import torch
    >>> from xla_attention.torch import rope_kv_cache_update
    >>> cos_sin = torch.tensor([[1.0] * 4 + [0.0] * 4, [0.0] * 4 + [1.0] * 4])
    >>> cache, row, slots = torch.zeros(2, 4, 2, 8), torch.ones(2, 1, 8), torch.tensor([0, 5])
    >>> query, cache = rope_kv_cache_update(cache, row, row, row, slots, torch.tensor([0, 1]), cos_sin)
    >>> query[1, 0].tolist()
    [-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0]
    """
    scales = (scale_tensor(k_scale, key), scale_tensor(v_scale, key))
    rows = (kv_cache, query, key, value, slot_mapping, positions, cos_sin)
    return torch.ops.xla_gpu.rope_kv_cache_update(*rows, interleaved, *scales, kv_layout)


def _lower(
    kv_cache: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_layout: str | None = None,
) -> Call:
    return Call(
        _OPERATOR.target,
        {
            "kv_cache": kv_cache,
            "query": query,
            "key": key,
            "value": value,
            "slot_mapping": slots(slot_mapping),
            "positions": index_operand("positions", positions),
            "cos_sin": cos_sin,
            "k_scale": scale_operand(k_scale),
            "v_scale": scale_operand(v_scale),
        },
        (Result(kv_cache.shape, kv_cache.dtype), Result(query.shape, query.dtype)),
        _OPERATOR.typed({"interleaved": interleaved, "kv_layout": kv_layout_number(kv_layout or "interleaved")}),
        strided=(1, 2, 3),
    )


_OPTIONS = f"bool interleaved=False, {_OPERATOR.optional_tensors()}, str? kv_layout=None"

define(
    "xla_gpu::rope_kv_cache_update",
    f"({_OPERATOR.required_tensors()}, {_OPTIONS}) -> (Tensor, Tensor)",
    _lower,
    lambda results: (results[1], results[0]),
)
define(
    "xla_gpu::rope_kv_cache_update_",
    f"({_OPERATOR.required_tensors(in_place=True)}, {_OPTIONS}) -> Tensor",
    _lower,
    lambda results: results[1],
    in_place=True,
)
