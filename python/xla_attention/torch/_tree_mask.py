"""Masks of trees of draft tokens: `tree_mask` of the paged operators."""

import torch

from .._options import TREE_WORD_BITS, tree_words, wrong_tree_dtype


def tree_operand(tree_mask: torch.Tensor | None) -> torch.Tensor | None:
    """`tree_mask` as i32, of i32 or u32; bits are not converted."""
    if tree_mask is None or tree_mask.dtype == torch.int32:
        return tree_mask
    if tree_mask.dtype != torch.uint32:
        raise wrong_tree_dtype(tree_mask.dtype)
    return tree_mask.view(torch.int32)


def pack_tree_mask(mask: torch.Tensor) -> torch.Tensor:
    """Pack the masks of trees of draft tokens into bits, `tree_mask` of `paged_attention`.

    Parameters
    ----------
    mask : Tensor
        Booleans ``[..., q_max, q_max]``: whether the query row of a sequence that is given second to last attends to
        the key of the row that is given last. Rows and keys past those of a sequence do not count.

    Returns
    -------
    Tensor
        ``i32[..., q_max, ceil(q_max / 32)]``; bit ``j % 32`` of word ``j // 32`` is that of key j.

    Examples
    --------
    Two drafts of one token each after the last one of a sequence:

    >>> import torch
    >>> from xla_attention.torch import pack_tree_mask
    >>> pack_tree_mask(torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool())[..., 0].tolist()
    [[1, 3, 5]]
    """
    words = tree_words(mask.shape, mask.dtype, is_bool=mask.dtype == torch.bool)
    bits = torch.nn.functional.pad(mask, (0, words * TREE_WORD_BITS - mask.shape[-1])).unflatten(
        -1, (words, TREE_WORD_BITS)
    )
    # Signed arithmetic wraps: bit 31 makes the word negative.
    weights = torch.ones((), dtype=torch.int32, device=mask.device) << torch.arange(
        TREE_WORD_BITS, dtype=torch.int32, device=mask.device
    )
    return (bits * weights).sum(-1, dtype=torch.int32)
