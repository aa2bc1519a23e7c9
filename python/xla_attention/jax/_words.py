"""Words of operands that several operators have, see `_partition`."""

from .._options import kv_layout_number
from ._call import Array

# Of a cache in one buffer, by the number of its layout.
PAGES = {
    kv_layout_number("interleaved"): "Pscd",
    kv_layout_number("stacked"): "KPshd",
    kv_layout_number("per_page"): "PKshd",
}


def of_scale(scale: Array | None) -> str:
    """One value for all heads, or one for each."""
    return "." if scale is None or scale.shape == (1,) else "h"


def of_scores(slopes: Array | None, _sinks: Array | None, *scales: Array | None) -> tuple[str, ...]:
    """ALiBi's slopes, of heads or of sequences and heads; sinks; scales."""
    return (".H" if slopes is not None and slopes.ndim == 2 else "H", "H", *map(of_scale, scales))


def of_sequences(num_seqs: Array) -> tuple[str, ...]:
    """Lengths, pages and starts of the sequences of a ragged batch; how many there are, ``i32[]`` or ``i32[1]``."""
    return ".", "..", ".", "." * num_seqs.ndim
