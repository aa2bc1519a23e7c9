"""Packed KV caches of JAX serving, ``[P, page_size, rows, packing, lanes]``, as the pages of our operators.

A TPU stores `packing` numbers of neighbouring rows in each 32-bit word. In XLA's arrays this does not show: ``rows *
packing`` is one dimension, and a packed cache is a bitcast of the interleaved layout ``[P, page_size, 2*Hkv, D]``.

Arrays are broadcast by hand, because callers may set ``jax_numpy_rank_promotion="raise"``.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ._call import Array
from ._ragged_rows import row_places

_LANES = 128  # of a TPU's vector register: rows of a packed cache are a multiple of it
_LAYOUTS = {"interleaved": "K and V of a head in two rows", "concatenated": "K and V of a head in one row of 128"}


class PackedForm(NamedTuple):
    """How a packed cache maps to ``[P, page_size, 2*num_heads, head_dim]``."""

    num_heads: int  # KV heads of the cache, those that fill up a packed word included
    head_dim: int  # of the cache, at least that of the keys
    packed_shape: tuple[int, ...]


def packed_form(function: str, kv_cache: Array, num_kv_heads: int, head_dim: int, kv_layout: str | None) -> PackedForm:
    """The form of a packed cache for keys ``[T, num_kv_heads, head_dim]``.

    Parameters
    ----------
    function
        The public function, which errors name.
    kv_cache
        The packed cache.
    num_kv_heads, head_dim
        The shape of the keys.
    kv_layout
        "interleaved", "concatenated", or None for the one that the shape has.

    Raises
    ------
    ValueError
        The cache has another shape, or `kv_layout` is None and the shape could be either.
    """
    if kv_layout is not None and kv_layout not in _LAYOUTS:
        raise ValueError(
            f"{function}: kv_layout is {kv_layout!r}, expected {' or '.join(map(repr, _LAYOUTS))}, or None"
        )
    if kv_cache.ndim != 5:
        expected = "[num_pages, page_size, rows, packing, lanes]"
        text = f"expected {expected}; paged_attention_update takes a cache [num_pages, page_size, 2*Hkv, D]"
        raise ValueError(f"{function}: kv_cache has shape {list(kv_cache.shape)}, {text}")
    rows, packing, lanes = kv_cache.shape[2:]
    heads = {"interleaved": _align(2 * num_kv_heads, packing), "concatenated": _align(num_kv_heads, packing)}
    padded = _align(head_dim, _LANES)
    fits = {
        "interleaved": lanes in (head_dim, padded) and rows * packing == heads["interleaved"],
        "concatenated": (head_dim, lanes) == (64, 128) and rows * packing == heads["concatenated"],
    }
    if kv_layout == "concatenated" and head_dim != 64:
        raise ValueError(f"{function}: kv_layout is 'concatenated' and keys has head dimension {head_dim}, expected 64")
    candidates = [name for name in _LAYOUTS if fits[name] and kv_layout in (None, name)]
    if not candidates:
        word = max(packing, 1)
        shapes = {
            "interleaved": [heads["interleaved"] // word, packing, padded],
            "concatenated": [heads["concatenated"] // word, packing, 128],
        }
        wanted = [name for name in _LAYOUTS if kv_layout in (None, name) and (name == "interleaved" or head_dim == 64)]
        expected = " or ".join(f"{shapes[name]} ({name}: {_LAYOUTS[name]})" for name in wanted)
        keys = f"keys with {num_kv_heads} heads of {head_dim}"
        text = f"kv_cache has shape {list(kv_cache.shape)} for {keys}, expected its last dimensions to be {expected}"
        raise ValueError(f"{function}: {text}")
    if len(candidates) > 1:
        meanings = "; ".join(f"{name!r}: {meaning}" for name, meaning in _LAYOUTS.items())
        text = f"kv_cache has shape {list(kv_cache.shape)}, which fits both layouts: pass kv_layout ({meanings})"
        raise ValueError(f"{function}: {text}")
    if candidates == ["concatenated"]:
        return PackedForm(rows * packing, head_dim, kv_cache.shape)
    if rows * packing % 2:
        raise ValueError(f"{function}: kv_cache has shape {list(kv_cache.shape)}, expected an even number of heads")
    return PackedForm(rows * packing // 2, lanes, kv_cache.shape)


def unpack(kv_cache: Array, form: PackedForm) -> Array:
    """A packed cache as pages ``[P, page_size, 2*num_heads, head_dim]``."""
    pages, page_size, rows, packing, lanes = form.packed_shape
    # One reshape per pair of dimensions: on a mesh with explicit axes, JAX refuses those that merge and split at once.
    cache = kv_cache.reshape(pages, page_size, rows * packing, lanes)
    if lanes != form.head_dim:
        cache = cache.reshape(pages, page_size, rows * packing, lanes // form.head_dim, form.head_dim)
        cache = cache.reshape(pages, page_size, -1, form.head_dim)
    return cache


def pack(cache: Array, form: PackedForm) -> Array:
    """The inverse of `unpack`."""
    pages, page_size, rows, packing, lanes = form.packed_shape
    if lanes != form.head_dim:
        cache = cache.reshape(pages, page_size, rows * packing, lanes // form.head_dim, form.head_dim)
        cache = cache.reshape(pages, page_size, rows * packing, lanes)
    return cache.reshape(form.packed_shape)


def pad_heads(array: Array, num_heads: int, head_dim: int) -> Array:
    """``[T, H, D]`` as ``[T, num_heads, head_dim]``, filled up with zeros."""
    heads, dim = array.shape[1:]
    if (heads, dim) == (num_heads, head_dim):
        return array
    return jnp.pad(array, ((0, 0), (0, num_heads - heads), (0, head_dim - dim)))


def block_tables(
    page_indices: Array, num_seqs: int, cu_kv_lens: Array | None, page_size: int, pages_per_seq: int | None
) -> Array:
    """The pages of each sequence, ``i32[S, M]``, from flat page indices.

    Parameters
    ----------
    page_indices
        ``i32[N]``: M pages per sequence, or with `cu_kv_lens` the pages of all sequences without gaps.
    num_seqs
        S.
    cu_kv_lens
        ``i32[S + 1]``: where the tokens of each sequence begin if every sequence fills its last page.
    page_size
        Tokens of a page.
    pages_per_seq
        M where there are `cu_kv_lens`; N by default, which is always enough.
    """
    if cu_kv_lens is None:
        return page_indices.reshape(num_seqs, page_indices.shape[0] // max(num_seqs, 1))
    columns = page_indices.shape[0] if pages_per_seq is None else pages_per_seq
    # Rounded up as the TPU kernel does it, without an overflow.
    first = cu_kv_lens[:-1] // page_size + jnp.where(cu_kv_lens[:-1] % page_size, 1, 0)
    # Clipped first, so that the sum does not overflow.
    first = jnp.clip(first, 0, page_indices.shape[0])
    return jnp.take(page_indices, first[:, None] + jnp.arange(columns, dtype=jnp.int32)[None], mode="clip")


def new_token_slots(
    kv_lens: Array, tables: Array, cu_q_lens: Array, num_seqs: Array, num_rows: int, cache_shape: tuple[int, ...]
) -> Array:
    """The slot of each new token, ``i32[num_rows]``: those of a sequence are its last keys.

    -1 for a row that belongs to no sequence, for one of more rows than keys, and where the page is not in the cache.
    Metadata that are out of range count as in `paged_attention_update` (``docs/semantics.md#metadata``).

    Parameters
    ----------
    kv_lens, tables, cu_q_lens, num_seqs
        The operands ``context_lens``, ``block_tables``, ``query_start_loc`` and ``num_seqs`` (``i32[1]``).
    num_rows
        T.
    cache_shape
        ``[P, page_size, ...]``.
    """
    pages, page_size = cache_shape[:2]
    seqs, columns = tables.shape
    if 0 in (pages, page_size, seqs, columns):
        return jnp.full((num_rows,), -1, jnp.int32)
    capacity = min(columns * page_size, np.iinfo(np.int32).max)
    seq, position, has_sequence = row_places(kv_lens, cu_q_lens, num_seqs, num_rows, capacity)
    is_stored = has_sequence & (position >= 0)
    position = jnp.maximum(position, 0)
    page = tables[seq, position // page_size]
    is_stored &= (page >= 0) & (page < pages)
    return jnp.where(is_stored, jnp.clip(page, 0, pages - 1) * page_size + position % page_size, -1)


def slots_fit(cache_shape: tuple[int, ...]) -> bool:
    """Whether i32 holds every slot of a cache ``[P, page_size, ...]``, as with a symbolic P."""
    return not isinstance(cache_shape[0], int) or math.prod(cache_shape[:2]) <= np.iinfo(np.int32).max


def _align(number: int, multiple: int) -> int:
    return -(-number // max(multiple, 1)) * multiple
