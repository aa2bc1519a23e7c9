"""Hardware counters of prefill, ours and FlashAttention-3's: `make bench ARGS=counters.py`.

Runs cases of prefill.py, three unless others are named, one call each under Nsight Compute (`ncu`). It replays the call
for each group of counters, with unchanged clocks and flushed caches, so that times differ from those of prefill.py.
Prints the table of docs/dev/lab_notebook.md with the most frequent stall reasons, in stalled warps per issued
instruction; these include the producer warps, which are always stalled.
"""

import csv
import io
import pathlib
import shutil
import subprocess
import sys

CASES = ("d128 full 4096", "d128 causal 16384", "d64 causal 1024")
LIBRARIES = ("ours", "fa3")

METRICS = {
    "time, µs": ("gpu__time_duration.sum", 1e-3),
    "SM clock, GHz": ("sm__cycles_elapsed.avg.per_second", 1e-9),
    "tensor pipe, % of cycles": ("sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "exponentials (xu), %": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", 1),
    "fma pipe, %": ("sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active", 1),
    "alu pipe, %": ("sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active", 1),
    "issue slots, %": ("sm__inst_issued.avg.pct_of_peak_sustained_active", 1),
    "instructions, millions": ("sm__inst_executed.sum", 1e-6),
    "L2, %": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "L2 hits, %": ("lts__t_sector_hit_rate.pct", 1),
    "DRAM, %": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1),
}
STALLS = "smsp__average_warps_issue_stalled_", "_per_issue_active.pct"
STALLS_SHOWN = 4


def profiled(*names):
    """In the process under ncu: one profiled call per library and case."""
    import torch

    import peers
    import prefill
    from prefill_cases import CASES as ALL

    for case in (next(case for case in ALL if case.name == name) for name in names):
        calls = prefill.contiguous_calls(case, {"fa3": peers.fa3})
        for name in LIBRARIES:
            for _ in range(2):
                calls[name]()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            calls[name]()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
        torch.cuda.empty_cache()


def measured(names):
    """ncu's rows, one per kernel: values by metric."""
    here = str(pathlib.Path(__file__).resolve().parent)
    metrics = [metric for metric, _ in METRICS.values()] + [f"regex:{STALLS[0]}.*_per_issue_active"]
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    # Our kernel, and the name of every CUTLASS kernel.
    command += ["--print-units", "base", "--kernel-name", "regex:hopper_prefill|device_kernel"]
    command += ["--metrics", ",".join(metrics), sys.executable, "-c"]
    command += [f"import sys; sys.path.insert(0, {here!r}); import counters; counters.profiled(*sys.argv[1:])", *names]
    completed = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in completed.stdout.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))[1:]  # the first one has the units
    if len(rows) != len(names) * len(LIBRARIES):
        sys.exit(f"ncu saw {len(rows)} kernels:\n{completed.stdout[-3000:]}{completed.stderr[-3000:]}")
    return rows


def number(text):
    return float(text.replace(",", ""))


def stalls(row):
    """The most frequent stall reasons."""
    head, tail = STALLS
    reasons = {name.removeprefix(head).removesuffix(tail): number(row[name]) / 100 for name in row if head in name}
    reasons = {name: value for name, value in reasons.items() if "selected" not in name}
    most = sorted(reasons.items(), key=lambda item: -item[1])[:STALLS_SHOWN]
    return ", ".join(f"{name} {value:.2f}" for name, value in most)


def main(*names):
    """Measure and print a table."""
    if shutil.which("ncu") is None:
        sys.exit("ncu (Nsight Compute) is not on PATH")
    names = names or CASES
    rows = measured(names)
    labels = [f"{case}: {name}" for case in names for name in LIBRARIES]
    for label, row in zip(labels, rows, strict=True):
        assert ("hopper_prefill" in row["Kernel Name"]) == label.endswith("ours"), row["Kernel Name"]
    print("| | " + " | ".join(labels) + " |\n|---" + "|---" * len(labels) + "|")
    for name, (metric, factor) in METRICS.items():
        values = (number(row[metric]) * factor for row in rows)
        print(f"| {name} | " + " | ".join(f"{value:.3g}" for value in values) + " |")
    print("| stall reasons | " + " | ".join(map(stalls, rows)) + " |")
