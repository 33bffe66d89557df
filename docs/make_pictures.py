"""Writes the pictures of docs/img; the tree that they show and its mask words are computed by pagedtree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from svg import Drawing, pill_width

from pagedtree import DraftTree, TreeBatch

IMAGES = Path(__file__).resolve().parent / "img"
RESULTS = IMAGES.parents[1] / "benchmarks" / "results"

# The one example that all pictures share.
PAGE_SIZE = 16
PREFIX = 42
PAGE_TABLE = [7, 2, 5, 9]
TREE = DraftTree.from_parents([-1, 0, 0, 1, 1, 2, 3, 3, 5, 6])
TOKENS = ["return", "self", "None", ".", "[", "⏎", "name", "size", "def", ")"]
ACCEPTED = [0, 1, 3, 6, 9]
BONUS = "⏎"

MARGIN = 24
CELL = 24


def mask_words() -> list[int]:
    words = TreeBatch.from_trees([TREE]).mask
    assert words.shape[1] == 1
    return [int(word) & 0xFFFFFFFF for word in words[:, 0]]


def draw_tree(drawing: Drawing, left: float, top: float, gap: float, row: float, *, accepted: bool) -> None:
    """The example's tree with node numbers, depth from left to right."""
    place: dict[int, tuple[float, float]] = {}
    rows = 0
    stack = [0]
    while stack:
        node = stack.pop()
        place[node] = (left + int(TREE.depths[node]) * gap, top + rows * row)
        children = [child for child in range(TREE.num_nodes) if TREE.parents[child] == node]
        rows += not children
        stack.extend(reversed(children))
    for node, (x, y) in place.items():
        parent = int(TREE.parents[node])
        if parent >= 0:
            x1, y1 = place[parent][0] + pill_width(TOKENS[parent]), place[parent][1]
            on_path = accepted and node in ACCEPTED
            style = "stroke-green thick" if on_path else "stroke-muted thin"
            bend = (max(x1, x - 30) + x) / 2
            drawing.path(f"M{x1:.1f} {y1:.1f} C{bend:.1f} {y1:.1f} {bend:.1f} {y:.1f} {x:.1f} {y:.1f}", style)
    for node, (x, y) in place.items():
        style, ink = (
            ("fill-blue-fill stroke-blue", "fill-blue") if node == 0 else ("fill-page stroke-green", "fill-ink")
        )
        if accepted and node in ACCEPTED[1:]:
            style, ink = "fill-green-fill stroke-green", "fill-green bold"
        drawing.pill(x, y, TOKENS[node], style, ink)
        drawing.text(x + 1, y - 13, str(node), "small fill-muted")


def slot_style(position: int, length: int) -> tuple[str, str]:
    """Colours of the cache cell of a position: (shape, ink)."""
    if position < PREFIX:
        return "fill-blue-fill stroke-line thin", "fill-blue"
    if position == PREFIX:
        return "fill-blue-fill stroke-blue thin", "fill-blue bold"
    if position < length:
        return "fill-green-fill stroke-green thin", "fill-green"
    return "none stroke-line thin", "fill-muted"


def draw_page(drawing: Drawing, x: float, y: float, index: int, length: int) -> None:
    """Page `index` of the sequence as a row of slots; draft nodes carry their number."""
    for offset in range(PAGE_SIZE):
        position = index * PAGE_SIZE + offset
        shape, ink = slot_style(position, length)
        drawing.rect(x + offset * CELL, y, CELL, CELL, shape)
        if PREFIX <= position < length:
            drawing.text(x + (offset + 0.5) * CELL, y + 16, str(position - PREFIX), f"mono {ink}", anchor="middle")


def mask_picture() -> str:
    drawing = Drawing("A paged KV cache with a draft tree in its last pages, and the tree's mask words")
    length = PREFIX + TREE.num_nodes
    width, left, top = 1000, MARGIN + 96, 92
    drawing.text(MARGIN, 36, "The mask lives inside a block", "head fill-ink")
    drawing.text(
        MARGIN,
        56,
        f"One sequence: a prefix of {PREFIX} tokens, then a draft tree of {TREE.num_nodes} nodes, in pages of "
        f"{PAGE_SIZE} slots. seq_lens = {length}, tree_lens = {TREE.num_nodes}.",
        "fill-muted",
    )
    drawing.text(MARGIN, top - 8, "page_table", "mono fill-muted")
    drawing.text(left, top - 8, "KV cache slots (any page may be anywhere in the pool)", "small fill-muted")
    for index, page in enumerate(PAGE_TABLE):
        y = top + index * (CELL + 8)
        drawing.text(MARGIN + 62, y + 16, f"page {page}", "mono fill-ink", anchor="end")
        drawing.line(MARGIN + 68, y + 12, left - 5, y + 12, "stroke-muted thin", arrow="muted")
        draw_page(drawing, left, y, index, length)

    x = left + PAGE_SIZE * CELL + 44
    drawing.text(x, top - 8, "draft tree: node 0 is the root, the last committed token", "small fill-muted")
    draw_tree(drawing, x, top + 22, 84, 35, accepted=False)

    y = _mask_rows(drawing, top + 168, length)
    return drawing.render(width, y)


def _mask_rows(drawing: Drawing, top: float, length: int) -> float:
    """Queries x keys: prefix tiles, tiles that meet the tree, and each row's mask word."""
    cell, left = 12, MARGIN + 96
    keys = len(PAGE_TABLE) * PAGE_SIZE
    plain = PREFIX // PAGE_SIZE * PAGE_SIZE
    x_plain, x_end = left + plain * cell, left + keys * cell
    for x1, x2, color, label, detail in (
        (left, x_plain, "blue", "tiles of prefix keys only", "no mask is read, no mask code runs"),
        (x_plain, x_end, "green", "tiles that meet the tree", "prefix keys: visible; tree keys: bit j of the row"),
    ):
        drawing.line(x1 + 2, top + 34, x2 - 2, top + 34, f"stroke-{color} thick")
        drawing.text((x1 + x2) / 2, top + 12, label, f"bold fill-{color}", anchor="middle")
        drawing.text((x1 + x2) / 2, top + 27, detail, "small fill-muted", anchor="middle")
    drawing.text(x_end + 16, top + 27, "mask word", "bold fill-ink")
    drawing.text(MARGIN, top + 27, "query", "bold fill-ink")
    y = top + 42
    mask = TREE.mask
    for node, word in enumerate(mask_words()):
        drawing.text(MARGIN, y + 9, str(node), "mono fill-ink")
        drawing.text(MARGIN + 20, y + 9, TOKENS[node], "mono fill-muted")
        for key in range(keys):
            seen = key < PREFIX or (key < length and mask[node, key - PREFIX])
            style = "none stroke-line thin"
            if seen:
                style = "fill-blue-fill stroke-line thin" if key < PREFIX else "fill-green stroke-green thin"
            if key < length:
                drawing.rect(left + key * cell, y, cell, cell, style)
        drawing.text(x_end + 16, y + 9, f"0x{word:08x}", "mono fill-ink")
        y += cell + 4
    for page in range(len(PAGE_TABLE) + 1):
        x = left + page * PAGE_SIZE * cell
        drawing.line(x, top + 38, x, y + 4, "stroke-muted thin dash")
    for page in range(len(PAGE_TABLE)):
        drawing.text(
            left + (page + 0.5) * PAGE_SIZE * cell,
            y + 14,
            f"page {PAGE_TABLE[page]}",
            "small fill-muted",
            anchor="middle",
        )
    return y + 34


def step_picture() -> str:
    """Two lanes: before and in the target's pass from left to right, after it from right to left."""
    drawing = Drawing("One step of tree-speculative decoding: which op takes and gives which tensors")
    drawing.text(MARGIN, 36, "One step", "head fill-ink")
    drawing.text(
        MARGIN,
        56,
        "B sequences, N = T tree nodes in all, V tokens in the vocabulary, S = max_depth + 1. "
        "Nothing in the loop reads a tensor on the host.",
        "fill-muted",
    )
    top, bottom, height = 92, 292, 104
    drawing.rect(526, top - 16, 300, height + 32, "none stroke-muted thin dash", radius=10)
    drawing.text(676, top + height + 33, "target model: once per layer", "small fill-muted", anchor="middle")
    drafters = ["ngram_propose", "medusa_propose", "expand_tree, rerank_tree"]
    _box(drawing, MARGIN, top, 160, height, "draft", drafters, "gold")
    places = ["where each node goes:", "start + depth for the", "rotary embedding,", "start + index for the slot"]
    _box(drawing, 284, top, 150, height, "prepare_step", places)
    _box(drawing, 540, top, 116, height, "append_kv", ["k, v of the nodes", "[T, Hkv, D]", "into their slots"])
    attention = ["q [T, Hq, D]", "over the pages", "and the tree's", "mask [T, W]"]
    _box(drawing, 690, top, 122, height, "tree_attention", attention, "green")
    _box(drawing, 870, top, 146, height, "LM head", ["one row of logits", "a node"], "muted")
    rules = ["greedy or sampled:", "walks down the tree,", "adds the bonus token"]
    _box(drawing, 846, bottom, 170, height, "verify_*", rules, "green")
    _box(
        drawing,
        560,
        bottom,
        160,
        height,
        "compact_kv",
        ["moves the accepted", "rows forward,", "all layers in one call"],
    )
    steps = ["ends the path at EOS,", "appends to the history,", "finds the next root", "of each sequence"]
    _box(drawing, 284, bottom, 166, height, "commit", steps)
    _arrow(drawing, 184, 284, top + 40, ["draft_tokens [N]", "TreeBatch"])
    _arrow(drawing, 434, 526, top + 40, ["positions [T]", "seq_lens [B]", "slots [T]"])
    _arrow(drawing, 656, 690, top + 40, [])
    _arrow(drawing, 826, 870, top + 40, [])
    drawing.line(943, top + height, 943, bottom - 4, "stroke-ink thin", arrow="ink")
    drawing.text(935, (top + height + bottom) / 2 + 14, "logits [N, V]", "small fill-ink", anchor="end")
    _arrow(drawing, 846, 720, bottom + 40, ["accept_index [B, S]", "num_accepted [B]"])
    _arrow(drawing, 560, 450, bottom + 40, ["Verdict, with", "tokens [B, S]"])
    drawing.path(f"M284 {bottom + 40} H104 V{top + height + 4}", "stroke-ink thin", arrow="ink")
    for line, text in enumerate(["start [B]", "last_token [B]", "finished [B]"]):
        drawing.text(114, bottom - 8 + 14 * line, text, "small fill-ink")
    return drawing.render(1040, bottom + height + 24)


def _box(
    drawing: Drawing, x: float, y: float, width: float, height: float, name: str, lines: list[str], color: str = "blue"
) -> None:
    fill = "fill-panel" if color == "muted" else f"fill-{color}-fill"
    drawing.rect(x, y, width, height, f"{fill} stroke-{color} thin", radius=8)
    drawing.text(x + width / 2, y + 24, name, "mono bold fill-ink", anchor="middle")
    for number, line in enumerate(lines):
        drawing.text(x + width / 2, y + 45 + 15 * number, line, "small fill-muted", anchor="middle")


def _arrow(drawing: Drawing, x1: float, x2: float, y: float, lines: list[str]) -> None:
    """A horizontal arrow with what flows along it written below."""
    drawing.line(x1, y, x2 - 3 if x2 > x1 else x2 + 3, y, "stroke-ink thin", arrow="ink")
    for number, line in enumerate(lines):
        drawing.text((x1 + x2) / 2, y + 16 + 14 * number, line, "small fill-ink", anchor="middle")


def compaction_picture() -> str:
    """The two pages that hold the tree, before and after."""
    drawing = Drawing("compact_kv: accepted rows move forward, the pages behind them become free")
    length, kept = PREFIX + TREE.num_nodes, PREFIX + len(ACCEPTED)
    first, pages = PREFIX // PAGE_SIZE, len(PAGE_TABLE)
    left, cell, gap = MARGIN + 60, 26, 28
    before, after = 268, 360
    drawing.text(MARGIN, 36, "Compaction", "head fill-ink")
    path = ", ".join(str(node) for node in ACCEPTED)
    drawing.text(MARGIN, 56, f"The path {path} was accepted: num_accepted = {len(ACCEPTED) - 1}.", "fill-muted")
    draw_tree(drawing, left, 94, 100, 35, accepted=True)
    notes = [
        "row of accept_index[j]  ->  position start + j",
        f"start = {PREFIX}",
        f"new seq_lens = start + num_accepted + 1 = {kept}",
        f"live pages: ceil({kept} / {PAGE_SIZE}) = {-(-kept // PAGE_SIZE)} of {pages}",
    ]
    for number, line in enumerate(notes):
        drawing.text(560, 98 + 20 * number, line, "mono fill-ink")
    drawing.text(560, 182, "The bonus token has no K and V yet: it is the next root.", "fill-muted")

    def x_of(position: int) -> float:
        page, offset = divmod(position, PAGE_SIZE)
        return left + (page - first) * (PAGE_SIZE * cell + gap) + offset * cell

    for y, label in ((before, "before"), (after, "after")):
        drawing.text(MARGIN, y + 17, label, "bold fill-ink")
        for position in range(first * PAGE_SIZE, pages * PAGE_SIZE):
            node = position - PREFIX
            if y == after:
                node = ACCEPTED[node] if PREFIX <= position < kept else -1
            shape, ink = "none stroke-line thin", ""
            if position < PREFIX:
                shape = "fill-blue-fill stroke-line thin"
            elif node == 0:
                shape, ink = "fill-blue-fill stroke-blue thin", "fill-blue bold"
            elif node in ACCEPTED:
                shape, ink = "fill-green-fill stroke-green thin", "fill-green bold"
            elif y == before and position < length:
                ink = "fill-muted"
            free = y == after and position // PAGE_SIZE >= -(-kept // PAGE_SIZE)
            drawing.rect(x_of(position), y, cell, cell, shape + (" dash" if free else ""))
            if ink:
                drawing.text(x_of(position) + cell / 2, y + 17, str(node), f"mono {ink}", anchor="middle")
    for page in range(first, pages):
        middle = x_of(page * PAGE_SIZE) + PAGE_SIZE * cell / 2
        drawing.text(middle, before - 8, f"page {PAGE_TABLE[page]}", "small fill-muted", anchor="middle")
        if page >= -(-kept // PAGE_SIZE):
            drawing.text(middle, after + cell + 17, "free: goes back to the pool", "small fill-gold", anchor="middle")
    for j, node in enumerate(ACCEPTED):
        x1, x2 = x_of(PREFIX + node) + cell / 2, x_of(PREFIX + j) + cell / 2
        y1, y2 = before + cell + 2, after - 4
        bend = (y1 + y2) / 2
        style, head = ("stroke-green thick", "green") if x1 != x2 else ("stroke-muted thin", "muted")
        drawing.path(f"M{x1:.1f} {y1} C{x1:.1f} {bend} {x2:.1f} {bend} {x2:.1f} {y2}", style, arrow=head)
    return drawing.render(x_of(pages * PAGE_SIZE - 1) + cell + MARGIN, after + cell + 36)


def latent_picture() -> str:
    """A page of a latent cache, what a row is used for, and how it compares with heads of their own; true to scale."""
    rank, rotated, heads, nope, value = 512, 64, 128, 128, 128
    row, apart = rank + rotated, heads * (nope + rotated + value)
    left, top, cell = MARGIN + 72, 112, 22
    split, right = left + rank, left + row
    drawing = Drawing("A latent KV cache: one row per token, which is key and value of all heads")
    drawing.text(MARGIN, 36, "A latent cache", "head fill-ink")
    drawing.text(
        MARGIN, 56, f"One layer of DeepSeek-V3: {heads} query heads share one row of {row} numbers per token.",
        "fill-muted",
    )  # fmt: skip
    drawing.text((left + split) / 2, top - 8, f"{rank} compressed", "bold fill-blue", anchor="middle")
    drawing.text((split + right) / 2, top - 8, f"{rotated} rotated", "bold fill-gold", anchor="middle")
    for slot in range(4):
        y = top + slot * (cell + 4)
        drawing.text(left - 8, y + 15, "..." if slot == 3 else f"token {slot}", "small fill-muted", anchor="end")
        drawing.rect(left, y, rank, cell, "fill-blue-fill stroke-blue thin")
        drawing.rect(split, y, rotated, cell, "fill-gold-fill stroke-gold thin")
    y = top + 4 * (cell + 4) + 12
    for end, text in (
        (right, f"the key of all heads: {row} columns"),
        (split, f"the value of all heads: {rank} columns"),
    ):
        drawing.line(left, y, end, y, "stroke-ink thin")
        for x in (left, end):
            drawing.line(x, y - 5, x, y + 5, "stroke-ink thin")
        drawing.text((left + split) / 2, y + 16, text, "small fill-ink", anchor="middle")
        y += 32
    lines = [
        ("k_cache", f"[pages, page_size, 1, {row}]"),
        ("v_cache", f"k_cache[..., :{rank}], a view"),
        ("q", f"[T, {heads}, {row}]"),
        ("out", f"[T, {heads}, {rank}]"),
    ]
    for number, (name, shape) in enumerate(lines):
        drawing.spans(right + 36, top + 14 + 26 * number, [(f"{name:9}", "fill-green bold"), (shape, "fill-ink")])
    drawing.text(right + 36, top + 14 + 26 * len(lines), "Each row is read once.", "fill-muted")

    y += 18
    drawing.text(MARGIN, y, "Cached per token and layer", "bold fill-ink")
    width = 980.0
    scale = width / apart
    bars = (
        ("blue", f"K and V of {heads} heads: {heads} x ({nope + rotated} + {value}) = {apart} numbers", apart),
        ("green", f"latent: {row} numbers, {apart / row:.0f} times fewer", row),
    )
    for color, text, size in bars:
        drawing.rect(MARGIN, y + 12, scale * size, 18, f"fill-{color}-fill stroke-{color} thin")
        inside = size == apart
        drawing.text(MARGIN + (10 if inside else scale * size + 8), y + 25, text, f"small fill-{color}")
        y += 28
    return drawing.render(MARGIN + width + MARGIN, y + 28)


def recurrent_picture() -> str:
    """The pairs of tokens that a recurrent layer weighs, in a causal chunk and on the tree; the states it moves."""
    cell, top, nodes = 20, 124, TREE.num_nodes
    drawing = Drawing("A recurrent layer on a tree: the mask of ancestors in place of the causal triangle")
    drawing.text(MARGIN, 36, "A chunk with the mask of ancestors", "head fill-ink")
    drawing.text(
        MARGIN, 56, "Row n, column m: whether what token m writes reaches token n. This is all that happens between "
        "the state that is read and the one that is written.", "fill-muted",
    )  # fmt: skip
    draw_tree(drawing, MARGIN, top + 12, 92, 40, accepted=True)
    chain = DraftTree.chain(nodes - 1)
    for x, tree, title in ((540.0, chain, "a causal chunk"), (800.0, TREE, "this tree")):
        drawing.text(x + nodes * cell / 2, top - 26, title, "bold fill-ink", anchor="middle")
        for n in range(nodes):
            drawing.text(x - 8, top + n * cell + 14, str(n), "mono small fill-muted", anchor="end")
            drawing.text(x + (n + 0.5) * cell, top - 6, str(n), "mono small fill-muted", anchor="middle")
            for m in range(nodes):
                style = "none stroke-line thin"
                if tree.mask[n, m]:
                    style = "fill-gold-fill stroke-gold thin" if n == m else "fill-green-fill stroke-green thin"
                drawing.rect(x + m * cell, top + n * cell, cell, cell, style)
    y = top + nodes * cell + 22
    for x, color, text in (
        (540, "green", "A[n, m] and C[n, m]: m is an ancestor of n"),
        (800, "gold", "C[n, n]: what n itself writes"),
    ):
        drawing.rect(x, y - 10, 12, 12, f"fill-{color}-fill stroke-{color} thin")
        drawing.text(x + 18, y, text, "small fill-ink")

    y += 34
    _box(drawing, MARGIN, y, 150, 84, "state", ["S [Dk, Dv] of a head,", "as the last step", "has left it"])
    _box(
        drawing,
        300,
        y,
        190,
        84,
        "tree_delta_rule",
        ["u[n] of all nodes,", "one after the other;", "no state for a node"],
        "green",
    )
    _box(
        drawing,
        590,
        y,
        190,
        84,
        "advance_state",
        ["u again, for the", "accepted path alone:", "0, 1, 3, 6, 9"],
        "green",
    )
    _box(drawing, 880, y, 126, 84, "state", ["behind node 9, the", "parent of the next", "step's root"])
    _arrow(drawing, 174, 300, y + 30, ["both ops read it"])
    _arrow(drawing, 490, 590, y + 30, ["out [T, H, Dv],", "verified"])
    _arrow(drawing, 780, 880, y + 30, ["one is written"])
    y += 118
    drawing.text(MARGIN, y + 14, "A state for each node would be", "small fill-muted")
    for node in range(nodes):
        drawing.rect(220 + node * 30, y, 24, 20, "none stroke-muted thin dash", radius=3)
        drawing.text(232 + node * 30, y + 14, str(node), "mono small fill-muted", anchor="middle")
    drawing.text(232 + nodes * 30, y + 14, f"{nodes} matrices written and {nodes} read.", "small fill-muted")
    return drawing.render(1030, y + 44)


RULE_COLORS = {"sampled": "blue", "rejection": "muted", "block": "green", "traversal": "green", "typical": "gold"}


def shards_picture() -> str:
    """Ranks side by side: what each holds, and under them what they send."""
    drawing = Drawing("Tensor parallel verification: who holds what, and what is sent")
    ranks, width, gap, top = 4, 232, 14, 84
    right = MARGIN + ranks * (width + gap) - gap
    drawing.text(MARGIN, 36, "Four ranks verify a tree", "head fill-ink")
    drawing.text(
        MARGIN,
        56,
        "Logits stay where the output layer has made them. N nodes in all trees; a word is 64 bits.",
        "fill-muted",
    )
    for rank in range(ranks):
        x = MARGIN + rank * (width + gap)
        drawing.rect(x, top, width, 196, "fill-panel stroke-line thin", radius=8)
        drawing.text(x + 12, top + 20, f"rank {rank}", "bold fill-ink")
        held = ["target: its heads, its columns", "KV cache: its heads, all pages", "trees, drafts, seeds: all"]
        for line, text in enumerate(held):
            drawing.text(x + 12, top + 40 + 16 * line, text, "small fill-muted")
        drawing.text(x + 12, top + 100, "logits [N, V]", "mono small fill-ink")
        cell = (width - 24) / ranks
        for part in range(ranks):
            own = part == rank
            style = "fill-green-fill stroke-green thin" if own else "none stroke-line thin dash"
            drawing.rect(x + 12 + part * cell, top + 108, cell, 26, style)
            if own:
                drawing.text(x + 12 + (part + 0.5) * cell, top + 125, "V / 4", "small fill-green", anchor="middle")
        if rank == 0:
            drawing.rect(x + 12, top + 148, width - 24, 34, "fill-gold-fill stroke-gold thin", radius=6)
            drawing.text(x + width / 2, top + 169, "draft model, TP 1", "small fill-gold", anchor="middle")
        else:
            drawing.text(x + 12, top + 169, "no draft model: moves its KV rows", "small fill-muted")
    lanes = [
        ("gold", "proposal", "3 words per node, from rank 0, once per step"),
        ("green", "peak", "2 words per node: largest logit and its token, NaN"),
        ("green", "thresholds", "16 words per node and digit, only with top_k or top_p; 1 for ties"),
        ("green", "race", "1 word per node: best score and its token (sampled)"),
        ("blue", "drafts", "2 words per node: mass, p and q of its token; 2 per further sibling (rejection)"),
        ("blue", "bonus", "3 words per tree (rejection)"),
    ]
    y = top + 228
    for color, name, text in lanes:
        drawing.line(MARGIN + 96, y, right, y, f"stroke-{color} thick", arrow=color)
        drawing.text(MARGIN, y + 4, name, f"bold fill-{color}")
        drawing.text(MARGIN + 104, y - 6, text, "small fill-ink")
        y += 30
    drawing.text(
        MARGIN,
        y + 4,
        "All ranks then know what decides, and each walks the trees alone: the same verdict, and no broadcast of it.",
        "fill-muted",
    )
    return drawing.render(right + MARGIN, y + 24)


def accepted_length_picture() -> str:
    """Bars of the recorded means with their intervals, one group for each way to draft."""
    rows = json.loads((RESULTS / "rules.json").read_text())["rows"]
    left, width, bar = 280, 480, 18
    scale = width / max(row["accepted"][2] for row in rows)
    drawing = Drawing("Accepted draft tokens per tree, by drafts and rule")
    y, group = MARGIN + 8.0, None
    for row in rows:
        if group != (row["shape"], row["law"]):
            group = (row["shape"], row["law"])
            y += 10
            drawing.text(MARGIN, y + 13, f"{row['shape']}, {row['law']}", "bold fill-ink")
        mean, low, high = (left + scale * value for value in row["accepted"])
        color = RULE_COLORS[row["rule"]]
        drawing.text(left - 10, y + 13, row["rule"] + (" (lossy)" if row["rule"] == "typical" else ""), anchor="end")
        drawing.rect(left, y + 2, mean - left, bar - 4, f"fill-{color} faint", radius=2)
        drawing.line(low, y + bar / 2, high, y + bar / 2, f"stroke-{color} thick")
        drawing.text(high + 8, y + 13, f"{row['accepted'][0]:.2f}", "small fill-muted")
        y += bar + 2
    drawing.line(left, MARGIN + 8, left, y + 4, "stroke-line thin")
    return drawing.render(left + width + 60, y + MARGIN)


PICTURES = {
    "tensor_parallel": shards_picture,
    "accepted_length": accepted_length_picture,
    "mask_inside_a_block": mask_picture,
    "one_step": step_picture,
    "compaction": compaction_picture,
    "latent_cache": latent_picture,
    "recurrent_tree": recurrent_picture,
}


def main() -> None:
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
