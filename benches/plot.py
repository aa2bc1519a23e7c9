"""`make plot`: draws the figures of docs/, each an SVG file, from the JSON file of the same name beside it.

prefill.json, decode.json and sweep.json are the last lines of `make bench ARGS=prefill.py` and so on, train.json the
losses that `examples/train.py --json docs/train.json` writes.
"""

import json
import math
import pathlib

import matplotlib
from matplotlib import pyplot

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"


def colours_of(panels):
    """One colour per library, also where another library has no points."""
    libraries = {library: None for lines in panels for library in lines}
    return {library: f"C{index}" for index, library in enumerate(libraries)}


def draw(panel, library, points, colours):
    """Draw a library's line."""
    style = {"linewidth": 2.5 if library == "ours" else 1.2, "color": colours[library]}
    panel.plot(*zip(*sorted(points), strict=True), marker="o", label=library, **style)


def prefill(measured):
    """TFLOP/s over the sequence length, one panel per head dimension and mask."""
    panels = {}
    for row in measured["rows"]:
        name, _, length = row["case"].rpartition(" ")
        if length.isdigit() and name.endswith(("full", "causal")):
            for library, rate in row["tflops"].items():
                panels.setdefault(name, {}).setdefault(library, []).append((int(length), rate))
    colours = colours_of(panels.values())
    figure, axes = pyplot.subplots(2, len(panels) // 2, figsize=(1.8 * len(panels), 6), sharex=True, sharey=True)
    for panel, (name, lines) in zip(axes.T.flat, sorted(panels.items(), key=lambda p: int(p[0][1:4])), strict=True):
        for library, points in lines.items():
            draw(panel, library, points, colours)
        panel.set(title=name, xscale="log", ylim=(0, 900))
        panel.set_xticks([1024, 4096, 16384], ["1k", "4k", "16k"], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    handles = {
        label: line for panel in axes.flat for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    axes[0][0].legend(handles.values(), handles.keys(), fontsize="small", ncols=2)
    figure.supylabel("TFLOP/s")
    figure.supxlabel(f"tokens per sequence, 16k in all, bf16, {measured['gpu']}, {measured['date']}")
    return figure


def decode(measured):
    """GB/s over the context length, one panel per batch size; microseconds over the batch size for short contexts."""
    panels = {}
    for row in measured["rows"]:
        words = row["case"].split()
        for library, us in row["us"].items():
            if words[0] == "batch":
                point = (int(words[3].removesuffix("k")), row["kv_bytes"] / us / 1e3)
                panels.setdefault(f"batch {words[1]}", {}).setdefault(library, []).append(point)
            elif words[0] == "short":
                panels.setdefault("contexts of 512", {}).setdefault(library, []).append((int(words[1]), us))
    colours = colours_of(panels.values())
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.6))
    for panel, (name, lines) in zip(axes, panels.items(), strict=True):
        for library, points in lines.items():
            draw(panel, library, points, colours)
        is_short = name.startswith("contexts")
        ticks = sorted({x for points in lines.values() for x, _ in points})
        panel.set(title=name, xscale="log", ylim=(0, None if is_short else 4700))
        panel.set(xlabel="sequences" if is_short else "tokens of context", ylabel="µs" if is_short else "GB/s")
        panel.set_xticks(ticks, [str(x) if is_short else f"{x}k" for x in ticks], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.suptitle(
        f"decode, 32/8 heads, D 128, page 16, bf16, {measured['gpu']}, {measured['date']}", fontsize="medium"
    )
    return figure


def sweep(measured):
    """The share of the GPU's limits over queries (x) and batches of contexts (y), one panel per heads."""
    shares = {}
    for name, _, share in measured["rows"]:
        heads, seqs, _, queries, _, keys = name.split()
        shares.setdefault(heads, {})[int(seqs), int(keys), int(queries)] = share
    cells = [cell for panel in shares.values() for cell in panel]
    batches = sorted({cell[:2] for cell in cells}, reverse=True)
    queries = sorted({cell[2] for cell in cells})
    figure, axes = pyplot.subplots(1, len(shares), figsize=(3.1 * len(shares) + 1.5, 4.6), sharey=True)
    for panel, (heads, known) in zip(axes, shares.items(), strict=True):
        grid = [[known.get((*batch, count), math.nan) for count in queries] for batch in batches]
        image = panel.pcolormesh(grid, cmap="RdYlGn", vmin=0, vmax=1, rasterized=True)
        panel.set(title=f"{heads} heads", xlabel="queries")
        panel.set_xticks([x + 0.5 for x in range(len(queries))], queries, rotation=90, fontsize="small")
    labels = [f"{seqs} x {keys // 1024}k" if keys >= 1024 else f"{seqs} x {keys}" for seqs, keys in batches]
    axes[0].set_yticks([y + 0.5 for y in range(len(batches))], labels, fontsize="small")
    figure.colorbar(image, ax=axes[-1], label="share of the bound")
    figure.suptitle(f"causal, D 128, page 16, bf16, {measured['gpu']}, {measured['date']}", fontsize="medium")
    return figure


def train(measured):
    """The losses of examples/train.py with our attention and with plain attention, one panel per device."""
    figure, axes = pyplot.subplots(1, len(measured), figsize=(5 * len(measured), 3.6), squeeze=False)
    for panel, (device, training) in zip(axes[0], sorted(measured.items()), strict=True):
        for name, width, colour in (("plain", 4, "C1"), ("flash", 1.2, "C0")):
            run = training["runs"][name]
            label = f"{'ours' if name == 'flash' else name}, {run['ms_per_step']:.0f} ms per step"
            panel.plot(run["losses"], linewidth=width, color=colour, label=label)
        panel.set(title=f"{device}, {training['date']}", xlabel="step", ylabel="loss, nats per byte")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    return figure


def main():
    """Draw all figures."""
    for plot in (prefill, decode, sweep, train):
        name = plot.__name__
        # Equal numbers give equal files.
        matplotlib.rcParams["svg.hashsalt"] = name
        figure = plot(json.loads((DOCS / f"{name}.json").read_text()))
        figure.tight_layout()
        figure.savefig(DOCS / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
