"""`generate(tree="auto")`: which tree to draft, or none, from what steps cost and what was accepted so far."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from pagedtree import DraftTree, TreeBatch, choose_tree, expected_tokens

__all__ = ["TreeTuner"]

# Share of the time, the next tokens' included, that may be lost to drafts that do not pay.
LOSS_SHARE, HORIZON = 0.015, 128
# A tree must promise to be so much faster than plain decoding.
MIN_GAIN = 0.02
# Steps of plain decoding before the first drafts, and how many steps its measure is good for.
PLAIN_STEPS, PLAIN_AGE = 3, 64
MAX_DEPTH, MAX_RANKS = 8, 4
# Steps with drafts before an estimate is trusted, and their trees.
PROBES, PROBE_NODES = 4, 4
# A step that takes so many times as long as others of its kind: the machine did something else.
HICCUP = 2.0
# Evidence fades, so that a change of the text shows; before there is any, each first choice is right half the time.
DISCOUNT = 0.995
# Share of the time that goes into rehearsals, and the tokens of a step that they must promise before a real try.
REHEARSAL_SHARE, PROMISE = 0.004, 1.2
PRIOR = 0.5 * 0.4 ** np.arange(MAX_RANKS)
PRIOR_WEIGHT = 2.0


@dataclass
class Costs:
    """What is known of one batch size.

    plain: seconds of steps without drafts, plain_seconds their median. drafted: nodes of a tree, depth, seconds; model:
    fitted to them, seconds of a drafted step: a constant, a node's, a level's. chosen_from: the evidence at the last
    choice. probes: steps with drafts to try before the next choice counts, with the tree `probe`; probe_loss: seconds
    that one may lose. tree: the choice, None = plain decoding; gain: the seconds that it saves a token.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=9))
    plain_seconds: float = 0.0
    drafted: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=48))
    since_plain: int = 0
    steps: int = 0
    next_choice: int = 0
    chosen_from: int = -1
    probes: int = PROBES
    probe: DraftTree | None = None
    probe_loss: float = 0.0
    model: tuple[float, float, float] | None = None
    tree: DraftTree | None = None
    gain: float = 0.0

    def fit(self) -> None:
        nodes, depths, seconds = np.array(self.drafted).T
        seconds = seconds.clip(max=HICCUP * np.median(seconds))
        features = np.stack([np.ones_like(nodes), nodes - 1, depths], axis=1)
        scale = seconds.mean()
        # Where few shapes were tried, a node and a level are taken to cost little rather than nothing.
        ridge, guess = 0.1, np.array([1.0, 0.01, 0.05])
        left = features.T @ features / len(seconds) + ridge * np.eye(3)
        right = features.T @ (seconds / scale) / len(seconds) + ridge * guess
        constant, node, level = np.linalg.solve(left, right) * scale
        self.model = max(float(constant), 1e-9), max(float(node), 0.0), max(float(level), 0.0)

    def seconds(self, num_nodes: float, depth: float) -> float:
        assert self.model is not None
        constant, node, level = self.model
        return constant + node * (num_nodes - 1) + level * depth


class TreeTuner:
    """Chooses the tree of each step by `choose_tree`, and sees to it that drafts do not cost more than they bring.

    It starts with plain decoding, whose time a token is what drafts have to beat, and tries a small tree. What drafted
    steps lose against plain ones is counted, also where an estimate was wrong: no drafts while the loss exceeds 1.5 %
    of the time. Of the very first step with drafts, which pays for what is set up once, no more than a plain step
    counts. What was learnt stays with the drafter for further calls. A drafter that guesses for next to nothing
    rehearses while there is plain decoding: its guesses in the known text are compared with how that went on.

    max_nodes, max_depth: the most nodes of a tree, the root included, and its most levels.
    """

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        self.max_nodes, self.max_depth = max_nodes, max(min(max_depth, MAX_DEPTH), 1)
        self.costs: dict[int, Costs] = {}
        self.hits = PRIOR_WEIGHT * np.tile(PRIOR, (MAX_DEPTH, 1))
        self.trials = np.full((MAX_DEPTH, MAX_RANKS), PRIOR_WEIGHT)
        self.evidence = 0  # how many times something was counted
        self.is_catching_up = False
        self.is_warm = False  # after the first step with drafts
        self.elapsed = self.lost = 0.0  # seconds of all steps; what those with drafts took longer than plain ones
        self.choosing = 0.0  # seconds of the step that went into choice and rehearsal
        self.seconds_of_token = 0.0  # to read a known token
        self.rehearsal = 0.0  # seconds of the last one; infinite: the drafter has none
        self.since_rehearsal = 0.0

    @property
    def acceptance(self) -> np.ndarray:
        """[depth, rank]: how often a node is accepted where its parent was."""
        rates = self.hits / self.trials
        return rates / np.maximum(rates.sum(axis=1, keepdims=True), 1.0)

    def next_tree(self, batch_size: int, *, remaining: int, unread: float = 0.0) -> DraftTree | None:
        """The tree for the next step of that many sequences; None: plain decoding.

        remaining: tokens that a sequence still has to come. unread: known ones that the drafter has to read before it
        can draft, in tokens of the target.
        """
        costs = self.costs.setdefault(_bucket(batch_size), Costs())
        self.is_catching_up = unread > 0
        if len(costs.plain) < PLAIN_STEPS or costs.since_plain >= PLAIN_AGE:
            return None
        allowance = LOSS_SHARE * (self.elapsed + min(remaining, HORIZON) * costs.plain_seconds) - self.lost
        if allowance <= 0.0:
            return None
        if costs.steps >= costs.next_choice and costs.chosen_from != self.evidence:
            begin = time.perf_counter()
            self._choose(costs, batch_size)
            costs.chosen_from = self.evidence
            costs.next_choice = costs.steps + min(max(costs.steps // 4, 4), 64)
            self.choosing += time.perf_counter() - begin
        catching_up = unread * self.seconds_of_token
        if costs.probes > 0:
            assert costs.probe is not None
            if 0.0 < self.rehearsal < math.inf and expected_tokens(costs.probe, self.acceptance) < PROMISE:
                return None
            return costs.probe if costs.probe_loss + catching_up <= allowance else None
        # What the drafter has to read first is an investment, into the tokens that are still to come.
        return costs.tree if catching_up <= costs.gain * remaining else None

    def observe(self, batch_size: int, seconds: float, trees: TreeBatch, accept_index: Tensor) -> None:
        """A step of that many sequences took so long; trees and accept_index [B, S] of its verdict."""
        costs = self.costs.setdefault(_bucket(batch_size), Costs())
        costs.steps += 1
        self.elapsed += seconds
        self.since_rehearsal += seconds
        # The first choice sets things up.
        self.lost += min(self.choosing, costs.plain_seconds)
        seconds, self.choosing = seconds - self.choosing, 0.0
        if trees.max_nodes == 1:
            costs.plain.append(seconds)
            costs.plain_seconds = statistics.median(costs.plain)
            costs.since_plain = 0
            return
        costs.since_plain += 1
        if not self.is_warm:
            self.is_warm = True
            self.lost += min(max(seconds - costs.plain_seconds, 0.0), costs.plain_seconds)
            return
        costs.probes -= costs.probes > 0
        if not self.is_catching_up:
            nodes, depth = trees.parents.shape[0] / max(batch_size, 1), float(trees.depths.max())
            costs.drafted.append((nodes, depth, seconds))
            if costs.model is not None:
                seconds = min(seconds, HICCUP * costs.seconds(nodes, depth))
            elif len(costs.drafted) > 2:
                seconds = min(seconds, HICCUP * statistics.median(taken for _, _, taken in costs.drafted))
        self._count(trees, accept_index.tolist())
        if costs.plain:
            gained = float((accept_index >= 0).sum()) / max(batch_size, 1)
            # What drafts won is no reason to lose much of it later.
            self.lost = max(self.lost + seconds - gained * costs.plain_seconds, -2 * costs.plain_seconds)

    def observe_reading(self, num_tokens: int, seconds: float) -> None:
        """A pass of the target over prompts took so long."""
        self.seconds_of_token = seconds / max(num_tokens, 1)

    @property
    def may_rehearse(self) -> bool:
        """Whether rehearsals have not taken more than their share."""
        return self.since_rehearsal * REHEARSAL_SHARE >= self.rehearsal

    def cannot_rehearse(self) -> None:
        self.rehearsal = math.inf

    def observe_rehearsal(self, drafts: list[int], trees: TreeBatch, texts: list[list[int]], begin: float) -> None:
        """Trees of those draft tokens were guessed where the texts followed; it began at that time."""
        first_child, next_sibling = trees.first_child.tolist(), trees.next_sibling.tolist()
        paths = []
        for offset, text in zip(trees.cu_nodes.tolist(), texts, strict=False):
            path = [0]
            for token in text:
                child = first_child[offset + path[-1]]
                while child >= 0 and drafts[offset + child] != token:
                    child = next_sibling[offset + child]
                if child < 0:
                    break
                path.append(child)
            paths.append(path)
        self._count(trees, paths)
        self.rehearsal, self.since_rehearsal = time.perf_counter() - begin, 0.0
        self.choosing += self.rehearsal

    def _choose(self, costs: Costs, batch_size: int) -> None:
        acceptance, plain = self.acceptance, costs.plain_seconds
        node_seconds = batch_size * self.seconds_of_token  # of a node in all trees, if reading is bound by arithmetic
        probe_nodes = min(PROBE_NODES if (PROBE_NODES - 1) * node_seconds <= plain else 2, self.max_nodes)
        costs.probe = choose_tree(acceptance, lambda n: 1.0, max_nodes=probe_nodes, max_depth=self.max_depth)
        costs.tree, costs.gain = None, 0.0
        if not costs.drafted:
            costs.probe_loss = max(node_seconds * (probe_nodes - 1), 0.5 * plain)
            return
        costs.fit()
        costs.probe_loss = max(costs.seconds(costs.probe.num_nodes, costs.probe.max_depth) - plain, 0.0)
        tree = choose_tree(
            acceptance,
            lambda n: costs.seconds(n, 0) if n > 1 else plain * (1 - MIN_GAIN),
            max_nodes=self.max_nodes,
            max_depth=self.max_depth,
            level_cost=costs.seconds(1, 1) - costs.seconds(1, 0),
        )
        if tree.num_nodes > 1:
            seconds = costs.seconds(tree.num_nodes, tree.max_depth)
            costs.tree, costs.gain = tree, plain - seconds / expected_tokens(tree, acceptance)
        else:
            costs.probes = max(costs.probes, 1)  # to see later whether that is still so

    def _count(self, trees: TreeBatch, paths: list[list[int]]) -> None:
        """Enters which children of the accepted nodes were accepted."""
        self.evidence += 1
        self.hits = DISCOUNT * self.hits + (1 - DISCOUNT) * PRIOR_WEIGHT * PRIOR
        self.trials = DISCOUNT * self.trials + (1 - DISCOUNT) * PRIOR_WEIGHT
        first_child, next_sibling = trees.first_child.tolist(), trees.next_sibling.tolist()
        for offset, path in zip(trees.cu_nodes.tolist(), paths, strict=False):
            if first_child[offset] < 0:  # the drafter had no idea
                self.trials[0] += 1
                continue
            accepted = set(path)
            for depth, node in enumerate(path[:MAX_DEPTH]):
                if node < 0:
                    break
                child, rank = first_child[offset + node], 0
                while child >= 0 and rank < MAX_RANKS:
                    self.trials[depth, rank] += 1
                    self.hits[depth, rank] += child in accepted
                    child, rank = next_sibling[offset + child], rank + 1


def _bucket(batch_size: int) -> int:
    """Batches of about the same size cost about the same."""
    return batch_size.bit_length() if batch_size > 4 else -batch_size
