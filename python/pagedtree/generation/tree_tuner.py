"""`generate(tree="auto")`: whether a step drafts, and how large a tree, by what steps cost and what was accepted."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagedtree import Draft, DraftTree, choose_tree, select_nodes
from pagedtree.generation.node_budget import BatchNodes, NodeBudget, best_count

__all__ = ["TreeTuner"]

# Drafts may lose this share of the time, where the time of the next HORIZON tokens counts too. Of what they have won,
# MOST_SAVED plain steps may be lost again.
LOSS_SHARE, HORIZON, MOST_SAVED = 0.025, 96, 4.0
# After how many steps with drafts a plain one follows, if none, one or more of these were measured.
PLAIN_AGES = (0, 8, 64)
# A sequence is ahead of the last one if it has less than this share of that one's tokens to come.
AHEAD = 0.75
# A step that takes so many times as long as others of its kind: the machine was busy with something else.
HICCUP = 2.0
# Before a row of a decoding step was measured, it is taken to cost as much as this many tokens of a prompt. So many
# steps with drafts come first to learn what they cost: they may take what drafts may lose.
ROW_TOKENS, PROBES = 1.5, 2
# The search for the best tree may take this share of the time, and is left out where drafts cost less than CHEAP plain
# steps. The first drafts have at most so many levels.
CHOICE_SHARE, CHEAP, PROBE_DEPTH = 0.01, 0.15, 3


@dataclass
class Costs:
    """What steps of about one batch size take, in seconds: without drafts, and what drafts add.

    Attributes:
        row: a guess at what a row adds, for as long as none was measured.
        plain: of the last steps without drafts. drafted: (levels, rows besides the roots, seconds) of the last with.
        since_plain: steps since the last one without drafts.
        tree: the best tree, and until when, by the tuner's clock, it is not looked for again.
        plain_seconds: the median of `plain`. added: what drafts add to it, whatever the tree; each level; each row.
        spent, progress: what this call's steps with drafts took, and how many plain steps' tokens they brought.
    """

    row: float
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=15))
    drafted: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=48))
    since_plain: int = 0
    tree: DraftTree | None = None
    chosen_until: float = 0.0
    plain_seconds: float = 0.0
    added: tuple[float, ...] = (0.0, 0.0, 0.0)
    spent: float = 0.0
    progress: float = 0.0

    @property
    def lost(self) -> float:
        """Seconds that drafts have lost in this call, by what is known of plain steps now."""
        return self.spent - self.progress * self.plain_seconds

    def add_plain(self, seconds: float) -> None:
        self.plain.append(seconds)
        self.plain_seconds = statistics.median(self.plain)
        self.since_plain = 0
        if not self.drafted:
            self.added = 0.02 * self.plain_seconds, 0.1 * self.plain_seconds, max(self.row, 1e-3 * self.plain_seconds)

    def add_drafted(self, levels: float, rows: float, seconds: float) -> None:
        """Fits `added` anew: least squares, drawn towards guesses where few shapes were seen."""
        self.drafted.append((levels, rows, seconds))
        plain = self.plain_seconds
        guess = np.array([0.02 * plain, 0.1 * plain, max(self.row, 1e-3 * plain)])
        each = np.array(self.drafted)
        features = np.concatenate([np.ones((len(each), 1)), each[:, :2]], axis=1) * guess
        missing = each[:, 2].clip(max=HICCUP * np.median(each[:, 2])) - plain - features.sum(axis=1)
        noise = max(statistics.pstdev(self.plain), 0.05 * plain)
        left = features.T @ features + noise**2 * np.eye(3)
        self.added = tuple((guess * (1.0 + np.linalg.solve(left, features.T @ missing))).clip(min=0.0).tolist())


class TreeTuner:
    """Decides whether the next step drafts, with which tree at most, and which of the drafted nodes are verified.

    The first steps are plain: their time per token is what drafts have to beat. Then drafts are tried, since only that
    tells what they bring. A tree is the best one for what was accepted so far and for the time of levels and rows
    (`choose_tree`); of the batch's nodes those are verified that are worth their time (`NodeBudget`), which may be
    none. What steps with drafts lose against plain ones is counted; while that is more than LOSS_SHARE of the time
    there are no drafts. What was learnt stays with the drafter for further calls, and fades while nothing is drafted.

    max_nodes, max_depth: the most nodes of a tree, the root included, and its most levels.
    """

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        self.max_nodes, self.max_depth = max_nodes, max(max_depth, 1)
        self.costs: dict[int, Costs] = {}
        self.budget = NodeBudget()
        self.clock = self.elapsed = 0.0  # seconds of all steps, and of this call's
        self.seconds_of_token = 0.0  # what it takes to read one known token
        self.is_warm = False  # there was a step with drafts
        self.catching_up = 0.0  # seconds that the drafter reads in this step, before it can draft
        self.choosing = 0.0  # seconds of this step that the choice of a tree took
        self.allowance = 0.0  # seconds that the rows of this step's drafts may lose
        self.levels: float | None = None  # of this step's tree; None: it is plain

    def begin(self) -> None:
        """A call of `generate` starts to decode."""
        self.elapsed = 0.0
        for costs in self.costs.values():
            costs.spent = costs.progress = 0.0
        self.budget.of_sequences.clear()

    def wants_drafts(self, remaining: Sequence[int], unread: float = 0.0, others_wait: bool = False) -> bool:
        """Whether the next step shall draft; `tree` then bounds its trees.

        remaining: tokens that each sequence of the batch still has to come. unread: known ones that the drafter has to
        read before it can draft, in tokens of the target. others_wait: whether sequences wait for a place in the batch.
        """
        costs = self._costs_of(len(remaining))
        self.levels, self.catching_up = None, unread * self.seconds_of_token
        if costs.since_plain >= PLAIN_AGES[min(len(costs.plain), len(PLAIN_AGES) - 1)]:
            return False
        plain = costs.plain_seconds
        costs.spent = max(costs.spent, (costs.progress - MOST_SAVED) * plain)
        allowance = LOSS_SHARE * (self.elapsed + min(max(remaining), HORIZON) * plain) - self.catching_up
        allowance -= sum(each.lost for each in self.costs.values())
        if allowance <= 0.0:
            return False
        self.weights = self._weights_of(costs, remaining, others_wait)
        if self.clock >= costs.chosen_until:
            begin = time.perf_counter()
            costs.tree = self._choose(costs, int((self.weights > 0.5 * self.weights.max()).sum()))
            self.choosing = time.perf_counter() - begin
            costs.chosen_until = self.clock + self.choosing / CHOICE_SHARE
        if costs.tree is not None and costs.tree.num_nodes == 1:
            return False
        depth = self.max_depth if costs.tree is None else costs.tree.max_depth
        self.allowance = allowance - (costs.added[0] + costs.added[1] * depth)
        if self.allowance < 0.0:
            return False
        self.tree, self.levels = costs.tree, float(depth)
        return True

    @staticmethod
    def _weights_of(costs: Costs, remaining: Sequence[int], others_wait: bool) -> np.ndarray:
        """What a token of each sequence is worth, in plain steps; a plain step gives 1 in all.

        A batch is done when its last sequence is. If other sequences are ahead of that one, this saves only what their
        own rows take. But if more sequences wait for a place, every token counts.
        """
        left = np.array(remaining)
        if others_wait:
            return np.full(len(left), 1.0 / len(left))
        of_row = min(costs.added[2] / costs.plain_seconds, 1.0 / len(left))
        is_last = left >= AHEAD * left.max()
        weights: np.ndarray = of_row + (1.0 - of_row * len(left)) * is_last / is_last.sum()
        return weights

    def _choose(self, costs: Costs, batch_size: int) -> DraftTree | None:
        """The best tree if so many sequences had the same, the root alone where none pays; None: whatever is drafted.

        That is for drafters to whom nodes and levels cost next to nothing: few sequences may be easy to guess.
        """
        plain, (once, level, row) = costs.plain_seconds, costs.added
        if once + level * self.max_depth <= CHEAP * plain:
            return None
        return choose_tree(
            self.budget.acceptance,
            lambda n: plain + (once + batch_size * row * (n - 1) if n > 1 else 0.0),
            max_nodes=self.max_nodes,
            # What a level costs is a guess before the first drafts.
            max_depth=self.max_depth if costs.drafted else min(self.max_depth, PROBE_DEPTH),
            level_cost=level,
        )

    def narrow(self, draft: Draft, confidence: Tensor | None, sequences: Sequence[int]) -> tuple[Draft, Tensor | None]:
        """The part of a draft that is worth verifying, and which of its rows that are, None for all.

        confidence: joint log-probabilities [N] of the nodes by the drafter. sequences: the index of each tree's.
        """
        assert self.levels is not None
        costs, nodes = self._costs_of(len(sequences)), BatchNodes.of(draft.trees)
        once, level, row = costs.added
        fixed = costs.plain_seconds + once + level * self.levels
        survival = self.budget.survival(nodes, confidence, sequences)
        worth = survival * self.weights[nodes.tree]
        count = best_count(worth, nodes.depth != 0, lambda count: fixed + row * count)
        if len(costs.drafted) < PROBES:
            count = max(count, nodes.trees + int(self.allowance / max(row, 1e-9)))
        self.nodes, self.survival, self.kept = nodes, survival, None
        if count >= len(survival):
            return draft, None
        trees, rows = select_nodes(draft.trees, torch.from_numpy(worth).float().to(draft.trees.device), count)
        kept = rows.cpu().numpy()
        self.kept = kept[kept >= 0]  # the others are padding
        tokens, draft_rows, node_map = (
            None if values is None else values[rows.clamp(min=0).long()]
            for values in (draft.draft_tokens, draft.draft_rows, draft.node_map)
        )
        assert tokens is not None
        return Draft(tokens, trees, draft.draft_probs, draft_rows, node_map), rows

    def observe(self, remaining: Sequence[int], seconds: float, accept_index: Tensor) -> None:
        """Takes in a step's seconds and accept_index [B, S]. remaining: as it was before the step."""
        costs = self._costs_of(len(remaining))
        self.clock += seconds
        self.elapsed += seconds
        costs.spent += self.choosing
        seconds, self.choosing = seconds - self.choosing, 0.0
        if self.levels is None:
            costs.add_plain(seconds)
            self.budget.fade()
            return
        costs.since_plain += 1
        accepted = accept_index.cpu().numpy()
        progress = float(((accepted >= 0).sum(axis=1) * self.weights).sum())
        plain = costs.plain_seconds
        if not self.is_warm:  # it also pays for what is set up only once
            self.is_warm = True
            seconds = min(seconds, (progress + 2.0) * plain)
        elif not self.catching_up:
            rows = len(self.survival if self.kept is None else self.kept) - self.nodes.trees
            if len(costs.drafted) > 2:
                once, level, row = costs.added
                seconds = min(seconds, HICCUP * (plain + once + level * self.levels + row * rows))
            else:
                costs.chosen_until = 0.0
            costs.add_drafted(self.levels, rows, seconds)
        costs.spent += seconds
        costs.progress += progress
        self.budget.observe(self.nodes, self.survival, self.kept, accepted)

    def observe_reading(self, num_tokens: int, seconds: float) -> None:
        """Takes in the seconds of a pass of the target over prompts."""
        self.seconds_of_token = seconds / max(num_tokens, 1)

    def _costs_of(self, batch_size: int) -> Costs:
        """Batches of about the same size cost about the same."""
        bucket = batch_size.bit_length() if batch_size > 4 else -batch_size
        return self.costs.setdefault(bucket, Costs(ROW_TOKENS * self.seconds_of_token))
