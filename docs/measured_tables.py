"""The tables of performance.md that show what was measured: from each result the rows that decide.

Each function takes a result and the name of its file, and gives Markdown.
"""

from __future__ import annotations

from collections.abc import Callable

from tables import Result, Row, Show, fastest_other, field, listing, machine_line, op_name, others, over_floor


def family(*prefixes: str, points: tuple[str, ...] = (), plot: str = "") -> Callable[[Result, str], str]:
    """The headline points, or of these the named ones, of the ops of bench_ops.py whose names begin with a prefix."""

    def render(result: Result, name: str) -> str:
        machine = result["machine"]
        rows = [row for row in result["rows"] if row["op"].startswith(prefixes) and "timings" in row]
        rates = ", ".join(f"{rate:.0f} GFLOP/s {key}" for key, rate in machine["matmul_gflop_per_s"].items())
        note = f"CPU kernels: {machine['cpu_isa']}; in the same run {machine['read_gb_per_s']:.1f} GB/s read, {rates}."
        shown = [row for row in rows if row["headline"] and (not points or row["point"] in points)]
        parts = [" ".join([machine_line(machine, name), note, remarks(rows)])]
        if plot:
            parts.append(f"![{plot}](img/{name}_attention.svg)")
        return "\n\n".join([*parts, points_table(shown)])

    return render


def points_table(rows: list[Row]) -> str:
    columns: dict[str, Show] = {
        "op": op_name,
        "point": field("point"),
        "ms (spread)": "{ms:.3g} ({spread_ms:.2g})".format_map,
    }
    if any(row["flops"] for row in rows):
        columns["GFLOP/s"] = lambda row: f"{row['gflop_per_s']:.3g}" if row["flops"] else ""
    columns["floor / time"] = over_floor
    for peer in dict.fromkeys(peer for row in rows for peer in row["ratio"]):
        columns[f"vs {peer}"] = lambda row, peer=peer: ratio_text(row, peer)
    return listing(rows, columns)


def ratio_text(row: Row, peer: str) -> str:
    """A peer's time over ours; then "/" and the ratio with what each plans once per step, where that differs."""
    if peer not in row["ratio"]:
        return ""
    alone = f"{row['ratio'][peer]:.2f}"
    planned = f"{row['ratio_with_plan'].get(peer, row['ratio'][peer]):.2f}"
    return f"{alone} x" if alone == planned else f"{alone} / {planned} x"


def remarks(rows: list[Row]) -> str:
    """Lists what the sweeps add to the table: each op's worst points, and where a peer is faster."""
    # Another number of threads has another floor.
    bounded = [row for row in rows if not row["shape"].get("threads")]
    bounded.sort(key=lambda row: row["floor_ms"] / row["ms"])
    ops = list(dict.fromkeys(row["op"] for row in rows))
    worst = [row for op in ops for row in [row for row in bounded if row["op"] == op][: 3 // len(ops) or 1]]
    points = "; ".join(f"{op_name(row)}, {row['point']} ({over_floor(row)})" for row in worst)
    behind = [
        f"{op_name(row)}, {row['point']}: {ratio:.2f} x {peer}"
        for row in rows
        for peer, ratio in others(row).items()
        if ratio < 1
    ]
    faster = "; ".join(behind) or "none"
    return f"Of all {len(rows)} points, furthest from the floor: {points}. A peer is faster at: {faster}."


def on_gpu(result: Result, name: str) -> str:
    """The rows of headline.py: our time, and that of the kernel for wgmma and of the fastest other way over ours."""

    def of_wgmma(row: Row) -> str:
        ratio = row["ratio"].get("pagedtree by wgmma")
        return f"{ratio:.2f} x" if ratio else ""

    def of_fastest(row: Row) -> str:
        ratio, peer = fastest_other(row)
        return f"{ratio:.2f} x {peer}" if peer else ""

    machine = result["machine"]
    columns: dict[str, Show] = {
        "op": op_name,
        "point": field("point"),
        "us (spread)": lambda row: f"{row['ms'] * 1e3:.0f} ({row['spread_ms'] * 1e3:.0f})",
        "floor / time": over_floor,
        "vs its wgmma kernel": of_wgmma,
        "vs the fastest other": of_fastest,
    }
    note = f"{machine['cuda']}; a copy reads {machine['read_gb_per_s'] / 1e3:.2f} TB/s, a matmul of bf16 does"
    rate = f"{machine['matmul_gflop_per_s']['bfloat16'] / 1e3:.0f} TFLOP/s."
    return f"{note} {rate} {machine_line(machine, name)}\n\n{listing(result['rows'], columns)}"
