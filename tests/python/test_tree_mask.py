"""Masks of trees: packing, the forms of other libraries, and what a tree means in a call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_attention.jax as xa
from batches import batch
from calls import SEQUENCES

# Keys and query rows of four sequences; the third has fewer keys than rows, and the last is too long for Q_MAX.
KEYS, ROWS, Q_MAX = np.int32([40, 9, 3, 70]), np.int32([9, 2, 5, 38]), 33
STARTS = np.int32([0, *np.cumsum(ROWS)])


def trees(seed=0):
    """Random trees ``[S, Q_MAX, Q_MAX]``, False past the rows of a sequence and in the sequence that is too long."""
    mask = np.random.default_rng(seed).random((4, Q_MAX, Q_MAX)) < 0.5
    row = np.arange(Q_MAX)
    used = (row < ROWS[:, None]) & (ROWS[:, None] <= Q_MAX)
    return mask & used[:, :, None] & used[:, None, :]


def custom_masks(tree, widths=KEYS):
    """Masks of all keys of each sequence, `widths` keys per row, with all older keys visible."""
    masks = []
    for b, (keys, rows, width) in enumerate(zip(KEYS, ROWS, widths, strict=True)):
        mask = np.arange(width) < np.full((rows, 1), max(keys - rows, 0))
        for i in range(min(rows, Q_MAX) if rows <= Q_MAX else 0):
            for j in range(rows):
                if keys - rows + j >= 0:
                    mask[i, keys - rows + j] = tree[b, i, j]
        masks.append(mask.ravel())
    return masks


def expected_words(tree):
    tree = tree.copy()
    tree[2, :, : ROWS[2] - KEYS[2]] = False  # keys that do not exist
    return np.asarray(xa.pack_tree_mask(tree))


def words_of(tree_mask):
    """The words of sequences that have a tree, without the bits of keys that do not exist."""
    mask = np.unpackbits(np.asarray(tree_mask).view(np.uint8), axis=-1, bitorder="little")[..., :Q_MAX].astype(bool)
    mask[2, :, : ROWS[2] - KEYS[2]] = False
    return np.asarray(xa.pack_tree_mask(mask))[:3]


@pytest.mark.parametrize("q_max", [0, 1, 31, 32, 33, 64])
def test_bits_are_those_of_numpy(q_max):
    mask = np.random.default_rng(q_max).random((3, q_max, q_max)) < 0.5
    padded = np.pad(mask, [(0, 0), (0, 0), (0, -q_max % 32)])
    expected = np.packbits(padded, axis=-1, bitorder="little").view(np.int32)
    for pack in (xa.pack_tree_mask, jax.jit(xa.pack_tree_mask)):
        packed = pack(mask)
        assert packed.dtype == jnp.int32
        np.testing.assert_array_equal(packed, expected)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
@pytest.mark.parametrize("jit", [False, True])
def test_masks_of_all_keys_become_trees(aligned, dtype, jit):
    tree = trees()
    widths = -(-KEYS // 16) * 16 if aligned else KEYS
    flat = np.concatenate(custom_masks(tree, widths)).astype(dtype)

    def convert(flat, keys, starts, widths):
        options = {"mask_kv_lens": widths} if aligned else {}
        return xa.tree_mask_from_custom_mask(flat, keys, starts, Q_MAX, **options)

    actual = (jax.jit(convert) if jit else convert)(flat, KEYS, STARTS, widths)
    assert actual.shape == (4, Q_MAX, 2)
    np.testing.assert_array_equal(words_of(actual), expected_words(tree)[:3])


@pytest.mark.parametrize("jit", [False, True])
def test_packed_masks_of_all_keys_become_trees(jit):
    tree = trees(1)
    segments = [np.packbits(mask, bitorder="little") for mask in custom_masks(tree)]
    indptr = np.int32([0, *np.cumsum([len(x) for x in segments])])

    def convert(*operands):
        return xa.tree_mask_from_packed_custom_mask(*operands, Q_MAX)

    actual = (jax.jit(convert) if jit else convert)(np.concatenate(segments), indptr, KEYS, STARTS)
    np.testing.assert_array_equal(words_of(actual), expected_words(tree)[:3])


def test_a_hidden_older_key_is_refused_where_values_are_known():
    masks = custom_masks(trees())
    masks[1][KEYS[1] + 3] = False
    flat = np.concatenate(masks)
    with pytest.raises(ValueError, match="sequence 1 hides key 3 from row 1, which tree_mask cannot express"):
        xa.tree_mask_from_custom_mask(flat, KEYS, STARTS, Q_MAX)
    xa.tree_mask_from_custom_mask(jnp.asarray(flat), KEYS, STARTS, Q_MAX)
    segments = [np.packbits(mask, bitorder="little") for mask in masks]
    indptr = np.int32([0, *np.cumsum([len(x) for x in segments])])
    with pytest.raises(ValueError, match="sequence 1 hides key 3 from row 1, which tree_mask cannot express"):
        xa.tree_mask_from_packed_custom_mask(np.concatenate(segments), indptr, KEYS, STARTS, Q_MAX)


CALL = dict(
    zip(
        ("query", "kv_cache", "context_lens", "block_tables", "query_start_loc", "num_seqs"),
        batch(SEQUENCES),
        strict=True,
    )
)


def test_u32_and_i32_are_the_same_bits():
    words = np.random.default_rng(3).integers(0, 2**32, (6, 9, 1), np.uint32)
    results = [xa.paged_attention(**CALL, scale=0.1, tree_mask=x) for x in (words, words.view(np.int32))]
    np.testing.assert_array_equal(*results)


def test_a_causal_tree_changes_nothing():
    causal = xa.pack_tree_mask(np.broadcast_to(np.tri(9, dtype=bool), (6, 9, 9)))
    actual = xa.paged_attention(**CALL, scale=0.1, tree_mask=causal)
    np.testing.assert_allclose(actual, xa.paged_attention(**CALL, scale=0.1), atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        (np.zeros((6, 9, 1), np.int64), TypeError, "tree_mask has dtype int64, expected int32 or uint32"),
        (np.zeros((6, 9, 9), bool), TypeError, "pack_tree_mask packs booleans"),
        (np.zeros((6, 40, 1), np.int32), ValueError, r"tree_mask has shape \[6, 40, 1\], expected"),
        (np.zeros((5, 9, 1), np.int32), ValueError, r"expected \[num_seqs=6, q_max, ceil\(q_max/32\)\]"),
    ],
)
def test_other_masks_are_refused(mask, error, text):
    with pytest.raises(error, match=text):
        xa.paged_attention(**CALL, scale=0.1, tree_mask=mask)


def test_packing_refuses_what_is_no_square_of_booleans():
    for mask in (np.zeros((2, 3, 4), bool), np.zeros((3, 3)), np.zeros(4, bool)):
        with pytest.raises(ValueError, match=r"pack_tree_mask: mask is .*, expected booleans \[..., q_max, q_max\]"):
            xa.pack_tree_mask(mask)
    with pytest.raises(ValueError, match=r"query_start_loc has shape \[4\], expected \[S\+1=5\]"):
        xa.tree_mask_from_custom_mask(np.ones(4, int), KEYS, STARTS[1:], 4)
    with pytest.raises(ValueError, match=r"packed_custom_mask is int\d+\[4\], expected uint8 \[N\]"):
        xa.tree_mask_from_packed_custom_mask(np.ones(4, int), STARTS, KEYS, STARTS, 4)
