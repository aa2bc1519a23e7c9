"""How K and V lie, by the names that JAX users give it."""

import numpy as np

# The attribute kv_layout of SPEC 2.6.
_NUMBERS = {
    None: np.int64(0),  # K and V apart
    "interleaved": np.int64(1),  # [P, page_size, 2*Hkv, D], K of head h at 2h, V at 2h+1
    "stacked": np.int64(2),  # [2, P, page_size, Hkv, D], as vLLM has it
    "per_page": np.int64(3),  # [P, 2, page_size, Hkv, D], as FlashInfer has it
}


def kv_layout_number(name: str | None) -> np.int64:
    """The attribute ``kv_layout``; None where K and V are apart."""
    if name not in _NUMBERS:
        raise ValueError(
            f"kv_layout is {name!r}, expected 'interleaved', 'stacked' or 'per_page', or None for K and V apart"
        )
    return _NUMBERS[name]
