"""`make plot`: docs/prefill.json, the last line of `make bench ARGS=prefill.py`, as docs/prefill.svg.

A panel for each head dimension and mask, a line for each library: TFLOP/s over the length of a sequence.
"""

import json
import pathlib

import matplotlib
from matplotlib import pyplot

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"


def main():
    """Read, draw, write."""
    measured = json.loads((DOCS / "prefill.json").read_text())
    panels = {}
    for row in measured["rows"]:
        name, _, length = row["case"].rpartition(" ")
        if length.isdigit() and name.endswith(("full", "causal")):
            for library, rate in row["tflops"].items():
                panels.setdefault(name, {}).setdefault(library, []).append((int(length), rate))
    # A library keeps its colour where another is missing.
    libraries = {library: None for lines in panels.values() for library in lines}
    colours = {library: f"C{index}" for index, library in enumerate(libraries)}
    # The same bytes for the same numbers.
    matplotlib.rcParams["svg.hashsalt"] = "prefill"
    figure, axes = pyplot.subplots(2, len(panels) // 2, figsize=(1.8 * len(panels), 6), sharex=True, sharey=True)
    for panel, (name, lines) in zip(axes.T.flat, sorted(panels.items(), key=lambda p: int(p[0][1:4])), strict=True):
        for library, points in lines.items():
            style = {"linewidth": 2.5 if library == "ours" else 1.2, "color": colours[library]}
            panel.plot(*zip(*sorted(points), strict=True), marker="o", label=library, **style)
        panel.set(title=name, xscale="log", ylim=(0, 900))
        panel.set_xticks([1024, 4096, 16384], ["1k", "4k", "16k"], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    handles = {
        label: line for panel in axes.flat for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    axes[0][0].legend(handles.values(), handles.keys(), fontsize="small", ncols=2)
    figure.supylabel("TFLOP/s")
    figure.supxlabel(f"tokens of a sequence, 16k in all, bf16, {measured['gpu']}, {measured['date']}")
    figure.tight_layout()
    figure.savefig(DOCS / "prefill.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
