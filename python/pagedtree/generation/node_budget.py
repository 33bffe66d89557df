"""Which nodes of a batch's trees the target verifies: those whose chance to be accepted is worth their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pagedtree import TreeBatch

__all__ = ["BatchNodes", "NodeBudget"]

MAX_DEPTH, MAX_RANKS = 8, 4
# What each step keeps of the older evidence, so that a change of the text shows; and what is taken to be known before.
KEPT, PRIOR_WEIGHT = 0.95, 2.0
# How often the child of each rank is accepted where its parent was, before anything is known.
PRIOR = 0.6 * 0.35 ** np.arange(MAX_RANKS)
# How much of the evidence about one sequence a step keeps, and how many nodes are taken to be as easy as others'.
EASE_KEPT, EASE_WEIGHT = 0.9, 2.0
# No node is more likely than this where its parent was accepted.
MOST_LIKELY = 0.97
# Nodes of about the same log-probability, given their parents, are right about equally often; the bins' edges.
EDGES = -np.array([0.05, 0.15, 0.3, 0.5, 0.8, 1.2, 1.7, 2.3, 3.0, 4.0, 6.0])
EXPECTED = np.exp([0.0, *(EDGES[:-1] + EDGES[1:]) / 2, -5.0, -7.0])


@dataclass
class BatchNodes:
    """The N nodes of a batch as arrays on the host, row for row.

    Attributes:
        trees: how many trees there are. tree: each node's. parent: the parent's row; a root's is its own.
        depth, rank: below the root, and among its siblings; a root's are 0.
    """

    trees: int
    tree: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    rank: np.ndarray

    @classmethod
    def of(cls, trees: TreeBatch) -> BatchNodes:
        offsets, parents, depths = (t.cpu().numpy() for t in (trees.cu_nodes, trees.parents, trees.depths))
        count = offsets[-1]
        parents, depth = parents[:count], depths[:count]
        tree = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        parent = np.where(parents < 0, np.arange(count), offsets[tree] + parents)
        # Siblings come in the order of their ranks; a root is its own parent, before its children.
        order = np.argsort(parent, kind="stable")
        parents = parent[order]
        rank = np.empty(count, dtype=np.int64)
        rank[order] = np.arange(count) - np.searchsorted(parents, parents)
        rank -= (depth > 0) & (depth[parent] == 0)
        return cls(len(offsets) - 1, tree, parent, depth, np.minimum(rank, MAX_RANKS - 1))

    def along_paths(self, edges: np.ndarray) -> np.ndarray:
        """[N]: the sum of `edges` over each node's path from the root on."""
        sums = np.where(self.depth > 0, edges, 0.0)
        for depth in range(1, int(self.depth.max(initial=0)) + 1):
            rows = np.flatnonzero(self.depth == depth)
            sums[rows] += sums[self.parent[rows]]
        return sums


class NodeBudget:
    """Estimates which drafted nodes survive, from what was accepted before, and how many of them pay.

    How likely a node is where its parent was accepted comes from the drafter's own log-probability of that step
    (`Drafter.confidence`), corrected by how often nodes of about the same one were right, or from how often nodes of
    its depth and rank were. Both are counted at all children of accepted nodes, verified or not: each was right if its
    token is the one that came. What a sequence accepts beside what was expected of it makes it easy or hard to guess.
    """

    def __init__(self) -> None:
        self.hits, self.trials = PRIOR_WEIGHT * np.tile(PRIOR, (MAX_DEPTH, 1)), np.full((MAX_DEPTH, MAX_RANKS), 2.0)
        self.right, self.drafted = PRIOR_WEIGHT * EXPECTED, np.full(len(EXPECTED), PRIOR_WEIGHT)
        self.of_sequences: dict[int, tuple[float, float]] = {}  # accepted and expected nodes
        self.faded = 0  # steps that have told nothing since the last that did

    @property
    def acceptance(self) -> np.ndarray:
        """[depth, rank]: how often a node is accepted where its parent was."""
        self._forget()
        rates: np.ndarray = self.hits / self.trials
        return rates / np.maximum(rates.sum(axis=1, keepdims=True), 1.0)

    def survival(self, nodes: BatchNodes, confidence: Tensor | None, sequences: Sequence[int]) -> np.ndarray:
        """[N]: how likely each node is on the accepted path; 1 at roots, 0 where a row has no node.

        sequences: the index of each tree's.
        """
        self._forget()
        self._sequences, self._bins = sequences, None
        if confidence is not None:
            joint = confidence[: len(nodes.depth)].cpu().numpy()
            self._bins = np.searchsorted(-EDGES, joint[nodes.parent] - joint)
            self._rates = (self.right / self.drafted)[self._bins]
        else:
            # Of siblings the first ones stay: those drawn without replacement must not lose one before them.
            rates = np.minimum.accumulate(self.acceptance, axis=1)
            self._rates = rates[nodes.depth.clip(1, MAX_DEPTH) - 1, nodes.rank]
        ease = np.array([(hits + EASE_WEIGHT) / (hoped + EASE_WEIGHT) for hits, hoped in map(self._known, sequences)])
        likely = np.clip(self._rates * ease[nodes.tree], 1e-6, MOST_LIKELY)
        return np.where(nodes.depth > 0, np.exp(nodes.along_paths(np.log(likely))), nodes.depth == 0)

    def fade(self) -> None:
        """A step has told nothing: older evidence counts a little less."""
        self.faded += 1

    def _forget(self) -> None:
        share, self.faded = 1.0 - KEPT**self.faded, 0
        if share > 0.0:
            for found, tried, rates in ((self.hits, self.trials, PRIOR), (self.right, self.drafted, EXPECTED)):
                found += share * (PRIOR_WEIGHT * rates - found)
                tried += share * (PRIOR_WEIGHT - tried)

    def observe(
        self,
        nodes: BatchNodes,
        draft_tokens: np.ndarray,
        kept: np.ndarray | None,
        accept_index: np.ndarray,
        tokens: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Counts what became of the nodes that `survival` was asked about last. Returns for each tree how many of them
        were compared with the token that came, and how many were right.

        draft_tokens: [N]. kept: the rows that were verified, None for all. accept_index, tokens: [B, S], the accepted
        nodes of each kept tree, and the token that came behind each.
        """
        self.fade()
        self._forget()
        rows = np.arange(len(nodes.depth)) if kept is None else kept
        first = np.searchsorted(nodes.tree[rows], np.arange(nodes.trees))
        trees, steps = np.nonzero(accept_index >= 0)
        came = np.full(len(nodes.depth), -1, dtype=np.int64)
        came[rows[first[trees] + accept_index[trees, steps]]] = tokens[trees, steps]
        came = came[nodes.parent]
        tried = np.flatnonzero((nodes.depth > 0) & (came >= 0))
        right = draft_tokens[tried] == came[tried]
        if self._bins is not None:
            np.add.at(self.drafted, self._bins[tried], 1.0)
            np.add.at(self.right, self._bins[tried], right)
        compared, found = (np.bincount(nodes.tree[tried], which, nodes.trees) for which in (None, right))
        expected = np.bincount(nodes.tree[tried], self._rates[tried], nodes.trees)
        for i, sequence in enumerate(self._sequences):
            hits, hoped = self._known(sequence)
            self.of_sequences[sequence] = EASE_KEPT * hits + float(found[i]), EASE_KEPT * hoped + float(expected[i])
        is_in_table = nodes.depth[tried] <= MAX_DEPTH
        tried, right = tried[is_in_table], right[is_in_table]
        at = nodes.depth[tried] - 1, nodes.rank[tried]
        np.add.at(self.trials, at, 1.0)
        np.add.at(self.hits, at, right)
        return compared, found

    def _known(self, sequence: int) -> tuple[float, float]:
        return self.of_sequences.get(sequence, (0.0, 0.0))


def best_count(worth: np.ndarray, is_draft: np.ndarray, seconds: Callable[[np.ndarray], np.ndarray]) -> int:
    """How many rows, all roots among them, get the most done in a second.

    worth: [N] what a node is worth if it is accepted, times how likely that is. is_draft: bool [N], False at roots.
    seconds: of a step by how many nodes it has besides the roots.
    """
    gains = np.concatenate([[0.0], np.cumsum(np.sort(worth[is_draft])[::-1])])
    most = int(np.argmax((worth[~is_draft].sum() + gains) / seconds(np.arange(len(gains)))))
    return len(worth) - len(gains) + 1 + most
