"""Simulated machines for the tree tuner, decoding in no time."""

from __future__ import annotations

import itertools
import time
from functools import cache
from unittest.mock import patch

import numpy as np
import torch

from pagedtree import Draft, DraftTree, TreeBatch
from pagedtree.generation.drafters import medusa_tree
from pagedtree.generation.tree_tuner import Outcome, TreeTuner


class Machine:
    """Steps take `plain` seconds, plus costs per row and level; children are accepted at random.

    Acceptance at a position ignores earlier steps, so a text can be generated in several ways.
    """

    def __init__(self, acceptance, *, plain=1.0, row=0.01, level=0.05, noise=0.0, batch=1, seed=0):
        self.acceptance, self.plain, self.row, self.level = acceptance, plain, row, level
        self.noise, self.batch, self.rng = noise, batch, np.random.default_rng(seed)
        self.text = self.rng.random((batch, 2000))

    def target(self, drafted: int, size: int) -> float:
        """Returns a pass's seconds over `drafted` rows of `size` sequences."""
        return self.plain + self.row * drafted

    def drafting(self, levels: int, size: int) -> float:
        return self.level * levels

    def end_of(self, sequence: int, tokens: int) -> int:
        """Returns a sequence's end, at most `tokens`."""
        return tokens

    def confidence(self) -> torch.Tensor | None:
        return None

    def draft(self, tree: DraftTree, places: dict[int, int]) -> Draft:
        """places: each sequence's number of tokens."""
        trees = TreeBatch.from_trees([tree] * len(places), max_nodes=tree.num_nodes)
        return Draft(ranks_of(trees), trees)

    def path(self, draft: Draft, b: int, sequence: int, place: int) -> tuple[list[int], list[int]]:
        """Returns accepted nodes, and the token after each; draft tokens are ranks."""
        begin, end = draft.trees.cu_nodes[b : b + 2].tolist()
        parents, ranks = draft.trees.parents[begin:end].tolist(), draft.draft_tokens[begin:end].tolist()
        rates = np.cumsum(self.acceptance)
        path, tokens = [0], []
        while True:
            rank = int(np.searchsorted(rates, self.text[sequence, place + len(path) - 1], side="right"))
            tokens.append(rank if rank < len(rates) else 1000)  # never drafted
            child = [n for n, parent in enumerate(parents) if parent == path[-1] and ranks[n] == tokens[-1]]
            if not child:
                return path, tokens
            path += child


ROOT, WHOLE = DraftTree.chain(0), medusa_tree(5, 16)
MOST_LEVELS = 32


def ranks_of(trees: TreeBatch) -> torch.Tensor:
    """Returns each node's rank among siblings."""
    ranks, offsets = torch.zeros_like(trees.parents), trees.cu_nodes.tolist()
    for begin, end in itertools.pairwise(offsets):
        for node, sibling in enumerate(trees.next_sibling[begin:end].tolist()):
            if sibling >= 0:
                ranks[begin + sibling] = ranks[begin + node] + 1
    return ranks.long()


@patch.object(time, "perf_counter", lambda: 0.0)  # excludes the tuner's real time
def run(machine: Machine, tuner: TreeTuner | None, tokens: int, whole: DraftTree = WHOLE) -> tuple[float, list[int]]:
    """Returns seconds until all have `tokens`, and each step's rows without roots. Without a tuner steps have the whole
    tree."""
    seconds, rows = 0.0, []
    places = dict.fromkeys(range(machine.batch), 0)
    if tuner is not None:
        tuner.begin()
    while places:
        plan = selection = None
        tree = whole
        if tuner is not None:
            plan = tuner.plan([tokens - place for place in places.values()])
            tree = limited(whole, plan.depth) if plan.depth is not None else ROOT
        draft, levels = machine.draft(tree, places), tree.max_depth
        if plan is not None and plan.depth is not None:
            selection = plan.keep(draft, machine.confidence())
            draft = selection.draft
        paths, texts = zip(*(machine.path(draft, b, *entry) for b, entry in enumerate(places.items())), strict=True)
        accepted, tokens_after = (torch.full((len(paths), 1 + MOST_LEVELS), -1, dtype=torch.int32) for _ in range(2))
        for b, (path, text) in enumerate(zip(paths, texts, strict=True)):
            accepted[b, : len(path)], tokens_after[b, : len(path)] = torch.tensor(path), torch.tensor(text)
        rows.append(int(draft.trees.cu_nodes[-1]) - len(paths))
        drafting, noise = machine.drafting(levels, len(paths)), 1 + machine.noise * machine.rng.standard_exponential()
        took = (machine.target(rows[-1], len(paths)) + drafting) * noise
        if tuner is not None:
            tuner.learn(plan, Outcome(took, accepted, tokens_after, drafting, selection))
        seconds += took
        reached = {s: place + len(path) for (s, place), path in zip(places.items(), paths, strict=True)}
        places = {s: place for s, place in reached.items() if place < machine.end_of(s, tokens)}
    return seconds, rows


@cache
def limited(tree: DraftTree, levels: int) -> DraftTree:
    """Cuts the tree below a level; nodes are ordered by depth."""
    return DraftTree(tree.parents[tree.depths <= levels])


def fresh(machine: Machine, depth: int = WHOLE.max_depth) -> TreeTuner:
    tuner = TreeTuner(depth, grows_by_level=True)
    tuner.learn_reading(100, 100 * machine.row / 2)
    return tuner
