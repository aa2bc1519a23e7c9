"""`Call`, an operator call with its operands, results and attributes, and conversions of its operands."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import _library
from .._operators import operator

# XLA's numbers of torch's element types.
DTYPES = {getattr(torch, name): number for name, number in _library.DTYPES.items() if hasattr(torch, name)}


class Result(NamedTuple):
    """Shape and dtype of a result; the shape may be symbolic."""

    shape: Sequence[int]
    dtype: torch.dtype


class Workspace(NamedTuple):
    """The sizes that determine the workspace of an attention call; `rows` and `sequences` may be symbolic."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    batch_invariant: bool  # ignored for the gradients
    rows: int
    sequences: int
    bias: _library.BiasSizes | None = None

    def result(self, target: str) -> Result | None:
        """The workspace as a result; None where the target needs none."""
        size = _library.workspace(target, *self._replace(dtype=_number(self.dtype)))
        return Result((size,), torch.uint8) if size else None


@dataclasses.dataclass(frozen=True)
class Call:
    """A call: operands, results and attributes in the order of the target's signature; None for those left out."""

    target: str
    operands: Mapping[str, torch.Tensor | None]
    results: Sequence[Result | None]
    attributes: Mapping[str, np.generic]
    # Indices of the operands that may have any strides, except in the last dimension, where the stride is 1.
    strided: Sequence[int] = ()
    workspace: Workspace | None = None

    @property
    def aliases(self) -> Mapping[int, int]:
        """The index of the operand that a result updates, by the index of the result, of those that are given."""
        operands = list(self.operands.values())
        declared = operator(self.target).aliases.items()
        return {result: operand for result, operand in declared if operands[operand] is not None}

    def device(self) -> torch.device:
        """The device of all operands; ValueError if they are on different devices."""
        given = [(name, tensor.device) for name, tensor in self.operands.items() if tensor is not None]
        first_name, first_device = given[0]
        for name, device in given:
            if device != first_device:
                raise ValueError(
                    f"{self.target}: {name} is on {device}, {first_name} on {first_device}; expected all on one device"
                )
        return first_device

    def validate(self) -> None:
        """Validate the call against the operator's definition, without data; symbolic sizes only when it runs."""
        tensors = [*self.operands.values(), *self.results]
        if all(isinstance(size, int) for tensor in tensors if tensor is not None for size in tensor.shape):
            operands, results = (_shapes(side) for side in (self.operands.values(), self.results))
            _library.check(self.target, operands, results, self.attributes)


def put_workspace(target: str, results: Sequence[Any], workspace: Any) -> list[Any]:  # noqa: ANN401
    """The results with something for the workspace in its place: behind them, or in place of a None among them."""
    place = operator(target).result_index("workspace")
    missing = [None] * (place - len(results))
    return [*results[:place], *missing, workspace, *results[place + 1 :]]


def _shapes(tensors: Iterable[torch.Tensor | Result | None]) -> list[tuple[Sequence[int], int] | None]:
    return [None if tensor is None else (tensor.shape, _number(tensor.dtype)) for tensor in tensors]


def _number(dtype: torch.dtype) -> int:
    """XLA's number of the element type; -1 for one that no operator supports."""
    return DTYPES.get(dtype, -1)


def index_operand(
    name: str, value: torch.Tensor | None, keep: Sequence[torch.dtype] = (torch.int32,)
) -> torch.Tensor | None:
    """An integer operand as i32, or unchanged where its dtype is in `keep`; values saturate, on the device."""
    if value is None or value.dtype in keep:
        return value
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {value.dtype}, expected integers")
    if value.dtype == torch.int64:
        limits = torch.iinfo(torch.int32)
        value = value.clamp(limits.min, limits.max)
    return value.to(torch.int32)


def scale_operand(scale: torch.Tensor | None) -> torch.Tensor | None:
    """A scale of q, K or V as ``f32[1]`` or ``f32[Hkv]``."""
    return None if scale is None else f32_operand(scale).reshape(-1)


def f32_operand(values: torch.Tensor | None) -> torch.Tensor | None:
    """ALiBi slopes or sinks as f32."""
    return None if values is None else values.to(torch.float32)


def output_dtype(query: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of `out`: `out_dtype` if it is given, otherwise the query's, and bf16 for fp8 queries."""
    if out_dtype is not None:
        return out_dtype
    return torch.bfloat16 if query.dtype.itemsize == 1 else query.dtype
