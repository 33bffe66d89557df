"""build_trees, mask_words."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagedtree import build_trees, mask_words
from pagedtree.check.case import Case, Place, Results
from pagedtree.check.cases.inputs import DTYPES, float32, int32, offsets, random_tree, seeded, uniform
from pagedtree.reference import tree as loops

NAMES = ("depths", "first_child", "next_sibling", "mask", "valid")  # of the results
CHAIN = [-1, 0, 1, 2]
# Name -> parents of each tree, padding rows, max_nodes, max_depth.
BATCHES: dict[str, tuple[list[list[int]], int, int, int]] = {
    "no sequence": ([], 0, 4, 3),
    "no sequence, padding rows": ([], 3, 4, 3),
    "one node": ([[-1]], 0, 1, 0),
    "ragged": ([[-1, 0, 0, 1, 1, 2, 2], CHAIN, [-1], [-1, 0, 0, 0]], 0, 7, 3),
    "padding rows": ([CHAIN, [-1]], 5, 8, 3),
    "a tree of no nodes": ([[-1, 0], [], [-1]], 1, 4, 3),
    "malformed parents": ([[-1, 0, 5, 1, 3], [-1, 1, 0], [-1, -7, 0], [3, 0, 1], [-1, 2**31 - 1]], 2, 8, 7),
    "a second root": ([[-1, 0, -1, 2, 1]], 0, 8, 7),
    "more than max_nodes": ([[-1, 0, 1, 0, 3], CHAIN], 0, 3, 7),
    "deeper than max_depth": ([CHAIN, [-1, 0, 1, 1, 2]], 0, 8, 1),
    "words of 32, 33 and 64": ([random_tree(n, n).parents.tolist() for n in (32, 33, 64)], 0, 64, 63),
    "1000 nodes": ([random_tree(1, 1000).parents.tolist(), random_tree(2, 700, 700).parents.tolist()], 3, 1000, 999),
    "a chain of 1024": ([list(range(-1, 1023))], 0, 1024, 1023),
    "1023 children": ([[-1] + [0] * 1023], 0, 1024, 1),
}


def cases() -> Iterator[Case]:
    for name, batch in BATCHES.items():
        yield _case(name, *batch)
    for name in ("bool", "fp32", "fp16", "bf16"):
        yield _mask_case(name, [5, 0, 33, 2, 64], 3, 40)
        yield _mask_case(name, [7] * 7, 0, None)


def linked(parents: list[list[int]], rows: int, max_nodes: int, max_depth: int) -> Results:
    """Returns the fields of a batch of these trees, whose unreachable nodes have parent -1."""
    trees = [loops.link(tree, max_nodes, max_depth) for tree in parents]
    padding = rows - sum(map(len, parents))
    columns = zip(*[row for tree in trees for row in tree.rows], *[loops.PADDING] * padding, strict=True)
    depths, first_child, next_sibling, masks = map(list, columns) if rows else ([], [], [], [])
    return {
        "cu_nodes": offsets([len(tree) for tree in parents]),
        "parents": int32([parent for tree in parents for parent in tree] + [-1] * padding),
        "depths": int32(depths), "first_child": int32(first_child), "next_sibling": int32(next_sibling),
        "mask": loops.words_of(masks, -(-max_nodes // 32)),
        "valid": torch.tensor([tree.valid for tree in trees], dtype=torch.bool),
    }  # fmt: skip


def _case(name: str, trees: list[list[int]], padding: int, max_nodes: int, max_depth: int) -> Case:
    parents = [parent for tree in trees for parent in tree] + [-1] * padding
    cu_nodes = offsets([len(tree) for tree in trees])

    def run(place: Place) -> Results:
        batch = build_trees(place.put(int32(parents)), place.put(cu_nodes), max_nodes=max_nodes, max_depth=max_depth)
        return {name: getattr(batch, name) for name in NAMES}

    def by_loops() -> Results:
        fields = linked(trees, len(parents), max_nodes, max_depth)
        return {name: fields[name] for name in NAMES}

    return Case(f"build_trees/{name}", ("build_trees",), run, by_loops)


def _mask_case(name: str, sizes: list[int], padding: int, max_nodes: int | None) -> Case:
    """Every second row and column of a larger mask; without max_nodes a mask of a row's own tree."""
    rows = sum(sizes) + padding
    cu_nodes = None if max_nodes is None else offsets(sizes)
    columns = rows if cu_nodes is not None else 70
    seen = uniform(2 * rows, 2 * columns, seed=1) < 0.5
    hidden = float32([-1e4, -torch.inf, torch.nan, -3e38])
    biases = torch.where(seen, 0.0, hidden[torch.randint(4, seen.shape, generator=seeded(2))])
    mask = seen if name == "bool" else biases.to(DTYPES[name])
    arguments = {"mask": mask, "cu_nodes": cu_nodes}

    def run(place: Place) -> Results:
        given = place.put({key: x for key, x in arguments.items() if x is not None})
        given["mask"] = given["mask"][::2, 1::2]
        return {"words": mask_words(**given, max_nodes=max_nodes)}

    def by_loops() -> Results:
        sets: list[frozenset[int]] = []
        for b, size in enumerate(sizes):
            begin, nodes = (0, columns) if cu_nodes is None else (int(cu_nodes[b]), min(size, max_nodes or size))
            for row in range(len(sets), len(sets) + size):
                sets.append(frozenset(j for j in range(nodes) if seen[2 * row, 2 * (begin + j) + 1]))
        sets += [frozenset()] * (rows - len(sets))
        return {"words": loops.words_of(sets, -(-(max_nodes or columns) // 32))}

    return Case(f"mask_words/{name}, {'flat' if cu_nodes is not None else 'by tree'}", ("mask_words",), run, by_loops)
