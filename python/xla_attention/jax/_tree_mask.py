"""Masks of trees of draft tokens (`tree_mask` of the paged operators), and the forms that other libraries give them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._options import TREE_WORD_BITS, tree_words, wrong_tree_dtype
from ._call import Array
from ._indices import index_operand


def tree_operand(tree_mask: Any) -> Array | None:  # noqa: ANN401
    """`tree_mask` as it is, i32 or u32; bits are not converted."""
    if tree_mask is None:
        return None
    dtype = getattr(tree_mask, "dtype", None)
    if dtype not in (np.int32, np.uint32):
        raise wrong_tree_dtype(dtype)
    return jnp.asarray(tree_mask)


def pack_tree_mask(mask: Array) -> Array:
    """Pack the masks of trees of draft tokens into bits, `tree_mask` of `paged_attention`.

    Parameters
    ----------
    mask : Array
        Booleans ``[..., q_max, q_max]``: whether the query row of a sequence that is given second to last attends to
        the key of the row that is given last. Rows and keys past those of a sequence do not count.

    Returns
    -------
    Array
        ``i32[..., q_max, ceil(q_max / 32)]``; bit ``j % 32`` of word ``j // 32`` is that of key j.

    Examples
    --------
    Two drafts of one token each after the last one of a sequence:

    >>> import jax.numpy as jnp
    >>> from xla_attention.jax import pack_tree_mask
    >>> tree = jnp.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)
    >>> pack_tree_mask(tree)[..., 0].tolist()
    [[1, 3, 5]]
    """
    mask = jnp.asarray(mask)
    words = tree_words(mask.shape, mask.dtype, is_bool=mask.dtype == jnp.bool_)
    padding = [(0, 0)] * (mask.ndim - 1) + [(0, words * TREE_WORD_BITS - mask.shape[-1])]
    bits = jnp.pad(mask, padding).reshape(*mask.shape[:-1], words, TREE_WORD_BITS)
    packed = (bits.astype(jnp.uint32) << jnp.arange(TREE_WORD_BITS, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(packed, jnp.int32)


def tree_mask_from_custom_mask(
    custom_mask: Array,
    context_lens: Array,
    query_start_loc: Array,
    q_max: int,
    *,
    mask_kv_lens: Array | None = None,
    mask_indptr: Array | None = None,
) -> Array:
    """`tree_mask` of the masks ``[q, kv]`` of sequences one after another, as sglang-jax and FlashInfer have them.

    A mask of theirs says of every key of a sequence whether a query attends to it; `tree_mask` of the newest keys
    alone, and all older ones are visible. Where a mask hides an older key, the result is another one: it is an error if
    all arguments are NumPy arrays, and not noticed otherwise, because the values lie on the device.

    Parameters
    ----------
    custom_mask : Array
        ``[N]``: the masks of the sequences, in row-major order, not 0 where a query attends to a key: sglang-jax's
        ``custom_mask`` in any integer dtype, or FlashInfer's in booleans.
    context_lens : Array
        ``i32[S]``: keys per sequence, those of its query rows included.
    query_start_loc : Array
        ``i32[S + 1]``: the first query row of each sequence and, last, the end.
    q_max : int
        The most query rows of a sequence. A longer one is causal without a tree.
    mask_kv_lens : Array, optional
        ``i32[S]``: the keys that the mask of each sequence has room for, `context_lens` by default. sglang-jax pads
        them to whole pages where ``mask_aligned_to_cu_kv`` is set: the differences of its ``cu_kv_lens``.
    mask_indptr : Array, optional
        ``i32[S + 1]`` or ``i32[S]``: where the mask of each sequence begins; by default where that before it ends.

    Returns
    -------
    Array
        ``i32[S, q_max, ceil(q_max / 32)]``.

    Examples
    --------
    A sequence of four keys, the last two of which are drafts after the second one:

    >>> import numpy as np
    >>> from xla_attention.jax import tree_mask_from_custom_mask
    >>> custom_mask = np.array([1, 1, 1, 0, 1, 1, 0, 1])
    >>> tree_mask_from_custom_mask(custom_mask, np.array([4]), np.array([0, 2]), 2)[..., 0].tolist()
    [[1, 2]]
    """
    arguments = (custom_mask, context_lens, query_start_loc, mask_kv_lens, mask_indptr)
    layout = _Layout("tree_mask_from_custom_mask", context_lens, query_start_loc, q_max, mask_kv_lens)
    flat = jnp.asarray(custom_mask)
    if flat.ndim != 1:
        raise ValueError(f"{layout.name}: custom_mask has shape {list(flat.shape)}, expected [N]")
    starts = layout.starts() if mask_indptr is None else index_operand("mask_indptr", mask_indptr)
    if all(x is None or isinstance(x, np.ndarray) for x in arguments):
        layout.reject_hidden_older_keys(lambda b, at: np.asarray(custom_mask)[at + int(starts[b])] != 0)
    at = starts[: layout.lens.shape[0], None, None] + layout.offsets()
    return pack_tree_mask(layout.shown(_take(flat, at) != 0))


def tree_mask_from_packed_custom_mask(
    packed_custom_mask: Array,
    mask_indptr: Array,
    context_lens: Array,
    query_start_loc: Array,
    q_max: int,
) -> Array:
    """`tree_mask` of FlashInfer's ``packed_custom_mask``.

    As `tree_mask_from_custom_mask`, of bits: ``flashinfer.quantization.segment_packbits`` with the bit order "little"
    packs the mask of each sequence into bytes of its own, the first element into the lowest bit.

    Parameters
    ----------
    packed_custom_mask : Array
        ``u8[N]``
    mask_indptr : Array
        ``i32[S + 1]``: the byte at which the mask of each sequence begins, the second result of ``segment_packbits``.
    context_lens : Array
        ``i32[S]``: keys per sequence, those of its query rows included.
    query_start_loc : Array
        ``i32[S + 1]``: the first query row of each sequence and, last, the end; FlashInfer's ``qo_indptr``.
    q_max : int
        The most query rows of a sequence. A longer one is causal without a tree.

    Returns
    -------
    Array
        ``i32[S, q_max, ceil(q_max / 32)]``.

    Examples
    --------
    The sequence of `tree_mask_from_custom_mask`:

    >>> import numpy as np
    >>> from xla_attention.jax import tree_mask_from_packed_custom_mask
    >>> packed = np.packbits(np.array([1, 1, 1, 0, 1, 1, 0, 1]), bitorder="little")
    >>> mask = tree_mask_from_packed_custom_mask(packed, np.array([0, 1]), np.array([4]), np.array([0, 2]), 2)
    >>> mask[..., 0].tolist()
    [[1, 2]]
    """
    arguments = (packed_custom_mask, mask_indptr, context_lens, query_start_loc)
    layout = _Layout("tree_mask_from_packed_custom_mask", context_lens, query_start_loc, q_max, None)
    flat = jnp.asarray(packed_custom_mask)
    if flat.ndim != 1 or flat.dtype != jnp.uint8:
        text = "expected uint8 [N]"
        raise ValueError(f"{layout.name}: packed_custom_mask is {flat.dtype}{list(flat.shape)}, {text}")
    starts = index_operand("mask_indptr", mask_indptr)
    if all(isinstance(x, np.ndarray) for x in arguments):
        packed = np.asarray(packed_custom_mask)
        layout.reject_hidden_older_keys(lambda b, at: packed[int(starts[b]) + at // 8] >> at % 8 & 1)
    at = layout.offsets()
    byte = _take(flat, starts[: layout.lens.shape[0], None, None] + at // 8)
    return pack_tree_mask(layout.shown((byte >> (at % 8).astype(jnp.uint8) & 1) == 1))


class _Layout:
    """Where the masks ``[q, kv]`` of sequences have the newest keys: all arrays are ``[S, q_max, q_max]``."""

    def __init__(
        self, name: str, context_lens: Array, query_start_loc: Array, q_max: int, mask_kv_lens: Array | None
    ) -> None:
        self.name, self.q_max = name, int(q_max)
        self.lens = index_operand("context_lens", context_lens)
        starts = index_operand("query_start_loc", query_start_loc)
        if self.lens.ndim != 1 or starts.shape != (self.lens.shape[0] + 1,):
            text = f"expected [S+1={self.lens.shape[0] + 1}]" if self.lens.ndim == 1 else "expected context_lens [S]"
            raise ValueError(f"{name}: query_start_loc has shape {list(starts.shape)}, {text}")
        self.queries = starts[1:] - starts[:-1]
        self.widths = self.lens if mask_kv_lens is None else index_operand("mask_kv_lens", mask_kv_lens)

    def starts(self) -> Array:
        """The first element of each sequence's mask."""
        return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(self.queries * self.widths)])

    def offsets(self) -> Array:
        """The elements of the newest keys in the mask of their sequence."""
        row = jnp.arange(self.q_max, dtype=jnp.int32)
        first = (self.lens - self.queries)[:, None, None]
        return jnp.maximum(row[:, None] * self.widths[:, None, None] + first + row, 0)

    def shown(self, bits: Array) -> Array:
        """`bits`, False for rows and keys past those of a sequence."""
        row = jnp.arange(self.q_max, dtype=jnp.int32)
        queries = self.queries[:, None, None]
        return bits & (row[:, None] < queries) & (row < queries)

    def reject_hidden_older_keys(self, bits: Any) -> None:  # noqa: ANN401
        """Raise where a mask hides an older key; ``bits(b, at)`` are those of NumPy indices into the mask of b."""
        for b, (queries, keys, width) in enumerate(
            zip(*map(np.asarray, (self.queries, self.lens, self.widths)), strict=True)
        ):
            if 0 < queries <= self.q_max and keys > queries:
                at = np.arange(queries)[:, None] * width + np.arange(keys - queries)
                hidden = np.argwhere(np.asarray(bits(b, at)) == 0)
                if hidden.size:
                    row, key = hidden[0]
                    text = (
                        "which tree_mask cannot express: all keys before those of the sequence's own rows are visible"
                    )
                    raise ValueError(f"{self.name}: sequence {b} hides key {key} from row {row}, {text}")


def _take(values: Array, at: Array) -> Array:
    """``values[at]``, with indices past the end clamped."""
    if values.shape[0] == 0:
        return jnp.zeros(at.shape, values.dtype)
    return values[jnp.clip(at, 0, values.shape[0] - 1)]
