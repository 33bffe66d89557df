"""Draws one run of tree-speculative decoding: the draft tree of each step, the path that was accepted, the text so far.

    steps = [StepRecord(parents=[-1, 0, 0, 1], tokens=["x", " =", " +", " 1"], accepted=[1, 3], bonus="\\n")]
    Path("run.svg").write_text(draw_run(steps, prompt="x"))

The SVG is self-contained and follows the reader's light or dark theme; hovering over a node tells what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from svg import Drawing, pill_width

__all__ = ["StepRecord", "draw_run", "html_page"]

MARGIN = 24
ROW = 26  # height of one leaf
COLUMN_GAP = 34  # between two depths
MAX_TOKEN = 14  # characters of a node's text
TAIL = 84  # characters of the text shown under a tree
TEXT_COLUMNS = 112  # columns of the whole text at the end


@dataclass(frozen=True)
class StepRecord:
    """One step of one sequence.

    Attributes:
        parents: the draft tree, parents[0] == -1 and parents[i] < i.
        tokens: the text of each node; node 0, the root, is the last token of the step before.
        accepted: the accepted draft nodes from the root downwards; the root itself may be listed or not.
        bonus: the text of the token that the target model added after the last accepted node.
    """

    parents: list[int]
    tokens: list[str]
    accepted: list[int]
    bonus: str

    @property
    def path(self) -> list[int]:
        return [0, *(node for node in self.accepted if node != 0)]


def draw_run(
    steps: Sequence[StepRecord], *, prompt: str = "", title: str = "", first_step: int = 1, max_rows: int = 10
) -> str:
    """The SVG of these consecutive steps.

    prompt: the text before the first step, its root included.
    first_step: the number of the first step in its run.
    max_rows: at most this many leaves of a tree are drawn; "+3" at a node counts the descendants left out.
    """
    drawing = Drawing(title or "Tree-speculative decoding, step by step")
    layouts = [_Layout(step, max_rows) for step in steps]
    width = max([860.0, *(layout.width + 2 * MARGIN + 80 for layout in layouts)])
    y = _header(drawing, steps, title, width)
    spans = [(prompt, "fill-muted")]
    for number, (step, layout) in enumerate(zip(steps, layouts, strict=True), first_step):
        y = _draw_step(drawing, number, step, layout, spans, y, width)
        spans += [(step.tokens[node], "fill-green bold") for node in step.path[1:]]
        spans.append((step.bonus, "fill-gold bold"))
    y = _draw_text(drawing, spans, y, width)
    return drawing.render(width, y)


def html_page(svg: str, title: str = "Tree-speculative decoding") -> str:
    """A page that shows the SVG inline, so that hovering over a node works everywhere."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<style>body {{ margin: 2rem auto; max-width: 1100px; }} svg {{ max-width: 100%; height: auto; }}</style>
</head><body>
{svg}</body></html>
"""


class _Layout:
    """Which nodes of a step's tree are drawn, and where."""

    def __init__(self, step: StepRecord, max_rows: int) -> None:
        self.visible = _choose_nodes(step, max_rows)
        children: dict[int, list[int]] = {node: [] for node in self.visible}
        depth = {0: 0}
        for node in sorted(self.visible - {0}):
            children[step.parents[node]].append(node)
            depth[node] = depth[step.parents[node]] + 1
        self.depth = depth
        self.hidden = _hidden_descendants(step, self.visible)

        # The bonus is laid out as one more child of the last accepted node.
        last = step.path[-1]
        self.bonus_depth = depth[last] + 1
        labels: dict[int, list[str]] = {}
        for node in self.visible:
            labels.setdefault(depth[node], []).append(shown(step.tokens[node]))
        labels.setdefault(self.bonus_depth, []).append(shown(step.bonus))
        self.column: list[float] = []
        x = 0.0
        for level in range(len(labels)):
            self.column.append(x)
            x += max(pill_width(label) for label in labels[level]) + COLUMN_GAP
        self.width = x

        # Rows in depth-first order: a first child stays on its parent's row, every other leaf opens a new one.
        self.row: dict[int, int] = {}
        self.rows = 0
        stack = [0]
        while stack:
            node = stack.pop()
            self.row[node] = self.rows
            if node == last:
                self.bonus_row = self.rows
            if node == last or not children[node]:
                self.rows += 1
            stack.extend(reversed(children[node]))


def _choose_nodes(step: StepRecord, max_rows: int) -> set[int]:
    """The accepted path, then others in index order while their leaves fit; a node only with its parent."""
    visible = set(step.path)
    has_child = {step.parents[node] for node in visible} | {step.path[-1]}  # the bonus takes a row there
    rows = 1
    for node, parent in enumerate(step.parents):
        if node in visible or parent not in visible:
            continue
        if parent in has_child:
            if rows == max_rows:
                continue
            rows += 1
        visible.add(node)
        has_child.add(parent)
    return visible


def _hidden_descendants(step: StepRecord, visible: set[int]) -> dict[int, int]:
    """Counts the descendants that are not drawn by their nearest drawn ancestor."""
    hidden: dict[int, int] = {}
    for node in range(len(step.parents)):
        if node not in visible:
            ancestor = step.parents[node]
            while ancestor not in visible:
                ancestor = step.parents[ancestor]
            hidden[ancestor] = hidden.get(ancestor, 0) + 1
    return hidden


def shown(text: str, limit: int = MAX_TOKEN) -> str:
    """A token's text with its white space made visible, cut to `limit` characters."""
    text = text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍").replace(" ", "·")
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _header(drawing: Drawing, steps: Sequence[StepRecord], title: str, width: float) -> float:
    tokens = sum(len(step.path) for step in steps)
    rate = f", {tokens / len(steps):.2f} tokens per step" if steps else ""
    drawing.text(MARGIN, 34, title or "Tree-speculative decoding", "head fill-ink")
    drawing.text(MARGIN, 53, f"{len(steps)} steps of the target model, {tokens} tokens{rate}", "fill-muted")
    x = width - MARGIN
    for label, style, ink in (
        ("bonus token", "fill-gold-fill stroke-gold", "fill-gold"),
        ("rejected draft", "fill-page stroke-line", "fill-muted"),
        ("accepted draft", "fill-green-fill stroke-green", "fill-green"),
        ("root", "fill-blue-fill stroke-blue", "fill-blue"),
    ):
        x -= pill_width(label) + 8
        drawing.pill(x + 8, 32, label, style, ink)
    return 70


def _draw_step(
    drawing: Drawing,
    number: int,
    step: StepRecord,
    layout: _Layout,
    spans: list[tuple[str, str]],
    top: float,
    width: float,
) -> float:
    height = layout.rows * ROW + 50
    drawing.rect(MARGIN - 8, top, width - 2 * MARGIN + 16, height, "fill-panel", radius=8)
    drawing.text(MARGIN + 4, top + 27, f"step {number}", "bold fill-ink")
    drawing.text(MARGIN + 4, top + 43, f"+{len(step.path)}", "bold fill-green")
    drawing.text(MARGIN + 4, top + 59, f"{len(step.parents) - 1} drafts", "small fill-muted")
    left, first = MARGIN + 72, top + 23
    path = step.path

    def point(column: int, row: int) -> tuple[float, float]:
        return left + layout.column[column], first + row * ROW

    def edge(node: int, column: int, row: int, style: str) -> None:
        x1, y1 = point(layout.depth[node], layout.row[node])
        x1 += pill_width(shown(step.tokens[node]))
        x2, y2 = point(column, row)
        bend = x2 - COLUMN_GAP / 2
        curve = f"C{bend:.1f} {y1:.1f} {bend:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
        drawing.path(f"M{x1:.1f} {y1:.1f} H{x2 - COLUMN_GAP:.1f} {curve}", style)

    ordered = sorted(layout.visible, key=lambda node: node in path)  # accepted edges lie on top
    for node in ordered:
        if node != 0:
            style = "stroke-green thick" if node in path else "stroke-line thin"
            edge(step.parents[node], layout.depth[node], layout.row[node], style)
    edge(path[-1], layout.bonus_depth, layout.bonus_row, "stroke-gold thick dash")
    for node in ordered:
        x, y = point(layout.depth[node], layout.row[node])
        style, ink, what = "fill-page stroke-line", "fill-muted", "not accepted"
        if node == 0:
            style, ink, what = "fill-blue-fill stroke-blue", "fill-blue", "the root: last token of the step before"
        elif node in path:
            style, ink, what = "fill-green-fill stroke-green", "fill-green bold", "accepted"
        hover = f"node {node}, depth {layout.depth[node]}, {step.tokens[node]!r}: {what}"
        right = x + drawing.pill(x, y, shown(step.tokens[node]), style, ink, hover=hover)
        if node in layout.hidden:
            drawing.text(right + 3, y - 4, f"+{layout.hidden[node]}", "small fill-muted")
    x, y = point(layout.bonus_depth, layout.bonus_row)
    hover = f"bonus: the target model's own token {step.bonus!r}"
    drawing.pill(x, y, shown(step.bonus), "fill-gold-fill stroke-gold", "fill-gold bold", hover=hover)

    new = [(step.tokens[node], "fill-green bold") for node in path[1:]] + [(step.bonus, "fill-gold bold")]
    drawing.spans(left, top + height - 14, _tail(spans + new, TAIL))
    return top + height + 10


def _tail(spans: list[tuple[str, str]], length: int) -> list[tuple[str, str]]:
    """The last `length` characters, on one line."""
    kept: list[tuple[str, str]] = []
    for text, style in reversed(spans):
        text = shown(text, len(text) + 1).replace("·", " ")
        kept.append((text[max(0, len(text) - length) :], style))
        length -= len(kept[-1][0])
        if length <= 0:
            kept.append(("…", "fill-muted"))
            break
    return kept[::-1]


def _draw_text(drawing: Drawing, spans: list[tuple[str, str]], top: float, width: float) -> float:
    """The whole text with its line breaks; the prompt's last lines only."""
    lines: list[list[tuple[str, str]]] = [[]]
    prompt_lines = 0
    for index, (text, style) in enumerate(spans):
        for number, piece in enumerate(text.expandtabs(4).split("\n")):
            if number:
                lines.append([])
            used = sum(len(t) for t, _ in lines[-1])
            while piece:
                room = TEXT_COLUMNS - used
                lines[-1].append((piece[:room], style))
                piece, used = piece[room:], 0
                if piece:
                    lines.append([])
        if index == 0:
            prompt_lines = len(lines)
    lines = lines[max(0, prompt_lines - 6) :]
    height = len(lines) * 17 + 24
    drawing.rect(MARGIN - 8, top, width - 2 * MARGIN + 16, height, "none stroke-line thin", radius=8)
    drawing.text(MARGIN + 4, top + 22, "text", "bold fill-ink")
    for number, line in enumerate(lines):
        drawing.spans(MARGIN + 72, top + 23 + number * 17, line)
    return top + height + 16
