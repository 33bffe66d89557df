"""The tables of measurements in performance.md; each function maps a result and its file's name to Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from tables import Result, Row, Show, fastest_other, field, listing, machine_line, op_name, others, over_floor


def family(*prefixes: str, points: tuple[str, ...] = (), plot: str = "", run: str = "") -> Callable[[Result, str], str]:
    """Shows headline points, or the named ones, of bench_ops.py's ops with such a prefix.

    run: replaces the line about the machine.
    """

    def render(result: Result, name: str) -> str:
        machine = result["machine"]
        rows = [row for row in result["rows"] if row["op"].startswith(prefixes) and "timings" in row]
        rates = ", ".join(f"{rate:.0f} GFLOP/s {key}" for key, rate in machine["matmul_gflop_per_s"].items())
        note = f"{machine['cpu_isa']}; {machine['read_gb_per_s']:.1f} GB/s read, {rates}."
        shown = [row for row in rows if row["headline"] and (not points or row["point"] in points)]
        parts = [" ".join([run or f"{machine_line(machine, name)} {note}", remarks(rows)])]
        if plot:
            parts.append(f"![{plot}](img/{name}_attention.svg)")
        return "\n\n".join([*parts, points_table(shown)])

    return render


def points_table(rows: list[Row]) -> str:
    columns: dict[str, Show] = {"op": op_name} if len({row["op"] for row in rows}) > 1 else {}
    if any(row["point"] != "base" for row in rows):
        columns["point"] = field("point")
    columns |= {"ms (spread)": "{ms:.3g} ({spread_ms:.2g})".format_map, "floor / time": over_floor}
    for peer in dict.fromkeys(peer for row in rows for peer in row["ratio"]):
        columns[f"vs {peer}"] = lambda row, peer=peer: ratio_text(row, peer)
    return listing(rows, columns)


def ratio_text(row: Row, peer: str) -> str:
    """Returns a peer's time over ours; after "/" the ratio with planning once per step, if different."""
    if peer not in row["ratio"]:
        return ""
    alone = f"{row['ratio'][peer]:.2f}"
    planned = f"{row['ratio_with_plan'].get(peer, row['ratio'][peer]):.2f}"
    return alone if alone == planned else f"{alone}/{planned}"


def remarks(rows: list[Row]) -> str:
    """Lists each op's worst points, and points where a peer is faster."""
    # Other numbers of threads have another floor.
    bounded = [row for row in rows if not row["shape"].get("threads")]
    bounded.sort(key=lambda row: row["floor_ms"] / row["ms"])
    of_ops = {row["op"]: row for row in reversed(bounded)}  # each op's worst row
    worst = bounded if len(of_ops) == 1 else [row for row in bounded if row is of_ops[row["op"]]]
    points = "; ".join(f"{op_name(row)}, {row['point']} ({over_floor(row)})" for row in worst[:3])
    if len(of_ops) == 1:
        points = points.replace(f"{op_name(rows[0])}, ", "")
    behind = [
        f"{op_name(row)}, {row['point']}: {ratio:.2f} x {peer}"
        for row in rows
        for peer, ratio in others(row).items()
        if ratio < 1
    ]
    faster = f"A peer is faster at: {'; '.join(behind)}." if behind else "No peer is faster."
    return f"Furthest from the floor of {len(rows)} points: {points}. {faster}"


# The page's rows; the JSON has all.
ON_GPU = re.compile(
    r"R \d+, (256 MB|1 GB|fp8)|B 1, L [18]k, T 1|B 1, L (8k, T 16|32k, T 64)|B 8, L 2k, T 16?|B 32, L 8k, T 64|eight.*"
    r"|ragged.*|head dim .*|one KV.*|latent, (R.*|B 1.*)|(compact|expand|verify).*, B 32|(ngram|recurrent).*, B 8"
    r"|.*, 256 chains of 8|rope.*, 16 tokens|.*, 2048 rows|(temp|top-p).*, (8|256) rows"
)


# README's rows, in words of an engine's user.
FIRST_ON_GPU = {
    "B 1, L 8k, T 16": "1 sequence of 8k keys, tree of 16",
    "B 1, L 32k, T 64": "1 sequence of 32k keys, tree of 64",
    "R 64, 256 MB": "8 sequences of 8k keys, trees of 16",
    "B 32, L 8k, T 64": "32 sequences of 8k keys, trees of 64",
    "eight prompts of 1k": "8 prompts of 1k tokens",
    "top-p 0.9, 2048 rows": "2048 rows of logits, top-p 0.9",
}


def against(name: str) -> Show:
    return lambda row: next((f"{ratio:.2f}" for peer, ratio in row["ratio"].items() if name in peer), "")


def gpu_table(rows: Iterable[Row], point: Show, **more: Show) -> str:
    """Shows rows of headline.py: the time, and the ratios of the fastest peer and of FlashInfer with a tree mask."""

    def of_fastest(row: Row) -> str:
        ratio, peer = fastest_other(row)
        return f"{ratio:.2f} x {peer.removesuffix(' on gathered KV').removesuffix(' on gathered rows')}" if peer else ""

    columns: dict[str, Show] = {
        "op": op_name,
        "point": point,
        "us": lambda row: f"{row['ms'] * 1e3:.0f}",
        "floor / time": over_floor,
        "vs fastest peer": of_fastest,
        "vs FlashInfer, tree mask": against("(custom mask)"),
    }
    return listing(rows, columns | more)


def first_on_gpu(result: Result, name: str) -> str:
    rows = {row["point"]: row for row in result["rows"]}
    more = {"vs vLLM's tree kernel (Triton)": against("Triton unified")}
    return gpu_table((rows[point] for point in FIRST_ON_GPU), lambda row: FIRST_ON_GPU[row["point"]], **more)


def in_short(result: Result, name: str) -> str:
    ratios = [ratio for row in result["rows"] if row["point"] in FIRST_ON_GPU
              for peer, ratio in row["ratio"].items() if "(custom mask)" in peer]  # fmt: skip
    least, most = min(ratios), max(ratios)
    return f"On an H200 attention is {least:.1f} to {most:.1f} times as fast as FlashInfer's kernel with a mask."


def on_gpu(result: Result, name: str) -> str:
    machine = result["machine"]
    rows = [row for row in result["rows"] if ON_GPU.fullmatch(row["point"])]
    table = gpu_table(rows, lambda row: row["point"].removeprefix(f"{row['op']}, "))
    spread = max(row["spread_ms"] / row["ms"] for row in rows)
    note = (
        f"{machine['cuda']}; a copy reads {machine['read_gb_per_s'] / 1e3:.2f} TB/s, a bf16 matmul does"
        f" {machine['matmul_gflop_per_s']['bfloat16'] / 1e3:.0f} TFLOP/s. Spreads are at most {spread:.0%} of the time."
    )
    return f"{note} {machine_line(machine, name)}\n\n{table}"
