"""Masks of trees in torch: packing, and the dtypes of `tree_mask`."""

import numpy as np
import pytest
import torch

from batches import batch
from calls import SEQUENCES
from xla_attention.torch import pack_tree_mask, paged_attention

OPERANDS = [torch.from_numpy(x) for x in batch(SEQUENCES)]


@pytest.mark.parametrize("q_max", [0, 1, 31, 32, 33, 64])
def test_bits_are_those_of_numpy(q_max):
    mask = np.random.default_rng(q_max).random((3, q_max, q_max)) < 0.5
    padded = np.pad(mask, [(0, 0), (0, 0), (0, -q_max % 32)])
    expected = np.packbits(padded, axis=-1, bitorder="little").view(np.int32)
    packed = pack_tree_mask(torch.from_numpy(mask))
    assert packed.dtype == torch.int32
    np.testing.assert_array_equal(packed, expected)


def test_packing_refuses_what_is_no_square_of_booleans():
    for mask in (torch.zeros(2, 3, 4).bool(), torch.zeros(3, 3), torch.zeros(4).bool()):
        with pytest.raises(ValueError, match=r"pack_tree_mask: mask is .*, expected booleans \[..., q_max, q_max\]"):
            pack_tree_mask(mask)


def test_u32_and_i32_are_the_same_bits():
    words = torch.from_numpy(np.random.default_rng(3).integers(-(2**31), 2**31, (6, 9, 1)).astype(np.int32))
    results = [paged_attention(*OPERANDS, 0.1, tree_mask=x) for x in (words, words.view(torch.uint32))]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_causal_tree_changes_nothing():
    causal = pack_tree_mask(torch.ones(9, 9).tril().bool().expand(6, 9, 9))
    torch.testing.assert_close(paged_attention(*OPERANDS, 0.1, tree_mask=causal), paged_attention(*OPERANDS, 0.1))


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"tree_mask has dtype torch.int64, expected int32 or uint32"):
        paged_attention(*OPERANDS, 0.1, tree_mask=torch.zeros(6, 9, 1, dtype=torch.int64))
