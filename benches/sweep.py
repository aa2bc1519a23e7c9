"""Causal attention over pages for all query counts, contexts, batch sizes and head groups, beside the GPU's limits.

`make bench ARGS=sweep.py` times every cell that reads at least 100 MB or computes 50 GFLOP, ours alone, within about
two minutes; `make bench ARGS="sweep.py 28/4"` those whose name contains the words, for example "28/4 16 x 5 over 8192".
The share is max(bytes / 4.4 TB/s, operations / 700 TFLOP/s) divided by the time, which is the median of replays of a
CUDA graph of several calls. bf16, D 128, pages of 16 in random order. Each cell is a line of JSON, in $OUT/sweep.jsonl
if OUT is set; the last line of the output is what docs/sweep.json has (`make plot`).
"""

import json
import math
import os
import pathlib
import statistics
import time
from dataclasses import dataclass

import torch

from graph_nodes import kernel_nodes
from harness import paged_attention

HEADS = [(16, 16), (32, 8), (28, 4), (64, 8), (64, 4)]
SEQS = [1, 4, 16, 64]
KEYS = [512, 2048, 8192, 32768, 131072]
QUERIES = [1, 2, 3, 5, 8, 16, 32, 64, 128, 256, 512]
DIM, PAGE = 128, 16
BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.4e12, 700e12
# Cells below both have no meaningful share: the time is that of a launch.
LEAST_BYTES, LEAST_FLOPS = 100e6, 50e9
# Larger cells take long and resemble those that are measured.
MOST_BYTES, MOST_SECONDS = 2.2e9, 2e-3
GRAPH_SECONDS, REPLAYS, LOW_SHARE = 3e-3, 5, 0.6
# Before each cell, because a GPU at its power limit lowers its clocks for the next one too.
REST_SECONDS = 0.2


@dataclass(frozen=True)
class Cell:
    """A batch of equal sequences with `queries` new tokens at the end of `keys`."""

    q_heads: int
    kv_heads: int
    seqs: int
    queries: int
    keys: int

    @property
    def name(self):
        """As words of the command line select it."""
        return f"{self.q_heads}/{self.kv_heads} {self.seqs} x {self.queries} over {self.keys}"

    @property
    def cache_bytes(self):
        """Bytes of K and V."""
        return 4 * self.seqs * self.keys * self.kv_heads * DIM

    @property
    def flops(self):
        """Operations of all visible pairs of query and key."""
        pairs = self.queries * (self.keys - self.queries) + self.queries * (self.queries + 1) / 2
        return 4 * self.seqs * pairs * self.q_heads * DIM

    @property
    def bound(self):
        """The least seconds that the limits allow."""
        rows = self.seqs * self.queries * self.q_heads
        return max((self.cache_bytes + 4 * rows * DIM) / BYTES_PER_SECOND, self.flops / FLOPS_PER_SECOND)

    @property
    def counts(self):
        """Whether the cell is measured."""
        is_large = self.cache_bytes >= LEAST_BYTES or self.flops >= LEAST_FLOPS
        return self.queries <= self.keys and is_large and self.cache_bytes <= MOST_BYTES and self.bound <= MOST_SECONDS


CELLS = [
    cell
    for heads in HEADS
    for seqs in SEQS
    for keys in KEYS
    for queries in QUERIES
    if (cell := Cell(*heads, seqs, queries, keys)).counts
]


def call_of(cell, values):
    """The call of a cell, whose cache is the beginning of `values`."""
    pages = cell.keys // PAGE
    shape = (cell.seqs * pages, PAGE, 2 * cell.kv_heads, DIM)
    query = torch.randn((cell.seqs * cell.queries, cell.q_heads, DIM), device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(cell.seqs * pages, dtype=torch.int32, device="cuda").view(cell.seqs, pages)
    ends = torch.arange(0, cell.seqs + 1, dtype=torch.int32, device="cuda") * cell.queries
    lens = torch.full((cell.seqs,), cell.keys, dtype=torch.int32, device="cuda")
    count = torch.full((1,), cell.seqs, dtype=torch.int32, device="cuda")
    cache = values[: math.prod(shape)].view(shape)
    return paged_attention(query, cache, lens, table, ends, count, scale=DIM**-0.5)


def measure(cell, values):
    """Microseconds of a cell and the kernels of its call."""
    call, stream = call_of(cell, values), torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream.wait_stream(torch.cuda.current_stream())
    one = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        call()
    with torch.cuda.graph(one, stream=stream):
        call()
    kernels = [name.removeprefix("xa_") for name, _ in kernel_nodes(one)]
    with torch.cuda.stream(stream):
        start.record()
        call()
        end.record()
    stream.synchronize()
    calls = max(2, min(40, math.ceil(1e3 * GRAPH_SECONDS / max(start.elapsed_time(end), 1e-2))))
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    graph.replay()
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return 1e3 * statistics.median(times), kernels


def summary(rows):
    """The geometric mean of the shares and how many are low, by the first kernel of the call."""
    groups = {"all": rows}
    for row in rows:
        groups.setdefault(row["kernels"][0] if row["kernels"] else "none", []).append(row)
    for name, members in groups.items():
        shares = [row["share"] for row in members]
        low = sum(share < LOW_SHARE for share in shares)
        print(f"{name:48} {len(shares):4} cells, {statistics.geometric_mean(shares):.3f}, {low} below {LOW_SHARE}")


def main(*words):
    """Run the cells; prints those of a low share, a summary, and all as JSON."""
    cells = [cell for cell in CELLS if " ".join(words) in cell.name]
    values = torch.randn(int(max(cell.cache_bytes for cell in cells)) // 2, device="cuda", dtype=torch.bfloat16)
    folder = os.environ.get("OUT")
    lines = (pathlib.Path(folder) / "sweep.jsonl").open("w") if folder else None
    rows = []
    for cell in cells:
        torch.cuda.synchronize()
        time.sleep(REST_SECONDS)
        us, kernels = measure(cell, values)
        row = {"case": cell.name, "us": round(us, 1), "share": round(1e6 * cell.bound / us, 3), "kernels": kernels}
        rows.append(row)
        if lines:
            print(json.dumps(row), file=lines, flush=True)
        if row["share"] < LOW_SHARE:
            print(f"{cell.name:32} {us:9.1f} us  {row['share']:.2f}  {' '.join(kernels)}", flush=True)
    summary(rows)
    here = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    print(json.dumps({**here, "rows": [[row["case"], row["us"], row["share"]] for row in rows]}))
