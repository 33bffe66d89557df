"""The tables of performance.md that show what was measured: from each result the rows that decide.

Each function takes a result and the name of its file, and gives Markdown.
"""

from __future__ import annotations

import statistics
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
    """What the sweeps add to the table: each op's worst points, and where a peer is faster."""
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


def real_table(result: Result, name: str = "real_cpu") -> str:
    """Ways of decoding in rows, kinds of prompts in columns for each number of sequences."""
    way = "{dtype}, {way}".format_map

    def column(row: Row) -> str:
        return f"{row['sequences']} sequence{'s' * (row['sequences'] != 1)}: {row['kind']}"

    def cell(row: Row) -> str:
        rate, gain = (statistics.median(row[key]) for key in ("tokens_per_second", "over_plain"))
        # Not known of transformers' ways, nor of all kinds together.
        per_step = f"; {row['tokens_per_step']:.2f}" if row.get("tokens_per_step") else ""
        return f"{rate:.0f} ({gain:.2f} x{per_step})"

    def key(row: Row) -> tuple[str, str, int]:
        return row["dtype"], row["way"], row["sequences"]

    note = (
        " Tokens per second of all sequences; in parentheses over plain decoding, and tokens a step. Medians over the"
        " prompts of a kind; the JSON has the quartiles."
    )
    every = {key(row) for row in result["rows"] if row["kind"] == "all"}
    shown = [row for row in result["rows"] if row["kind"] == "all" or key(row) not in every]
    parted = [row for row in shown if len(set(row["texts_equal"].split("/"))) > 1]
    texts = "; ".join(f"{way(row)}, {column(row)} ({row['texts_equal']})" for row in parted) or "none"
    equal = f"Texts that differ from transformers' own, in parentheses how many are equal: {texts}."
    cells = pivot("way", result["rows"], way, column, cell)
    return "\n\n".join([machine_line(result["machine"], name) + note, cells, equal])


# Ways of drafting -> how engines call them.
WAYS = {
    "plain": ("", "plain"),
    "n-grams": ("prompt lookup", "n-gram tree"),
    "draft model": ("assisted", "draft model", "draft-model tree"),
    "n-grams and draft model": ("n-gram and draft-model chain",),
}


def engines_table(rows: list[Row]) -> str:
    """Whole engines for one sequence."""
    column_of = {name: column for column, names in WAYS.items() for name in names}
    named = [{**row, "parts": row["name"].partition(", ")} for row in rows if row["batch"] == 1]
    shown = [row for row in named if row["parts"][2] in column_of]
    rate = field("tokens_per_second", ".0f")
    columns = sorted(shown, key=lambda row: list(column_of).index(row["parts"][2]))
    return pivot("tokens/s", columns, lambda row: row["parts"][0], lambda row: column_of[row["parts"][2]], rate)


def end_to_end(*shown: str) -> Callable[[Result, str], str]:
    """Engines for one sequence, then what is named for all batches."""

    def render(result: Result, name: str) -> str:
        rows, machine = result["rows"], result["machine"]
        arguments, dtype = machine["arguments"], machine.get("dtype", "fp32")
        note = f" {arguments['max_new_tokens']} tokens per sequence, {arguments['rounds']} rounds, greedy, {dtype}."
        different = sum(not row["identical"] for row in rows)
        note += f" Texts differ from plain decoding's in {different} of {len(rows)} runs. One sequence:"
        parts = [machine_line(machine, name) + note, engines_table(rows)]
        if shown:
            of_batches = [row for row in rows if row["name"] in shown]
            rate = "{0[tokens_per_second]:.0f} ({0[over_plain]:.2f} x)".format
            cells = pivot("sequences", of_batches, field("name"), field("batch"), rate)
            parts += ["All sequences, and over plain decoding in the same round:", cells]
        return "\n\n".join(parts)

    return render


def chosen_trees(*drafters: str) -> Callable[[Result, str], str]:
    """Fixed and chosen trees, the latter without what other runs have learnt."""
    names = ["pagedtree, plain"]
    names += [f"pagedtree, {drafter} tree{way}" for drafter in drafters for way in ("", ", auto from scratch")]

    def render(result: Result, name: str) -> str:
        arguments = result["machine"]["arguments"]
        note = (
            f" {arguments['max_new_tokens']} tokens per sequence, greedy, fp32. Speed over plain decoding in"
            f" {arguments['pairs']} pairs of other texts each, or as many as make {arguments['texts']} texts, with its"
            " 95 % interval:"
        )
        rows = [row for row in result["rows"] if row["name"] in names]
        cells = pivot("sequences", rows, field("name"), field("batch"), lambda row: interval(row["over_plain"]))
        return machine_line(result["machine"], name) + note + "\n\n" + cells

    return render


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


def vllm(result: Result, name: str) -> str:
    machine = result["machine"]
    note = f" vLLM {machine['vllm']}, {machine['prompts']} prompts of {machine['max_new_tokens']} tokens at once, "
    columns = {
        "": field("engine"),
        "accepted drafts a step": field("accepted_length", ".2f"),
        "drafts a step": field("draft_tokens_per_step", ".2f"),
        "tokens/s": field("tokens_per_second", ".0f"),
        "tokens per CPU second": field("tokens_per_cpu_second", ".0f"),
        "text of vLLM": lambda row: "yes" if row["identical"] else "no",
    }
    return f"{machine_line(machine, name)}{note}{machine['dtype']}.\n\n" + listing(result["rows"], columns)


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
