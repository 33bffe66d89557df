"""best_first_tree, select_nodes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pagedtree import TreeBatch, best_first_tree, build_trees, select_nodes
from pagedtree.check.case import Case, Place, Results
from pagedtree.check.cases.inputs import float32, int32, int64, normal, offsets, random_tree, seeded
from pagedtree.check.cases.trees import linked
from pagedtree.reference import drafting as loops

FIELDS = ("cu_nodes", "parents", "depths", "first_child", "next_sibling", "mask", "valid")


def cases() -> Iterator[Case]:
    for name, shape, num_nodes in [
        ("ragged", (3, 4, 6), 25), ("64 nodes", (9, 8, 64), 64), ("200 nodes", (2, 8, 9), 200),
        ("1024 nodes", (2, 5, 300), 1024), ("levels of one", (2, 40, 1), 30), ("one node", (3, 2, 4), 1),
        ("no sequence", (0, 2, 4), 9), ("no level", (2, 0, 4), 9), ("no candidate", (2, 3, 0), 9),
    ]:  # fmt: skip
        log_probs = normal(*shape, seed=num_nodes).mul(2)
        yield _best_first(name, log_probs.log_softmax(-1) if log_probs.numel() else log_probs, num_nodes)
    steps = float32([0.0, -0.25, -0.5, -1.0, -1e-8, -3e-8, -50.0])
    for num_nodes, parts in ((64, 64), (257, 1024), (700, 64)):
        log_probs = normal(4, 6, 9, seed=num_nodes).log_softmax(-1).mul(parts).round() / parts
        yield _best_first(f"ties of {num_nodes} nodes", log_probs, num_nodes)
    yield _best_first("ties", steps[torch.randint(0, 7, (5, 4, 9), generator=seeded(1))], 60)
    hostile = float32([math.nan, -math.inf, math.inf, 3.0, -1.0, -2e38, 0.0, -1e-45])
    yield _best_first("hostile", hostile[torch.randint(0, 8, (5, 3, 7), generator=seeded(2))], 40)

    yield _selection("ragged", [7, 1, 0, 33, 12], 20)
    yield _selection("a limit", [7, 1, 0, 33, 12], 20, limit=11)
    yield _selection("a limit below the roots", [7, 1, 0, 33, 12], 20, limit=-3)
    yield _selection("roots alone", [7, 1, 4], 0)
    yield _selection("more rows than nodes", [7, 1, 4], 40, limit=99)
    yield _selection("padding rows", [7, 0, 40], 16, padding=5)
    yield _selection("no sequence", [], 4, padding=3)
    yield _selection("a chain of 1024", [1024, 5], 700, reach=1)
    yield _selection("300 sequences", [i % 40 for i in range(300)], 1500, limit=1200)
    yield _selection("malformed trees", [9, 30, 1, 12], 35, malformed=True)


def tree_results(trees: TreeBatch) -> Results:
    return {name: getattr(trees, name) for name in FIELDS}


def _best_first(name: str, log_probs: Tensor, num_nodes: int) -> Case:
    batch, levels, width = log_probs.shape
    # Rows of wider tensors, the levels before the batch.
    wide = torch.arange(levels * batch * 2 * width, dtype=torch.int64).view(levels, batch, 2 * width)
    tokens = wide[..., :width].transpose(0, 1)
    roots = torch.arange(batch, dtype=torch.int64) - 1

    def run(place: Place) -> Results:
        values, ids, of_roots = place.put((log_probs, tokens, roots))
        draft_tokens, trees, joints = best_first_tree(values, ids, of_roots, num_nodes, return_log_probs=True)
        return {"draft_tokens": draft_tokens, "joints": joints, **tree_results(trees)}

    def by_loops() -> Results:
        drafts, parents, joints = [], [], []
        for b in range(batch):
            *tree, sums = loops.best_first_tree(log_probs[b].numpy(), tokens[b].numpy(), int(roots[b]), num_nodes)
            missing = num_nodes - len(sums)
            drafts += tree[0] + [-1] * missing
            parents.append(tree[1] + [-1] * missing)
            joints += sums + [-math.inf] * missing
        batch_of = linked(parents, batch * num_nodes, num_nodes, levels)
        batch_of["valid"] = torch.ones(batch, dtype=torch.bool)
        return {"draft_tokens": int64(drafts), "joints": float32(joints), **batch_of}

    return Case(f"best_first_tree/{name}", ("best_first_tree",), run, by_loops)


def _selection(
    name: str, sizes: list[int], budget: int, *, limit: int | None = None, reach: int = 9, padding: int = 0,
    malformed: bool = False,
) -> Case:  # fmt: skip
    parents = [random_tree(b, size, reach).parents.tolist() if size else [] for b, size in enumerate(sizes)]
    rng = np.random.default_rng(len(sizes))
    if malformed:
        parents = [[int(rng.integers(-3, 9)) if rng.random() < 0.3 else parent for parent in tree] for tree in parents]
    values = np.array([0.0, 0.1, 0.1, 0.3, 0.7, 1.0, math.nan, -1.0, math.inf], np.float32)
    survival = torch.from_numpy(rng.choice(values, sum(sizes) + padding))
    cu_nodes, max_nodes = offsets(sizes), max([*sizes, 1])
    max_depth = 3 if malformed else max_nodes - 1

    def trees() -> TreeBatch:
        rows = [parent for tree in parents for parent in tree] + [-1] * padding
        return build_trees(int32(rows), cu_nodes, max_nodes=max_nodes, max_depth=max_depth)

    def run(place: Place) -> Results:
        bound = None if limit is None else place.put(int32([limit]))
        selection, node_map = select_nodes(place.put(trees()), place.put(survival), budget, limit=bound)
        return {**tree_results(selection), "node_map": node_map}

    def by_loops() -> Results:
        batch = trees()
        capacity = budget if limit is None else min(limit, budget)
        selection = loops.select_nodes(
            cu_nodes.tolist(), batch.parents.tolist(), batch.depths.tolist(), survival.tolist(), capacity, max_nodes,
            max_depth,
        )  # fmt: skip
        rows = max(budget, len(sizes))
        fields = linked(selection.parents, rows, max_nodes, max_depth)
        return {**fields, "valid": batch.valid, "node_map": int32(selection.rows + [-1] * (rows - len(selection.rows)))}

    return Case(f"select_nodes/{name}", ("select_nodes",), run, by_loops)
