"""The tables of performance.md that show what was measured: from each result the rows that decide.

Each function takes a result and the name of its file, and gives Markdown.
"""

from __future__ import annotations

from collections.abc import Callable

from tables import Result, Row, field, is_ours, listing, machine_line, over_floor, pivot, table


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


def on_gpu(result: Result, name: str) -> str:
    """The rows of headline.py: our time, and that of the kernel for wgmma and of the fastest other way over ours."""
    machine, body = result["machine"], []
    for row in result["rows"]:
        others = {peer: ratio for peer, ratio in row["ratio"].items() if not is_ours(peer)}
        fastest = min(others, key=lambda peer: others[peer], default="")
        wgmma = row["ratio"].get("pagedtree by wgmma")
        body.append([
            f"`{row['op']}`", row["point"], f"{row['ms'] * 1e3:.0f} ({row['spread_ms'] * 1e3:.0f})",
            f"{over_floor(row):.2f}", f"{wgmma:.2f} x" if wgmma else "",
            f"{others[fastest]:.2f} x {fastest}" if fastest else "",
        ])  # fmt: skip
    note = f"{machine['cuda']}; a copy reads {machine['read_gb_per_s'] / 1e3:.2f} TB/s, a matmul of bf16 does"
    rate = f"{machine['matmul_gflop_per_s']['bfloat16'] / 1e3:.0f} TFLOP/s."
    header = ["op", "point", "us (spread)", "floor / time", "vs its wgmma kernel", "vs the fastest other"]
    return f"{note} {rate} {machine_line(machine, name)}\n\n{table(header, body)}"


def points_table(rows: list[Row]) -> str:
    peers = list(dict.fromkeys(peer for row in rows for peer in row["ratio"]))
    computed = any(row["flops"] for row in rows)
    header = ["op", "point", "ms (spread)", *(["GFLOP/s"] if computed else []), "floor / time"]
    body = []
    for row in rows:
        line = [f"`{row['op']}`", row["point"], f"{row['ms']:.3g} ({row['spread_ms']:.2g})"]
        line += [f"{row['gflop_per_s']:.3g}" if row["flops"] else ""] if computed else []
        body.append([*line, f"{over_floor(row):.2f}", *(ratio_text(row, peer) for peer in peers)])
    return table([*header, *(f"vs {peer}" for peer in peers)], body)


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
    bounded = sorted((row for row in rows if not row["shape"].get("threads")), key=over_floor)
    ops = list(dict.fromkeys(row["op"] for row in rows))
    worst = [row for op in ops for row in [row for row in bounded if row["op"] == op][: 3 // len(ops) or 1]]
    points = "; ".join(f"`{row['op']}`, {row['point']} ({over_floor(row):.2f})" for row in worst)
    behind = [
        f"`{row['op']}`, {row['point']}: {ratio:.2f} x {peer}"
        for row in rows
        for peer, ratio in row["ratio"].items()
        if ratio < 1 and not is_ours(peer)
    ]
    faster = "; ".join(behind) or "none"
    return f"Of all {len(rows)} points, furthest from the floor: {points}. A peer is faster at: {faster}."


def options(result: Result, name: str) -> str:
    """The time with an option over that without, by rule and sampling."""
    arguments = result["machine"]["arguments"]
    note = f" {arguments['batch']} trees of {arguments['tree']} nodes, vocabulary {arguments['vocab']}, bfloat16."
    rows = [row for row in result["rows"] if row["options"] != "none"]
    way = "{sampling}; {rule}".format_map
    shown = pivot("time over that without options", rows, way, field("options"), field("ratio", ".2f"))
    return machine_line(result["machine"], name) + note + "\n\n" + shown


def interval(figures: list[float]) -> str:
    return "{1:.2f} ({0:.2f} to {2:.2f})".format(*figures)


def rules(result: Result, name: str) -> str:
    machine = result["machine"]
    arguments = machine["arguments"]
    note = (
        f" {arguments['prompts']} prompts, {arguments['max_new_tokens']} tokens each, temperature"
        f" {arguments['temperature']}, top-p {arguments['top_p']}. Accepted drafts of a tree and their 95 % interval:"
    )
    drafts, rule = "{shape}, {law}".format_map, field("rule")
    # Here the median comes first.
    cells = pivot("drafts", result["rows"], drafts, rule, lambda row: interval([row["accepted"][i] for i in (1, 0, 2)]))
    return machine_line(machine, name) + note + "\n\n" + cells


def distributed(result: Result, name: str) -> str:
    """The largest problem of all."""
    rows, drafting = result["rows"], result["machine"]["drafting"]
    most = {key: max(row[key] for row in rows) for key in ("vocab", "nodes", "ranks")}
    note = (
        " {vocab} tokens in the vocabulary, {nodes} nodes, {ranks} ranks; smaller problems are in the JSON."
        " Drafting on fewer ranks gave the text of one process in {same} of {runs} runs."
    ).format(**most, same=sum(run["identical"] for run in drafting), runs=len(drafting))
    columns = {
        "rule": field("rule"),
        "exchanges": field("exchanges"),
        "KiB sent": lambda row: f"{row['bytes_sent'] / 1024:.3g}",
        "KiB to gather": lambda row: f"{row['bytes_to_gather'] / 1024:.0f}",
        "ms": field("ms", ".3g"),
        "ms gathered": field("gathered_ms", ".3g"),
    }
    shown = [row for row in rows if most.items() <= row.items()]
    return machine_line(result["machine"], name) + note + "\n\n" + listing(shown, columns)


def grammars(result: Result, name: str) -> str:
    """Whole batches beside a pass in which the host waits, as for a GPU."""
    machine = result["machine"]
    arguments = machine["arguments"]
    note = (
        f" {machine['note']} xgrammar {machine['xgrammar']}, trees {arguments['tree']}, vocabulary"
        f" {arguments['vocab']}. Milliseconds to fill the masks of a step, and what of it a pass of"
        f" {arguments['pass_ms']:.0f} ms does not hide:"
    )
    rows = [row for row in result["rows"] if row["what"] == "GrammarMasks" and row["beside"] == "the host waits"]
    cells = pivot(
        "sequences", rows, field("grammar"), field("batch"),
        lambda row: f"{row['filled'] * 1e3:.3g}; {row['waited'] * 1e3:.2f}",
    )  # fmt: skip
    return machine_line(machine, name) + note + "\n\n" + cells


def host(result: Result, name: str) -> str:
    """A column for each call that has a prepared form, beside attention of one key by PyTorch; the others in words."""
    rows = result["rows"]
    prepared = {row["call"] for row in rows if row["form"]} | {row["call"] for row in rows if "one key" in row["call"]}
    others = ", ".join(f"`{row['call']}` {row['us']:.3g}" for row in rows if row["call"] not in prepared)
    shown = [row for row in rows if row["call"] in prepared]
    cells = pivot("us", shown, lambda row: row["form"] or "one by one", field("call"), field("us", ".3g"))
    return f"{machine_line(result['machine'], name)} Others: {others}.\n\n{cells}"
