"""Which tokens of a sequence a device holds if page p of the sequence is on device p mod n."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import ArrayLike

from ._call import Array, static_i64
from ._context_parallel_states import AxisName, num_devices_along
from ._indices import index_operand
from ._ragged_rows import row_places

SLOTS = "context_parallel_slots"
TABLES = "context_parallel_block_tables"
_LARGEST = np.iinfo(np.int32).max


def local_lens(lens: Array, page_size: int, axis_name: AxisName, num_devices: int) -> Array:
    """How many of the first `lens` tokens of a sequence are in pages of this device."""
    rank = lax.axis_index(axis_name)
    pages, rest = lens // page_size, lens % page_size
    whole = (pages - rank + num_devices - 1) // num_devices
    return whole * page_size + jnp.where(pages % num_devices == rank, rest, 0)


def context_parallel_slots(
    positions: Array,
    block_tables: Array,
    page_size: int,
    axis_name: AxisName,
    *,
    query_start_loc: Array | None = None,
    num_seqs: Array | int | None = None,
) -> Array:
    """The slots of new tokens in a cache whose pages are spread over the devices of a mesh axis.

    For use inside ``jax.shard_map``, with `kv_cache_update` or `rope_kv_cache_update`, which skip slots of -1. The
    layout is that of `context_parallel_paged_attention`: page p of a sequence is on device p mod n.

    Parameters
    ----------
    positions : Array
        ``i32[T]``: the position of each token in its sequence, from 0.
    block_tables : Array
        ``i32[S, M]``: this device's pages of each sequence, in order.
    page_size : int
        Tokens of a page.
    axis_name : str or tuple of str
        The mesh axis, or axes, over which pages are spread.
    query_start_loc : Array, optional
        ``i32[S + 1]``: the first token of each sequence and, last, the end. Without it token t is of sequence t, and T
        is S: one new token per sequence.
    num_seqs : Array or int, optional
        ``i32[1]``: how many of the S sequences are in use, S by default. Only with `query_start_loc`.

    Returns
    -------
    Array
        ``i32[T]``: the slot on this device; -1 where another device holds the token, for a token of no sequence, for a
        negative position, and for one beyond the ``n * M`` pages of a sequence.

    Raises
    ------
    ValueError
        The axis does not exist, or shapes do not fit together; the text names the operand.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import PartitionSpec as P
    >>> from xla_attention.jax import context_parallel_slots
    >>> def slots(positions, tables):
    ...     return context_parallel_slots(positions, tables, 16, "cp")
    >>> mesh = jax.make_mesh((1,), ("cp",))
    >>> slots = jax.shard_map(slots, mesh=mesh, in_specs=P(), out_specs=P("cp"))
    >>> slots(jnp.array([3, 16, -1]), jnp.array([[7, 2], [5, 1], [0, 0]])).tolist()
    [115, 16, -1]
    """
    num_devices = num_devices_along(SLOTS, axis_name)
    positions = index_operand("positions", positions)
    tables = index_operand("block_tables", block_tables)
    page_size = int(static_i64("page_size", page_size))
    if page_size < 1:
        raise ValueError(f"{SLOTS}: page_size is {page_size}, expected >= 1")
    if positions.ndim != 1 or tables.ndim != 2:
        shapes = f"positions has shape {list(positions.shape)} and block_tables {list(tables.shape)}"
        raise ValueError(f"{SLOTS}: {shapes}, expected [T] and [S, M]")
    seqs = tables.shape[0]
    if query_start_loc is None:
        if num_seqs is not None:
            raise ValueError(f"{SLOTS}: num_seqs is given and query_start_loc is None, expected both or neither")
        if positions.shape[0] != seqs:
            text = f"expected one per row of block_tables, {seqs}, or query_start_loc"
            raise ValueError(f"{SLOTS}: positions has shape {list(positions.shape)}, {text}")
        has_sequence = True
    else:
        starts = index_operand("query_start_loc", query_start_loc)
        if starts.shape != (seqs + 1,):
            raise ValueError(f"{SLOTS}: query_start_loc has shape {list(starts.shape)}, expected [S + 1 = {seqs + 1}]")
        num_seqs = index_operand("num_seqs", seqs if num_seqs is None else num_seqs)
    if 0 in (*tables.shape, positions.shape[0]):
        return jnp.full(positions.shape, -1, jnp.int32)
    if query_start_loc is not None:
        places = row_places(jnp.zeros((seqs,), jnp.int32), starts, num_seqs, positions.shape[0], 0)
        tables, has_sequence = tables[places.sequence], places.has_sequence
    page = positions // page_size
    column = page // num_devices
    is_here = has_sequence & (positions >= 0) & (page % num_devices == lax.axis_index(axis_name))
    is_here &= column < tables.shape[1]
    local = jnp.take_along_axis(tables, jnp.clip(column, 0, tables.shape[1] - 1)[:, None], axis=1)[:, 0]
    is_here &= (local >= 0) & (local < _LARGEST // page_size)
    return jnp.where(is_here, local * page_size + positions % page_size, -1)


class LocalPages(NamedTuple):
    """The pages of n devices, on the host."""

    block_tables: np.ndarray
    pages: np.ndarray


def context_parallel_block_tables(
    block_tables: ArrayLike,
    context_lens: ArrayLike,
    page_size: int,
    num_devices: int,
    *,
    num_pages: int | None = None,
) -> LocalPages:
    """Spread the pages of sequences over devices: local page numbers for a cache that was whole on one device.

    On the host, in NumPy. The layout is that of `context_parallel_paged_attention`: page p of a sequence is on device
    p mod n. A page that several sequences share stays one page, on each device that needs it.

    Parameters
    ----------
    block_tables : array_like
        ``[S, M]``: the pages of each sequence, in order, in the whole cache.
    context_lens : array_like
        ``[S]``: the tokens of each sequence. Entries of `block_tables` after their pages may hold anything.
    page_size : int
        Tokens of a page.
    num_devices : int
        n, the devices of the mesh axis.
    num_pages : int, optional
        P, the pages of each device; by default as many as the fullest device needs, at least 1.

    Returns
    -------
    block_tables : numpy.ndarray
        ``i32[n, S, ceil(M / n)]``: entry i of device r is the local page of the sequence's page ``i * n + r``; 0 after
        its last page. Sharded over its first dimension, it gives each device its table.
    pages : numpy.ndarray
        ``i32[n, P]``: which page of the whole cache each local page is; -1 for a free one. The devices' caches, one
        after the other, are ``kv_cache[pages.reshape(-1)]``.

    Raises
    ------
    ValueError
        A page is negative, a sequence is longer than its row of the table, a device has too few pages, or shapes do
        not fit together; the text names the argument.

    Examples
    --------
    Sequences of 10 and 3 tokens in pages of 4, over two devices.

    >>> from xla_attention.jax import context_parallel_block_tables
    >>> tables, pages = context_parallel_block_tables([[7, 2, 5], [1, 0, 0]], [10, 3], 4, 2, num_pages=4)
    >>> tables.tolist()
    [[[2, 1], [0, 0]], [[0, 0], [0, 0]]]
    >>> pages.tolist()
    [[1, 5, 7, -1], [2, -1, -1, -1]]
    """
    tables, lens = _host_integers("block_tables", block_tables, 2), _host_integers("context_lens", context_lens, 1)
    for name, size in (("page_size", page_size), ("num_devices", num_devices)):
        if size < 1:
            raise ValueError(f"{TABLES}: {name} is {size}, expected >= 1")
    if lens.shape != tables.shape[:1]:
        raise ValueError(f"{TABLES}: context_lens has shape {list(lens.shape)}, expected [S={tables.shape[0]}]")
    used = -(-np.maximum(lens, 0) // page_size)
    if (used > tables.shape[1]).any():
        text = f"expected at most {tables.shape[1] * page_size} tokens, the pages of a row of block_tables"
        raise ValueError(f"{TABLES}: context_lens has {lens.max()}, {text}")
    is_used = np.arange(tables.shape[1]) < used[:, None]
    if (tables[is_used] < 0).any():
        raise ValueError(f"{TABLES}: block_tables has page {tables[is_used].min()}, expected >= 0")
    local = np.zeros((num_devices, tables.shape[0], -(-tables.shape[1] // num_devices)), np.int32)
    on_device = []
    for rank in range(num_devices):
        here = is_used[:, rank::num_devices]
        pages, numbers = np.unique(tables[:, rank::num_devices][here], return_inverse=True)
        local[rank, :, : here.shape[1]][here] = numbers.reshape(-1)
        on_device.append(pages)
    needed = max(map(len, on_device))
    if num_pages is None:
        num_pages = max(needed, 1)
    if num_pages < needed:
        raise ValueError(f"{TABLES}: num_pages is {num_pages}, expected >= {needed}, the pages of the fullest device")
    pages = [np.pad(x, (0, num_pages - len(x)), constant_values=-1) for x in on_device]
    return LocalPages(local, np.stack(pages).astype(np.int32))


def _host_integers(name: str, value: ArrayLike, rank: int) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or array.ndim != rank:
        raise ValueError(f"{TABLES}: {name} is {array.dtype}{list(array.shape)}, expected integers of rank {rank}")
    return array.astype(np.int64)
