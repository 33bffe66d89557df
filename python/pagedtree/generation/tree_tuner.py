"""`generate(tree="auto")`: whether a step drafts, and how large a tree, by what steps cost and what was accepted."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagedtree import Draft, DraftTree, choose_tree, select_nodes
from pagedtree.generation.node_budget import BatchNodes, NodeBudget, best_count

__all__ = ["TreeTuner"]

# Drafts may lose this share of the time, where the time of the next HORIZON tokens counts too. Of what they have won,
# MOST_SAVED plain steps may be lost again.
LOSS_SHARE, HORIZON, MOST_SAVED = 0.04, 96, 4.0
# After how many steps with drafts a plain one follows, if none, one or more of these were measured.
PLAIN_AGES = (0, 4, 32)
# A sequence is ahead of the last one if it has less than this share of that one's steps to come. They are estimated by
# the tokens of its last steps with drafts, of which each counts NEWS; before the first, RATE are expected.
AHEAD, NEWS, RATE = 0.75, 0.1, 1.5
# A step that takes so many times as long as others of its kind: the machine was busy with something else.
HICCUP = 2.0
# Before a row of a decoding step was measured, it is taken to cost as much as this many tokens of a prompt.
ROW_TOKENS = 1.5
# What each step with drafts keeps of the older ones' costs; how many rows the guess is taken to be seen at.
KEPT, GUESSED_ROWS = 0.95, 8.0
# The search for the best tree may take this share of the time, and is left out where all levels cost less than CHEAP
# plain steps. The first drafts, which tell what a level costs, are chains of so many levels.
CHOICE_SHARE, CHEAP, FIRST_DEPTH = 0.02, 0.3, 2


@dataclass
class Costs:
    """What steps of about one batch size take, in seconds: without drafts, and what drafts add.

    Attributes:
        row_guess: a guess at what a row adds, for as long as none was measured.
        plain: of the last steps without drafts; plain_seconds: their median.
        since_plain: steps since the last one without drafts. num_drafted: steps with drafts.
        level, once, row: what drafts add to a plain step: each level of the drafter's, whatever the tree, each row.
        tree: the best tree, and until when, by the tuner's clock, it is not looked for again.
        spent, progress: what this call's steps with drafts took, and how many plain steps' tokens they brought.
    """

    row_guess: float
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=15))
    plain_seconds: float = 0.0
    since_plain: int = 0
    num_drafted: int = 0
    level: float = 0.0
    once: float = 0.0
    row: float = 0.0
    tree: DraftTree | None = None
    chosen_until: float = 0.0
    spent: float = 0.0
    progress: float = 0.0
    # Of steps with drafts, older ones counting less: seconds and levels of drafting; how many there are, sums of rows,
    # their squares, seconds that they added, and products of both.
    drafting: tuple[float, float] = (0.0, 0.0)
    sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)

    @property
    def lost(self) -> float:
        """Seconds that drafts have lost in this call, by what is known of plain steps now."""
        return self.spent - self.progress * self.plain_seconds

    def expected(self, levels: float, rows: float) -> float:
        """Seconds of a step with drafts."""
        return self.plain_seconds + self.once + self.level * levels + self.row * rows

    def add_plain(self, seconds: float) -> None:
        self.plain.append(seconds)
        self.plain_seconds = statistics.median_low(self.plain)  # the first one may be slow
        self.since_plain = 0
        if self.num_drafted == 0:
            self._fit()

    def add_drafted(self, levels: float, rows: float, drafting: float, seconds: float) -> None:
        """rows: besides the roots. drafting: what of `seconds` the drafter took."""
        added = seconds - drafting - self.plain_seconds
        self.drafting = KEPT * self.drafting[0] + drafting, KEPT * self.drafting[1] + levels
        news = (1.0, rows, rows * rows, added, rows * added)
        self.sums = tuple(KEPT * old + new for old, new in zip(self.sums, news, strict=True))
        self.num_drafted += 1
        self._fit()

    def _fit(self) -> None:
        """A line through what rows added, as if steps without any and with GUESSED_ROWS had confirmed the guesses."""
        plain, guess = self.plain_seconds, max(self.row_guess, 1e-3 * self.plain_seconds)
        steps, rows, squares, added, products = self.sums
        most = 0.02 * plain + GUESSED_ROWS * guess
        steps, rows, squares = steps + 2.0, rows + GUESSED_ROWS, squares + GUESSED_ROWS**2
        added, products = added + 0.02 * plain + most, products + GUESSED_ROWS * most
        self.row = max((steps * products - rows * added) / (steps * squares - rows * rows), 0.0)
        self.once = max((added - self.row * rows) / steps, 0.0)
        self.level = (self.drafting[0] + 0.025 * plain) / (self.drafting[1] + 0.25)


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
        self.rates: dict[int, float] = {}  # tokens of each sequence in a step with drafts
        self.clock = self.elapsed = 0.0  # seconds of all steps, and of this call's
        self.seconds_of_token = 0.0  # what it takes to read one known token
        self.is_warm = False  # there was a step with drafts
        self.catching_up = 0.0  # seconds that the drafter reads in this step, before it can draft
        self.choosing = 0.0  # seconds of this step that the choice of a tree took
        self.remaining: np.ndarray | None = None  # tokens to come of each sequence; None if others wait for its place
        self.levels: float | None = None  # of this step's tree; None: it is plain
        self.nodes: BatchNodes | None = None  # that were drafted in this step

    def begin(self) -> None:
        """A call of `generate` starts to decode."""
        self.elapsed = 0.0
        for costs in self.costs.values():
            costs.spent = costs.progress = 0.0
        self.budget.of_sequences.clear()
        self.rates.clear()

    def wants_drafts(self, remaining: Mapping[int, int], unread: float = 0.0, others_wait: bool = False) -> bool:
        """Whether the next step shall draft; `tree` then bounds its trees.

        remaining: the index of each sequence of the batch -> tokens that it still has to come. unread: known ones that
        the drafter has to read before it can draft, in tokens of the target. others_wait: whether sequences wait for a
        place in the batch.
        """
        costs = self._costs_of(len(remaining))
        self.levels, self.catching_up = None, unread * self.seconds_of_token
        if costs.since_plain >= PLAIN_AGES[min(len(costs.plain), len(PLAIN_AGES) - 1)]:
            return False
        plain = costs.plain_seconds
        costs.spent = max(costs.spent, (costs.progress - MOST_SAVED) * plain)
        allowance = LOSS_SHARE * (self.elapsed + min(max(remaining.values()), HORIZON) * plain) - self.catching_up
        allowance -= sum(each.lost for each in self.costs.values())
        if allowance <= 0.0:
            return False
        self.remaining = None if others_wait else np.array(list(remaining.values()))
        self.weights = self._weights_of(costs, remaining, others_wait)
        if costs.level * self.max_depth <= CHEAP * plain:
            # Whatever is drafted: a tree that suits most sequences may be too small for those that are easy to guess.
            costs.tree, costs.chosen_until = None, 0.0
        elif not self.is_warm:
            costs.tree = DraftTree.chain(min(self.max_depth, self.max_nodes - 1, FIRST_DEPTH))
        elif self.clock >= costs.chosen_until:
            begin = time.perf_counter()
            costs.tree = self._choose(costs, int((self.weights > 0.5 * self.weights.max()).sum()))
            self.choosing = time.perf_counter() - begin
            costs.chosen_until = self.clock + self.choosing / CHOICE_SHARE
        if costs.tree is not None and costs.tree.num_nodes == 1:
            return False
        depth = self.max_depth if costs.tree is None else costs.tree.max_depth
        if allowance < costs.once + costs.level * depth:
            return False
        self.tree, self.levels = costs.tree, float(depth)
        return True

    def _weights_of(self, costs: Costs, remaining: Mapping[int, int], others_wait: bool) -> np.ndarray:
        """What a token of each sequence is worth, in plain steps; a plain step gives 1 in all.

        A batch is done when its last sequence is. If others will be done before that one, a token of theirs saves only
        what their own rows take. But if more sequences wait for a place, every token counts.
        """
        size = len(remaining)
        if others_wait or size == 1:
            return np.full(size, 1.0 / size)
        steps = np.array([left / self.rates.get(sequence, RATE) for sequence, left in remaining.items()])
        of_row = min(costs.row / costs.plain_seconds, 1.0 / size)
        is_last = steps >= AHEAD * steps.max()
        weights: np.ndarray = of_row + (1.0 - of_row * size) * is_last / is_last.sum()
        return weights

    def _choose(self, costs: Costs, batch_size: int) -> DraftTree:
        """The best tree if so many sequences had the same; the root alone where none pays."""
        plain, once, row = costs.plain_seconds, costs.once, costs.row
        return choose_tree(
            self.budget.acceptance,
            lambda n: plain + (once + batch_size * row * (n - 1) if n > 1 else 0.0),
            max_nodes=self.max_nodes,
            max_depth=self.max_depth,
            level_cost=costs.level,
        )

    def narrow(self, draft: Draft, confidence: Tensor | None, sequences: Sequence[int]) -> tuple[Draft, Tensor | None]:
        """The part of a draft that is worth verifying, and which of its rows that are, None for all.

        confidence: joint log-probabilities [N] of the nodes by the drafter. sequences: the index of each tree's.
        """
        assert self.levels is not None
        self.nodes = None
        if draft.trees.max_nodes <= 1:  # nobody has a guess
            return draft, None
        costs, nodes = self._costs_of(len(sequences)), BatchNodes.of(draft.trees)
        fixed = costs.expected(self.levels, 0.0)
        survival = self.budget.survival(nodes, confidence, sequences)
        worth = survival * self.weights[nodes.tree]
        count = best_count(worth, nodes.depth != 0, lambda count: fixed + costs.row * count)
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

    def observe(self, sequences: Sequence[int], seconds: float, accept_index: Tensor, drafting: float = 0.0) -> None:
        """Takes in a step's seconds, those of the drafter among them, and accept_index [B, S].

        sequences: their indices.
        """
        begin = time.perf_counter()
        costs = self._costs_of(len(sequences))
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
        tokens = (accepted >= 0).sum(axis=1)
        # A batch is done when its last sequence is.
        left = self.remaining
        progress = float(tokens.mean() if left is None else left.max() - max((left - tokens).max(), 0))
        for sequence, found in zip(sequences, tokens.tolist(), strict=True):
            self.rates[sequence] = (1.0 - NEWS) * self.rates.get(sequence, RATE) + NEWS * found
        if not self.is_warm:  # it also pays for what is set up only once
            self.is_warm = True
            seconds = min(seconds, (progress + 2.0) * costs.plain_seconds)
        elif not self.catching_up:
            rows = 0
            if self.nodes is not None:
                rows = len(self.survival if self.kept is None else self.kept) - self.nodes.trees
            if costs.num_drafted > 2:
                seconds = min(seconds, HICCUP * costs.expected(self.levels, rows))
            else:
                costs.chosen_until = 0.0
            costs.add_drafted(self.levels, rows, min(drafting, seconds), seconds)
        costs.spent += seconds
        costs.progress += progress
        if self.nodes is not None:
            self.budget.observe(self.nodes, self.survival, self.kept, accepted)
        costs.spent += time.perf_counter() - begin

    def observe_reading(self, num_tokens: int, seconds: float) -> None:
        """Takes in the seconds of a pass of the target over prompts."""
        self.seconds_of_token = seconds / max(num_tokens, 1)

    def _costs_of(self, batch_size: int) -> Costs:
        """Batches of about the same size cost about the same."""
        bucket = batch_size.bit_length() if batch_size > 4 else -batch_size
        return self.costs.setdefault(bucket, Costs(ROW_TOKENS * self.seconds_of_token))
