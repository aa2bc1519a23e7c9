"""The order of the portable prefill's tiles, by its code on the emulator: each tile once, the longest first."""

import ctypes
import itertools
import pathlib
import platform
import subprocess
import sys

import numpy
import pytest

COMPILE = pathlib.Path(__file__).parents[2] / "tests/emulator/compile.py"
ROWS = 128  # of a tile
MAX_CTAS = 4096  # of a launch whose longest tiles come first
POINTERS = ("cu_seqlens_q", "cu_seqlens_k", "tiles")
SIZES = ("num_rows", "num_keys", "num_seqs", "num_kv_heads", "group", "window_right")
FIELDS = ("sequence", "first_token", "len_q", "len_k", "leftpad_k", "start_k", "first_row", "num_rows")

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator is for x86-64")


class Batch(ctypes.Structure):
    """`Batch` of tests/emulator/prefill_tiles.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int32) for name in SIZES),
    ]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The emulated kernel."""
    command = [sys.executable, COMPILE, "xa_prefill_tiles", tmp_path_factory.mktemp("emulator")]
    return ctypes.CDLL(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def tiles_of(kernel, starts_q, starts_k, sizes, heads, window_right):
    """A row of FIELDS for each CTA. `sizes` are the numbers of rows and keys."""
    starts = [numpy.array(each, dtype=numpy.int32) for each in (starts_q, starts_k)]
    num_rows, num_keys = sizes
    kv_heads, group = heads
    num_seqs = len(starts_q) - 1
    ctas = kv_heads * ((num_rows * group + num_seqs * (ROWS - 1)) // ROWS)
    tiles = numpy.full((ctas, len(FIELDS)), -1, dtype=numpy.int32)
    pointers = [each.ctypes.data for each in (*starts, tiles)]
    batch = Batch(*pointers, num_rows, num_keys, num_seqs, kv_heads, group, window_right)
    kernel.xa_emulate(ctas, 1, 1, 1, 128, ctypes.byref(batch))
    return tiles


def end_of_keys(tile, group, window_right):
    """One past the last key that a tile attends to."""
    tile = dict(zip(FIELDS, map(int, tile), strict=True))
    if window_right < 0:
        return tile["len_k"]
    last = (tile["first_row"] + tile["num_rows"] - 1) // group
    return min(max(last + tile["len_k"] - tile["len_q"] + 1 + window_right, 0), tile["len_k"])


def check(kernel, starts_q, starts_k, sizes, heads, window_right):
    kv_heads, group = heads
    tiles = tiles_of(kernel, starts_q, starts_k, sizes, heads, window_right)
    # All KV heads have a tile in adjacent CTAs, and CTAs without a tile come last.
    by_head = tiles.reshape(-1, kv_heads, len(FIELDS))
    assert (by_head == by_head[:, :1]).all()
    tiles = by_head[:, 0]
    count = int((tiles[:, -1] > 0).sum())
    assert (tiles[count:, -1] == 0).all()
    tiles = tiles[:count]
    # Each tile once.
    starts = numpy.maximum.accumulate(numpy.clip(starts_q, 0, sizes[0]))
    packed = [int(rows) * group for rows in numpy.diff(starts)]
    expected = {(i, row, min(ROWS, rows - row)) for i, rows in enumerate(packed) for row in range(0, rows, ROWS)}
    found = [(int(tile[0]), int(tile[-2]), int(tile[-1])) for tile in tiles]
    assert len(found) == len(expected) and set(found) == expected
    # In the order of their ends, to a 16th of the largest, within each group of sequences.
    is_sorted = window_right >= 0 and 3 <= len(packed) <= 32 and len(by_head) * kv_heads <= MAX_CTAS
    per_group = max(min(64 >> (kv_heads - 1).bit_length(), 32), 1) if is_sorted else 1
    groups = [tile[0] // per_group for tile in found]
    assert groups == sorted(groups)
    for _, members in itertools.groupby(zip(groups, tiles, strict=True), key=lambda pair: pair[0]):
        ends = numpy.array([end_of_keys(tile, group, window_right) for _, tile in members])
        latest = numpy.maximum.accumulate(ends[::-1])[::-1]  # of each tile and those after it
        assert (latest - ends <= max(64, ends.max() // 16)).all(), ends
    return found


@pytest.mark.parametrize("window_right", [-1, 0, 30])
@pytest.mark.parametrize("heads", [(1, 1), (3, 5), (8, 1), (16, 2), (70, 1)])
@pytest.mark.parametrize("num_seqs", [1, 2, 3, 7, 32, 33])
def test_longest_tiles_come_first(kernel, num_seqs, heads, window_right):
    random = numpy.random.default_rng(num_seqs)
    len_q = random.integers(0, 2000 // (heads[0] * heads[1]) + 140, num_seqs)
    len_k = len_q + random.choice([0, 0, 40, 3000], num_seqs)
    starts_q, starts_k = ([0, *numpy.cumsum(lens).tolist()] for lens in (len_q, len_k))
    sizes = starts_q[-1], starts_k[-1]
    check(kernel, starts_q, starts_k, sizes, heads, window_right)
    # Starts that do not ascend are replaced by their running maximum.
    for starts in (starts_q, starts_k):
        for i in random.integers(0, num_seqs + 1, 3):
            starts[i] = random.choice([-7, 0, starts[i] // 2, starts[-1], 2**31 - 1])
    check(kernel, starts_q, starts_k, sizes, heads, window_right)


def test_sequences_of_the_same_lengths_take_turns(kernel):
    starts = [0, 640, 1280, 1920]
    found = check(kernel, starts, starts, (1920, 1920), (2, 1), 0)
    assert [(sequence, row // ROWS) for sequence, row, _ in found] == [(i, 4 - j) for j in range(5) for i in range(3)]
