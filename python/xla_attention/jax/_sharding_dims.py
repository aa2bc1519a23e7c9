"""Dimension letters of operands that several operators have, see `_sharding`."""

import numpy as np

from .._options import kv_layout_number
from ._call import Array

# The letters of a cache in one buffer, by the number of its layout.
CACHE_DIMS = {
    kv_layout_number("interleaved"): "Pscd",
    kv_layout_number("stacked"): "KPshd",
    kv_layout_number("per_page"): "PKshd",
}


def scale_cache_dims(kv_layout: np.int64) -> str:
    """The letters of the scales of a cache's rows: those of the cache, without the last."""
    return CACHE_DIMS[kv_layout][:-1]


def scale_dims(scale: Array | None) -> str:
    """The letter of a scale: ``f32[1]``, which every head shares, or ``f32[Hkv]``."""
    return "." if scale is None or scale.shape == (1,) else "h"


def score_dims(slopes: Array | None, _sinks: Array | None, *scales: Array | None) -> tuple[str, ...]:
    """The letters of ALiBi slopes ``[Hq]`` or ``[B, Hq]``, sinks, and scales."""
    return (".H" if slopes is not None and slopes.ndim == 2 else "H", "H", *map(scale_dims, scales))


def sequence_dims(num_seqs: Array) -> tuple[str, ...]:
    """The letters of ``context_lens, block_tables, query_start_loc, num_seqs``; the last is ``i32[]`` or ``i32[1]``."""
    return ".", "..", ".", "." * num_seqs.ndim
