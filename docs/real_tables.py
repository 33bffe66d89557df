"""bench_real.py's measurements of SmolLM2-135M-Instruct, as Markdown tables.

Rows of the kind "all" cover all prompts. Each figure is a median between the bounds of its interval.
"""

from __future__ import annotations

from collections.abc import Callable

from tables import Result, Row, Show, field, listing, machine_line, pivot

KINDS = ("edits", "summaries", "stories")
RATES = "bfloat16"


def rows_of(result: Result, dtype: str = RATES) -> list[Row]:
    return [row for row in result["rows"] if row["dtype"] == dtype]


def ways(result: Result, name: str) -> str:
    """Shows ways in rows, numbers of sequences in columns."""
    return "\n\n".join([machine_line(result["machine"], name), by_kind(rows_of(result))])


def gains(result: Result, name: str) -> str:
    """Shows ways, chosen trees against the best fixed ones, vLLM with drafts against vLLM without, and equal texts."""
    machine, rows = result["machine"], rows_of(result)
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items() if version)
    count = max(int(row["texts_equal"].split("/")[1]) for row in rows if row["kind"] in KINDS)
    note = (
        f"{count} prompts of each kind, at most {machine['max_new_tokens']} new tokens. {versions}. Plain decoding in"
        f" tokens per second of all sequences, others over plain decoding in the same turn: {'/'.join(KINDS)}."
    )
    parts = [note, ways(result, name)]
    for figure, corner in (
        ("over_best", "over the best of fixed chains and trees, and plain"),
        ("over_stock", "over vLLM without drafts"),
    ):
        compared = [row for row in rows if figure in row and (figure == "over_best" or row["way"].startswith("vLLM"))]
        if of_all := [row for row in compared if row["kind"] in ("all", "queue")]:
            parts.append(in_columns(corner, of_all, interval(figure)))
    return "\n\n".join([*parts, texts(result)])


def by_kind(rows: list[Row]) -> str:
    """A cell has the medians of all kinds."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["way"], column(row)), {})[row["kind"]] = row

    def cell(row: Row) -> str:
        key, form = ("tokens_per_second", ".0f") if row["way"] == "plain" else ("over_plain", ".2f")
        of = found[row["way"], column(row)]
        kinds = KINDS if row["kind"] != "queue" else ["queue"]
        return "/".join(format(of[kind][key][1], form) if kind in of else "-" for kind in kinds)

    return in_columns("way", [next(iter(of.values())) for of in found.values()], cell)


def interval(figure: str) -> Show:
    return lambda row: "{1:.2f} ({0:.2f} to {2:.2f})".format(*row[figure])


def in_columns(corner: str, rows: list[Row], cell: Show) -> str:
    rows = sorted(rows, key=lambda row: (row["sequences"], row["kind"] == "queue"))
    return pivot(corner, rows, field("way"), column, cell)


def column(row: Row) -> str:
    return f"{'queue' if row['kind'] == 'queue' else 'batch'} {row['sequences']}"


def texts(result: Result) -> str:
    """Counts answers equal to plain decoding's by dtype, and bounds the ties of the others."""
    parts = []
    for dtype in dict.fromkeys(row["dtype"] for row in result["rows"]):
        rows = [row for row in rows_of(result, dtype) if row["kind"] != "all" and row["way"] != "plain"]
        same, every = (sum(int(row["texts_equal"].split("/")[i]) for row in rows) for i in range(2))
        parts.append(f"Texts equal to plain decoding's in {dtype}: {same} of {every}.")
        if margin := max(row.get("largest_margin", 0.0) for row in rows):
            parts[-1] += f" Where texts diverge, the two logits are at most {margin:.2g} apart."
    return " ".join(parts)


def at_once(*shown: tuple[str, str]) -> Callable[[Result, str], str]:
    """Shows tokens per second and the gain, of each kind alone and of 8 sequences at once.

    shown: ways and their titles.
    """

    def render(result: Result, name: str) -> str:
        rates = {(row["way"], row["sequences"], row["kind"]): rate_and_gain(row) for row in rows_of(result)}
        shows = {"edits": (1, "edits"), "summaries with quotations": (1, "summaries"), "stories": (1, "stories")}
        shows["all three, 8 sequences at once"] = 8, "all"
        rows = [
            {"tokens/s": title} | {show: rates.get((way, *of), "") for show, of in shows.items()}
            for way, title in shown
        ]
        return listing(rows, {column: field(column) for column in ("tokens/s", *shows)})

    return render


def rate_and_gain(row: Row) -> str:
    return f"{row['tokens_per_second'][1]:.0f}" + f" ({row['over_plain'][1]:.2f} x)" * (row["way"] != "plain")


def accepted(*shown: tuple[str, str]) -> Callable[[Result, str], str]:
    """Shows accepted drafts of a tree for one sequence, by kind."""
    titles = dict(shown)

    def render(result: Result, name: str) -> str:
        of = {(row["way"], row["kind"]): row for row in rows_of(result) if row["sequences"] == 1}
        rows = [of[way, kind] for way in titles for kind in KINDS]
        return pivot(
            "accepted drafts a step",
            rows,
            line=lambda row: titles[row["way"]],
            column=field("kind"),
            cell=lambda row: f"{row['tokens_per_step'] - 1:.2f}",
        )

    return render
