"""Options that every front-end gives as Python values."""

import numpy as np

# The attribute kv_layout of SPEC 2.6.
_LAYOUTS = {
    None: np.int64(0),  # K and V apart
    "interleaved": np.int64(1),  # [P, page_size, 2*Hkv, D], K of head h at 2h, V at 2h+1
    "stacked": np.int64(2),  # [2, P, page_size, Hkv, D], as vLLM has it
    "per_page": np.int64(3),  # [P, 2, page_size, Hkv, D], as FlashInfer has it
}


def kv_layout_number(name: str | None) -> np.int64:
    """The attribute ``kv_layout``; None where K and V are apart."""
    if name not in _LAYOUTS:
        raise ValueError(
            f"kv_layout is {name!r}, expected 'interleaved', 'stacked' or 'per_page', or None for K and V apart"
        )
    return _LAYOUTS[name]


def length_advice(length: int) -> np.int64:
    """A length as ``max_seqlen_q`` or ``max_seqlen_k``: rounded up to a power of two, for few programs to compile.

    0 is unknown; a negative number stays, to be refused.
    """
    return np.int64(length if length <= 0 else 1 << (length - 1).bit_length())
