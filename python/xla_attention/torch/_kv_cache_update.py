"""kv_cache_update in torch, functional and in place."""

import dataclasses

import torch

from .._documentation import documented
from .._operators import operator
from .._options import kv_layout_number, reject_kv_layout
from ._call import Call, Result, index_operand, scale_operand
from ._define import define, scale_tensor
from ._plan import planned

_OPERATOR, _SPLIT = operator("xla_gpu_kv_cache_update"), operator("xla_gpu_kv_cache_update_split")

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@documented("xla_gpu_kv_cache_update")
@planned
def kv_cache_update(
    kv_cache: Cache,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    kv_scale_cache: torch.Tensor | None = None,
    kv_layout: str | None = None,
) -> Cache:
    """Add the keys and values of new tokens to a paged cache, and return the new cache.

    The given cache is not modified; `update_cache_` updates in place. ``docs/semantics.md#kv_cache_update`` defines
    every bit.

    Parameters
    ----------
    kv_cache : Tensor or pair of Tensors
        K and V in one buffer, see `kv_layout`; or in two, ``[P, page_size, Hkv, D]`` and
        ``[P, page_size, Hkv, Dv]``. Its dtype is that of `key`, or ``float8_e4m3fn`` or ``float8_e5m2``; with
        `kv_scale_cache` ``int8`` or ``float8_e4m3fn``.
    key, value : Tensor
        ``[T, Hkv, D]``, ``[T, Hkv, Dv]``, f16, bf16 or f32; D and Dv multiples of 8 up to 512.
    slot_mapping : Tensor
    k_scale : Tensor or float, optional
    v_scale : Tensor or float, optional
    kv_scale_cache : Tensor, optional
        ... ``docs/quantized_cache.md`` explains such caches.
    kv_layout : str, optional
        The layout of a cache in one buffer: ``"interleaved"`` (the default), ``[P, page_size, 2*Hkv, D]`` with K of
        head h at index 2h and V at 2h+1; ``"stacked"``, ``[2, P, page_size, Hkv, D]``; ``"per_page"``,
        ``[P, 2, page_size, Hkv, D]``.

    Returns
    -------
    Tensor or pair of Tensors
        The updated cache, in the form of `kv_cache`; with `kv_scale_cache` a pair, the cache and its scales.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices do not fit together; the text names the operand.
    NotImplementedError
        A head dimension that there is no kernel for.

    Examples
    --------
    >>> import torch
    >>> from xla_attention.torch import kv_cache_update
    >>> rows = torch.ones(3, 1, 8)
    >>> cache = kv_cache_update(torch.zeros(2, 4, 2, 8), rows, 2 * rows, torch.tensor([0, 5, -1]))
    >>> cache[:, :, :, 0].sum(dim=1).tolist()
    [[1.0, 2.0], [1.0, 2.0]]

    With a scale for each row, which the call computes:

    >>> cache, scales = torch.zeros(2, 4, 2, 8, dtype=torch.int8), torch.zeros(2, 4, 2)
    >>> cache, scales = kv_cache_update(cache, rows, 2 * rows, torch.tensor([0, 5, -1]), kv_scale_cache=scales)
    >>> cache[0, 0, :, 0].tolist(), (127 * scales[0, 0]).tolist()
    ([127, 127], [1.0, 2.0])
    """
    ops = torch.ops.xla_gpu
    if kv_scale_cache is not None:
        reject_scales(kv_cache, k_scale, v_scale)
        return ops.kv_cache_update_scaled(kv_cache, key, value, slot_mapping, kv_scale_cache, kv_layout)
    rows = (key, value, slot_mapping, scale_tensor(k_scale, key), scale_tensor(v_scale, key))
    if isinstance(kv_cache, torch.Tensor):
        return ops.kv_cache_update(kv_cache, *rows, kv_layout)
    reject_kv_layout(kv_layout)
    return ops.kv_cache_update_split(*kv_cache, *rows)


@planned
def update_cache_(
    kv_cache: Cache,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    kv_scale_cache: torch.Tensor | None = None,
    kv_layout: str | None = None,
) -> None:
    """Write the keys and values of new tokens into a paged cache, in place on every device.

    Arguments and errors are those of `kv_cache_update`; `kv_scale_cache` is written as `kv_cache` is. On CPU and
    CUDA the kernel writes to the cache, also under ``torch.compile(backend="inductor")``. On XLA it is
    ``cache.copy_`` of the updated cache, which takes over the cache's buffer, so that nothing is copied; under
    ``torch.compile(backend="openxla")`` the cache is therefore marked as a buffer donor.

    Examples
    --------
    >>> import torch
    >>> from xla_attention.torch import update_cache_
    >>> cache, rows = torch.zeros(2, 4, 2, 8), torch.ones(3, 1, 8)
    >>> update_cache_(cache, rows, 2 * rows, torch.tensor([0, 5, -1]))
    >>> cache[:, :, :, 0].sum(dim=1).tolist()
    [[1.0, 2.0], [1.0, 2.0]]
    """
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    caches = (kv_cache,) if isinstance(kv_cache, torch.Tensor) else tuple(kv_cache)
    if kv_scale_cache is not None:
        reject_scales(kv_cache, k_scale, v_scale)
        scales["kv_scale_cache"] = kv_scale_cache
        caches = (*caches, kv_scale_cache)
    if caches[0].device.type == "xla":
        donate(*caches)
        updated = kv_cache_update(kv_cache, key, value, slot_mapping, **scales, kv_layout=kv_layout)
        for cache, new in zip(caches, updated if len(caches) == 2 else (updated,), strict=True):
            cache.copy_(new)
        return
    ops = torch.ops.xla_gpu
    if kv_scale_cache is not None:
        ops.kv_cache_update_scaled_(kv_cache, key, value, slot_mapping, kv_scale_cache, kv_layout)
        return
    rows = (key, value, slot_mapping, scale_tensor(k_scale, key), scale_tensor(v_scale, key))
    if len(caches) == 1:
        ops.kv_cache_update_(*caches, *rows, kv_layout)
    else:
        reject_kv_layout(kv_layout)
        ops.kv_cache_update_split_(*caches, *rows)


def reject_scales(kv_cache: Cache, k_scale: object, v_scale: object) -> None:
    """Refuse what an update with `kv_scale_cache` does not take."""
    if not isinstance(kv_cache, torch.Tensor):
        text = "kv_scale_cache is given with K and V in two buffers, expected one buffer"
        raise ValueError(f"{_OPERATOR.target}: {text}")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            raise ValueError(f"{_OPERATOR.target}: {name} is given, but kv_scale_cache holds the scales")


def donate(*caches: torch.Tensor) -> None:
    """Mark XLA tensors as buffer donors in compiled code; elsewhere, `copy_` into a tensor donates its buffer."""
    if torch.compiler.is_compiling():
        for cache in caches:
            torch.ops.xla.dynamo_set_buffer_donor_(cache, True)


def slots(slot_mapping: torch.Tensor) -> torch.Tensor:
    """Slots as i32 or i64, which the target takes."""
    return index_operand("slot_mapping", slot_mapping, keep=(torch.int32, torch.int64))


def _lower(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_layout: str | None = None,
) -> Call:
    return Call(
        _OPERATOR.target,
        {"kv_cache": kv_cache, **_rows(key, value, slot_mapping, k_scale, v_scale), "kv_scale_cache": None},
        (Result(kv_cache.shape, kv_cache.dtype),),
        {"kv_layout": kv_layout_number(kv_layout or "interleaved")},
        strided=(1, 2),
    )


def _lower_scaled(
    kv_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scale_cache: torch.Tensor,
    kv_layout: str | None = None,
) -> Call:
    call = _lower(kv_cache, key, value, slot_mapping, kv_layout=kv_layout)
    return dataclasses.replace(
        call,
        operands={**call.operands, "kv_scale_cache": kv_scale_cache},
        results=(*call.results, Result(kv_scale_cache.shape, kv_scale_cache.dtype)),
    )


def _lower_split(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> Call:
    return Call(
        _SPLIT.target,
        {"k_cache": k_cache, "v_cache": v_cache, **_rows(key, value, slot_mapping, k_scale, v_scale)},
        (Result(k_cache.shape, k_cache.dtype), Result(v_cache.shape, v_cache.dtype)),
        {},
        strided=(2, 3),
    )


def _rows(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> dict[str, torch.Tensor | None]:
    return {
        "key": key,
        "value": value,
        "slot_mapping": slots(slot_mapping),
        "k_scale": scale_operand(k_scale),
        "v_scale": scale_operand(v_scale),
    }


_LAYOUT = "str? kv_layout=None"
_OPTIONS = f"{_OPERATOR.optional_tensors(without=('kv_scale_cache',))}, {_LAYOUT}"

define(
    "xla_gpu::kv_cache_update",
    f"({_OPERATOR.required_tensors()}, {_OPTIONS}) -> Tensor",
    _lower,
    lambda results: results[0],
)
define(
    "xla_gpu::kv_cache_update_",
    f"({_OPERATOR.required_tensors(in_place=True)}, {_OPTIONS}) -> ()",
    _lower,
    lambda _: None,
    in_place=True,
)
define(
    "xla_gpu::kv_cache_update_scaled",
    f"({_OPERATOR.required_tensors()}, Tensor kv_scale_cache, {_LAYOUT}) -> (Tensor, Tensor)",
    _lower_scaled,
    tuple,
)
define(
    "xla_gpu::kv_cache_update_scaled_",
    f"({_OPERATOR.required_tensors(in_place=True)}, Tensor(b!) kv_scale_cache, {_LAYOUT}) -> ()",
    _lower_scaled,
    lambda _: None,
    in_place=True,
)
define(
    "xla_gpu::kv_cache_update_split",
    f"({_SPLIT.required_tensors()}, {_SPLIT.optional_tensors()}) -> (Tensor, Tensor)",
    _lower_split,
    tuple,
)
define(
    "xla_gpu::kv_cache_update_split_",
    f"({_SPLIT.required_tensors(in_place=True)}, {_SPLIT.optional_tensors()}) -> ()",
    _lower_split,
    lambda _: None,
    in_place=True,
)
