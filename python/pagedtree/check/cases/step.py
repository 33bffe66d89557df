"""prepare_step, commit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagedtree import Verdict, build_trees, commit, prepare_step
from pagedtree.check.case import Case, Place, Results
from pagedtree.check.cases.cache import random_table
from pagedtree.check.cases.inputs import PAGE_SIZES, int32, int64, offsets, random_tree
from pagedtree.reference import step as loops
from pagedtree.reference.tree import link

TREES = [random_tree(1, 20).parents.tolist(), [-1], [], [-1, 0, 5, 1], [-1, 0, 0, 1, 1]]


def cases() -> Iterator[Case]:
    for page_size in PAGE_SIZES:
        pages = -(-120 // page_size)
        table = random_table(page_size, 5, pages, 5 * pages)
        yield _prepare(f"page {page_size}", TREES, table, [90, 0, 7, 15, 61], page_size, 33)
    table = random_table(0, 5, 8, 40)
    yield _prepare("idle sequences", TREES, table, [-1, 0, 7, -(2**31), 61], 16, 31)
    yield _prepare("rows cut off", TREES, table, [9, 0, 7, 15, 61], 16, 22)
    yield _prepare("no row", TREES, table, [9, 0, 7, 15, 61], 16, 0)
    yield _prepare("no sequence", [], [], [], 16, 3)
    yield _prepare("no page", [[-1, 0, 1], [-1, 0]], [[3, -2], [5, 6]], [1, 3], 2, 5)
    yield _prepare("past 2^31", [[-1, 0, 1], [-1, 0]], [[3, -2], [5, 6]], [2**31 - 1, 2**30], 2, 5)
    yield _prepare("1000 nodes", [random_tree(3, 1000).parents.tolist()], random_table(1, 1, 70, 70), [50], 16, 1000)
    yield from _commits()


def _prepare(
    name: str, trees: list[list[int]], table: list[list[int]], start: list[int], page_size: int, total_q: int
) -> Case:
    parents = int32([parent for tree in trees for parent in tree] + [-1] * 2)
    cu_nodes = offsets([len(tree) for tree in trees])

    def run(place: Place) -> Results:
        tree_batch = build_trees(place.put(parents), place.put(cu_nodes), max_nodes=1000, max_depth=999)
        page_table = int32(table).view(len(table), len(table[0]) if table else 2)
        fields = prepare_step(tree_batch, place.put(page_table), place.put(int32(start)), page_size, total_q=total_q)
        return dict(zip(("positions", "seq_lens", "cu_seqlens_q", "slots"), fields, strict=True))

    def by_loops() -> Results:
        depths = [row.depth for tree in trees for row in link(tree, 1000, 999).rows]
        fields = loops.prepare(cu_nodes.tolist(), depths, table, start, page_size, total_q)
        positions, seq_lens, cut, slots = fields
        return {
            "positions": int64(positions),
            "seq_lens": int32(seq_lens),
            "cu_seqlens_q": int32(cut),
            "slots": int64(slots),
        }

    return Case(f"prepare_step/{name}", ("prepare_step",), run, by_loops)


# A path that ends in the middle, a full one, no nodes, the root alone, an idle sequence.
PATHS = [[0, 2, 5, -1], [0, 1, 2, 3], [-1] * 4, [0, -1, -1, -1], [0, 1, -1, -1]]
TOKENS = [[5, 9, 3, -1], [8, 8, 2, 7], [-1] * 4, [4, -1, -1, -1], [6, 1, -1, -1]]
SIZES = [6, 4, 0, 3, 2]
NODE_MAP = [0, -1, 4, 2, 3, -1, 0, 3, 5, 1, 0, 1, 2, 0, 7, -1, -1]


def _commits() -> Iterator[Case]:
    start, accepted = [10, 0, 5, 3, -1], [2, 3, 0, 0, 1]
    yield _commit("no EOS", PATHS, accepted, TOKENS, SIZES, start, [[]] * 5)
    yield _commit("EOS for all", PATHS, accepted, TOKENS, SIZES, start, [[9, 2, -1]] * 5)
    eos = [[3, -1], [8, 7], [-1, -1], [4, 5], [6, 1]]
    yield _commit("EOS a sequence", PATHS, accepted, TOKENS, SIZES, start, eos)
    yield _commit("history full", PATHS, accepted, TOKENS, SIZES, start, [[]] * 5, capacity=4)
    yield _commit("tokens left", PATHS, accepted, TOKENS, SIZES, start, [[9]] * 5, tokens_left=[2, 3, 4, 0, -1])
    yield _commit("pool of histories", PATHS, accepted, TOKENS, SIZES, start, [[]] * 5, history_rows=[6, 0, 1, 5, -1])
    yield _commit("no history, no node map", PATHS, accepted, TOKENS, SIZES, start, [[9]] * 5, bare=True)
    bad_paths = [[0, 2, 1, 5], [0, 1, 9, 2], [1, 2, 3, 4], [0, 1, 2, -1], [0, 1, -3, 1]]
    bad_tokens = [[5, 9, 3, 1], [8, 8, 2, 7], [1] * 4, [4, -7, 1, 1], [6, 1, 1, 1]]
    yield _commit("bad values", bad_paths, [99, 3, 2, 2, -5], bad_tokens, SIZES, [2**31 - 2, 0, 5, 3, 1], [[]] * 5)
    yield _commit("no sequence", [], [], [], [], [], [])


def _commit(
    name: str, paths: list[list[int]], accepted: list[int], tokens: list[list[int]], sizes: list[int],
    start: list[int], eos: list[list[int]], *, capacity: int = 9, bare: bool = False,
    tokens_left: list[int] | None = None, history_rows: list[int] | None = None,
) -> Case:  # fmt: skip
    batch, width = len(paths), 4
    histories = batch if history_rows is None else 7
    history = [[b] * min(b + 3, capacity) + [-1] * (capacity - min(b + 3, capacity)) for b in range(histories)]
    lengths = [min(b + 3, capacity) for b in range(histories)]
    same = all(row == eos[0] for row in eos)

    def run(place: Place) -> Results:
        parents = int32([parent for size in sizes for parent in range(-1, size - 1)] + [-1] * 2)
        trees = build_trees(place.put(parents), place.put(offsets(sizes)), max_nodes=8, max_depth=width - 1)
        verdict = Verdict(
            int32(paths).view(batch, width), int32(accepted), int64(tokens).view(batch, width), int32([0] * batch)
        )
        wide = place.put(torch.full((histories, capacity + 2), 77, dtype=torch.int64))  # rows are strided
        texts = {"history": wide[:, :capacity], "history_lens": place.put(int32(lengths))}
        texts["history"].copy_(place.put(int64(history).view(histories, capacity)))
        options = {} if bare else {**texts, "node_map": place.put(int32(NODE_MAP[: sum(sizes) + 2]))}
        arguments = {"tokens_left": tokens_left, "history_rows": history_rows}
        options |= {key: place.put(int32(values)) for key, values in arguments.items() if values is not None}
        eos_ids = int64(eos[0]) if eos and same else int64(eos).view(batch, -1) if eos else None
        result = commit(place.put(verdict), trees, place.put(int32(start)), eos_ids=place.put(eos_ids), **options)
        results = {field: value for field, value in result._asdict().items() if value is not None}
        return results if bare else {**results, "history": wide, "history_lens": texts["history_lens"]}

    def by_loops() -> Results:
        text_copies, lens = [row[:] for row in history], lengths[:]
        fields = loops.commit(
            paths, accepted, tokens, offsets(sizes).tolist(), start, text_copies, lens, eos, NODE_MAP, tokens_left,
            history_rows,
        )._asdict()  # fmt: skip
        long = {"last_token", "accept_rows", "draft_missing"}
        results = {
            field: torch.tensor(
                values, dtype=torch.bool if field == "finished" else torch.int64 if field in long else torch.int32
            )
            for field, values in fields.items()
            if not (bare and field.startswith("draft_"))
        }
        for field in ("accept_rows", "draft_accept_index", "draft_missing"):
            if field in results:
                results[field] = results[field].view(batch, width)
        if bare:
            return results
        padded = torch.full((histories, capacity + 2), 77, dtype=torch.int64)
        padded[:, :capacity] = int64(text_copies).view(histories, capacity)
        return {**results, "history": padded, "history_lens": int32(lens)}

    return Case(f"commit/{name}", ("commit",), run, by_loops)
