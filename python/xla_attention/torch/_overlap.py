"""Overlaps in memory of the operands that an eager call writes."""

from collections.abc import Sequence

import torch

# The number of bytes between the start of a tensor's first element and the end of its last, and whether it is dense;
# None for a tensor without elements.
Extent = tuple[int, bool] | None


def extent_of(tensor: torch.Tensor | None) -> Extent:
    """The extent of a tensor."""
    if tensor is None or not tensor.numel():
        return None
    if tensor.is_contiguous():
        return tensor.nbytes, True
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size(), False


def has_internal_overlap(tensor: torch.Tensor) -> bool:
    """Whether an expanded dimension gives several elements one address."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def reject_internal_overlap(target: str, name: str, written: torch.Tensor) -> None:
    """Raise ValueError for a written tensor in which several elements share an address, as torch's operators do."""
    if written.numel() and not written.is_contiguous() and has_internal_overlap(written):
        raise ValueError(
            f"{target}: {name} is written to and has strides {written.stride()}, with several elements in one place; "
            "expected each in its own: clone() it first"
        )


def reject_overlap(
    target: str, names: Sequence[str], index: int, addresses: Sequence[int], extents: Sequence[Extent]
) -> None:
    """Raise ValueError for a written operand that shares memory with another, as torch's operators do.

    Strided tensors may interleave, such as ``kv[:, 0]`` and ``kv[:, 1]``.
    """
    if extents[index] is None:
        return
    first, (size, is_dense) = addresses[index], extents[index]
    end = first + size
    for i, (begin, extent) in enumerate(zip(addresses, extents, strict=True)):
        if extent is None or i == index:
            continue
        stop = begin + extent[0]
        if stop <= first or end <= begin:
            continue
        # As in torch, an overlap of two strided tensors is found only where they begin or end at one address.
        if (
            (is_dense and (first <= begin or stop <= end))
            or (extent[1] and (begin <= first or end <= stop))
            or (begin == first or stop == end)
        ):
            raise ValueError(
                f"{target}: {names[index]} is written to and overlaps {names[i]}; clone() one of them first"
            )
