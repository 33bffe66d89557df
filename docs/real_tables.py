"""What bench_real.py measured of SmolLM2-135M-Instruct, as tables of Markdown.

Rows of the kind "all" are over the prompts of all kinds. Each figure is a median between the bounds of its interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tables import Result, Row, field, listing, machine_line, pivot

KINDS = ("edits", "summaries", "stories")
RATES = "bfloat16"
# Ways that answer in the same precision as ours do.
QUANTISED = "quantised"


def rows_of(result: Result, dtype: str = RATES) -> list[Row]:
    return [row for row in result["rows"] if row["dtype"] == dtype]


def gains(result: Result, name: str) -> str:
    """Ways in rows, numbers of sequences in columns; then chosen trees beside the best of fixed ones, vLLM with drafts
    beside vLLM without, and how many texts are those of plain decoding.
    """
    machine, rows = result["machine"], rows_of(result)
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items() if version)
    count = max(int(row["texts_equal"].split("/")[1]) for row in rows if row["kind"] in KINDS)
    note = (
        f" {count} prompts of each kind, at most {machine['max_new_tokens']} new tokens. {versions}. Plain decoding in"
        f" tokens per second of all sequences, all others over plain decoding in the same turn: {' / '.join(KINDS)}."
    )
    parts = [machine_line(machine, name) + note, in_columns(rows, "over_plain", is_plain_told=True)]
    for figure, label in (("over_best", "over the best of its own chains and trees, and plain"), ("over_stock", "")):
        compared = [row for row in rows if figure in row and (figure == "over_best" or row["way"].startswith("vLLM"))]
        if compared:
            corner = label or "over vLLM without drafts"
            parts.append(in_columns(compared, figure, corner=corner, has_all=True))
    return "\n\n".join([*parts, texts(result)])


def in_columns(
    rows: list[Row], figure: str, corner: str = "way", is_plain_told: bool = False, has_all: bool = False
) -> str:
    """The medians of each kind; with has_all also that of all kinds together and its interval."""
    found: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["way"], row["sequences"]), {})[row["kind"]] = row
    cells = []
    for (way, sequences), of in sorted(found.items(), key=lambda item: item[0][1]):
        key, form = ("tokens_per_second", ".0f") if is_plain_told and way == "plain" else (figure, ".2f")
        text = " / ".join(format(of[kind][key][1], form) if kind in of else "-" for kind in KINDS)
        if has_all and "all" in of:
            text += "; all {1:.2f} ({0:.2f} to {2:.2f})".format(*of["all"][figure])
        cells.append({"way": way, "sequences": f"{sequences} sequence{'s' * (sequences != 1)}", "text": text})
    return pivot(corner, cells, *map(field, ("way", "sequences", "text")))


def texts(result: Result) -> str:
    """Counts the answers that are plain decoding's, by way and dtype, and tells how nearly tied the others are."""
    parts = []
    for dtype in dict.fromkeys(row["dtype"] for row in result["rows"]):
        rows = [row for row in rows_of(result, dtype) if row["kind"] != "all" and row["way"] != "plain"]
        told = [
            f"{way} {same}/{every}" + f" ({margin:.2g})" * (margin > 0)
            for way, (same, every, margin) in equal_texts(rows).items()
        ]
        parts.append(f"Texts that are those of plain decoding, {dtype}: {', '.join(told)}.")
    note = " In parentheses the largest distance between the logits of the two tokens at which a text parts."
    return "\n\n".join([*parts[:-1], parts[-1] + note])


def equal_texts(rows: Iterable[Row]) -> dict[str, tuple[int, int, float]]:
    """Way -> equal texts, all texts, and the largest margin."""
    found: dict[str, tuple[int, int, float]] = {}
    for row in rows:
        same, every, margin = found.get(row["way"], (0, 0, 0.0))
        a, b = map(int, row["texts_equal"].split("/"))
        found[row["way"]] = same + a, every + b, max(margin, row.get("largest_margin", 0.0))
    return found


def at_once(*shown: tuple[str, str]) -> Callable[[Result, str], str]:
    """A short table for a first look: tokens per second and the gain, of each kind alone and of 8 sequences at once.

    shown: ways and what they are called.
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
    """Accepted drafts of a tree for one sequence, by kind."""
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
