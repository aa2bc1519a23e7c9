"""Cases for context_parallel_program.py: calls of context_parallel_attention, each over several packed streams."""

import itertools
from typing import NamedTuple

import numpy as np

TOTAL = 128
# Starts of sequences in 128 rows; odd ones, empty ones, sequences that end where a device's rows do, unused rows.
STREAMS = {
    "contiguous": {
        "one": [0, 128],
        "packed": [0, 5, 38, 39, 39, 100, 128],
        "short": range(0, 129, 8),
        "ends": [3, 17, 32, 33, 96, 120],
        "outside": [40, 44, 44],
    },
    "zigzag": {
        "one": [0, 128],
        "packed": [0, 8, 40, 40, 104, 128],
        "short": range(0, 129, 8),
        "ends": [8, 24, 24, 32, 96, 112],
        "outside": [40, 48, 48],
    },
}
NUM_SEQS = 16


class Case(NamedTuple):
    """A call; `heads` are those of q and of K and V."""

    strategy: str
    layout: str
    options: dict
    sinks: bool = False
    seqused: bool = False
    slopes: str = ""  # "heads", or "sequences"
    dlse: bool = True
    heads: tuple[int, int] = (4, 2)
    value_dim: int = 16
    dtype: str = "float32"
    devices: int = 4
    check_vma: bool = True


def stream(case, name):
    """The starts, with empty sequences behind so that every stream has as many, and the used rows."""
    starts = np.array(STREAMS[case.layout][name], np.int32)
    starts = np.append(starts, np.full(NUM_SEQS + 1 - len(starts), starts[-1], np.int32))
    lengths = np.diff(starts)
    # All rows of some sequences, some of others, none, and more than there are.
    used = np.stack([lengths, lengths * 2 // 3, lengths * 0, lengths + 9, lengths // 5])
    return starts, used[np.arange(NUM_SEQS) % 5, np.arange(NUM_SEQS)].astype(np.int32) if case.seqused else None


def _case(strategy, layout="contiguous", *, causal=True, window=(-1, -1), softcap=0.0, **more):
    return Case(strategy, layout, {"causal": causal, "window": window, "softcap": softcap}, **more)


CASES = {
    "all_gather": _case("all_gather", sinks=True, softcap=1.5),
    "all_gather, full": _case("all_gather", causal=False, seqused=True, dlse=False),
    "all_gather, window": _case("all_gather", window=(20, 0), slopes="heads", seqused=True, sinks=True),
    "all_gather, zigzag": _case("all_gather", "zigzag", sinks=True, seqused=True, value_dim=24),
    "all_gather, zigzag, full": _case("all_gather", "zigzag", causal=False, softcap=1.5, seqused=True),
    "all_gather, zigzag, window": _case("all_gather", "zigzag", window=(20, 5), slopes="sequences", sinks=True),
    "all_gather, two-sided": _case(
        "all_gather", causal=False, window=(5, 40), slopes="sequences", seqused=True, sinks=True
    ),
    "all_gather, zigzag, two-sided": _case(
        "all_gather", "zigzag", causal=False, window=(40, 9), slopes="heads", seqused=True
    ),
    "ring": _case("ring", sinks=True, seqused=True, value_dim=24),
    "ring, full": _case("ring", causal=False, softcap=1.5, sinks=True, dlse=False),
    "ring, full, seqused": _case("ring", causal=False, seqused=True),
    "ring, zigzag": _case("ring", "zigzag", sinks=True, softcap=1.5),
    "ring, zigzag, seqused": _case("ring", "zigzag", seqused=True, value_dim=24, dlse=False, heads=(3, 3)),
    "ring, zigzag, full": _case("ring", "zigzag", causal=False, seqused=True, sinks=True),
    "ring, slopes": _case("ring", slopes="sequences", sinks=True, seqused=True),
    "ring, two-sided": _case("ring", causal=False, window=(20, 40), sinks=True, seqused=True, dlse=False),
    "ring, zigzag, window": _case("ring", "zigzag", window=(20, 0), sinks=True, seqused=True),
    "ring, zigzag, slopes": _case("ring", "zigzag", slopes="sequences", softcap=1.5, sinks=True),
    "ring, zigzag, two-sided": _case(
        "ring", "zigzag", causal=False, window=(40, 9), slopes="heads", sinks=True, seqused=True
    ),
    "all_to_all": _case("all_to_all", sinks=True, slopes="sequences", seqused=True, heads=(8, 4)),
    "all_to_all, few KV heads": _case("all_to_all", sinks=True, slopes="heads", heads=(8, 2), softcap=1.5),
    "all_to_all, window": _case("all_to_all", causal=False, window=(5, 9), heads=(4, 1), dlse=False),
    "one device": _case("ring", "zigzag", devices=1, sinks=True),
    "two devices": _case("ring", "zigzag", devices=2, seqused=True),
    "ring, unchecked": _case("ring", sinks=True, check_vma=False),
    "all_gather, unchecked": _case("all_gather", "zigzag", sinks=True, check_vma=False),
    "all_to_all, unchecked": _case("all_to_all", sinks=True, check_vma=False, heads=(4, 2)),
    "ring, bf16": _case("ring", "zigzag", sinks=True, dtype="bfloat16"),
    "all_gather, bf16": _case("all_gather", "zigzag", dtype="bfloat16"),
    "halo, bf16": _case("ring", window=(40, 0), dtype="bfloat16"),
    "all_to_all, bf16": _case("all_to_all", dtype="bfloat16", heads=(8, 2)),
}
# The rows of a device are 32. Without `causal`, the window (left, 0) is causal too.
WINDOWS = {
    f"halo of {left}": _case(
        "ring", window=(left, 0), causal=left % 2 == 0, sinks=True, slopes="heads", seqused=left % 3 == 0
    )
    for left in (0, 1, 20, 31, 32, 33, 64, 70, 126)
} | {f"window {left}": _case("ring", window=(left, 0), sinks=True) for left in (127, 300)}
# One case or two of each strategy and layout, which together have every option.
QUICK = (
    "all_gather, window",
    "all_gather, zigzag",
    "ring, full",
    "ring, zigzag",
    "ring, zigzag, two-sided",
    "all_to_all, few KV heads",
    "one device",
    "ring, unchecked",
    "halo, bf16",
    "halo of 33",
)
# For the slow test: every mask and kind of slopes in both layouts of two strategies, with one after the other of the 16
# combinations of the other options.
PRODUCT = CASES | WINDOWS
CASES = {name: PRODUCT.pop(name) for name in QUICK}
_MASKS = {
    "full": (False, (-1, -1)),
    "causal": (True, (-1, -1)),
    "window": (True, (20, 0)),
    "two-sided": (False, (9, 40)),
}
for _index, ((_strategy, _layout), _mask, _slopes) in enumerate(
    itertools.product(
        itertools.product(("all_gather", "ring"), ("contiguous", "zigzag")), _MASKS, ("", "heads", "sequences")
    )
):
    _sinks, _softcap, _seqused, _dlse = (bool(_index * 5 >> bit & 1) for bit in range(4))
    PRODUCT[f"{_strategy}, {_layout}, {_mask}, {_slopes}"] = _case(
        _strategy,
        _layout,
        causal=_MASKS[_mask][0],
        window=_MASKS[_mask][1],
        slopes=_slopes,
        sinks=_sinks,
        softcap=1.5 * _softcap,
        seqused=_seqused,
        dlse=_dlse,
    )
