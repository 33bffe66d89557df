"""`generate(tree="auto")`: whether a step drafts, and how large a tree, by what steps cost and what was accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pagedtree import Draft, DraftTree, choose_tree, select_nodes
from pagedtree.generation.node_budget import BatchNodes, NodeBudget, best_count
from pagedtree.generation.step_costs import StepCosts

__all__ = ["TreeTuner"]

# Drafts may lose this share of the time, where the time of the next HORIZON tokens counts too. Of what they have won,
# MOST_SAVED plain steps may be lost again.
LOSS_SHARE, HORIZON, MOST_SAVED = 0.03, 96, 4.0
# While drafts have lost too much, this share of the time goes into looks: guesses that are only compared with the
# tokens that come. They are verified where they promise so many times plain decoding's speed.
LOOK_SHARE, PROMISING = 0.01, 1.1
# After how many steps with drafts a plain one follows, if none, one or more of these were measured.
PLAIN_AGES = (0, 4, 32)
# A sequence is ahead of the last one if it has less than this share of that one's steps to come. They are estimated by
# the tokens of its last steps with drafts, of which each counts NEWS; before the first, RATE are expected.
AHEAD, NEWS, RATE = 0.75, 0.1, 1.5
# Before a row of a decoding step was measured, it is taken to cost as much as this many tokens of a prompt.
# The first drafts have so many rows at most, further ones at most twice as many as any before.
ROW_TOKENS, FIRST_ROWS = 0.5, 8
# The search for the best tree may take this share of the time, and is left out where all levels cost less than CHEAP
# plain steps. The first drafts, which tell what a level costs, are chains of so many levels.
CHOICE_SHARE, CHEAP, FIRST_DEPTH = 0.02, 0.3, 2
# To ask which nodes are worth their time may take this share of it where rows that were not cost less: meanwhile all
# nodes are kept.
ASKING_SHARE = 0.02
# Where no guess of such a step was right, there are no drafts for one step, then for three, and so on up to so many.
MOST_PAUSED = 15
# Of a drafter whose guesses are partly free, every so many looks ask for the others, too.
FREE_LOOKS = 4

ROOT, ONE_GUESS = DraftTree.chain(0), DraftTree.chain(1)


class TreeTuner:
    """Decides whether the next step drafts, with which tree at most, and which of the drafted nodes are verified.

    The first steps are plain: their time per token is what drafts have to beat. Then guesses are made, which are only
    compared with the tokens that come, ever more rarely, until one is right. From then on a tree is the best one for
    what was accepted so far and for the time of levels and rows (`choose_tree`); of the batch's nodes those are
    verified that are worth their time (`NodeBudget`), which may be none. What steps with drafts lose against plain ones
    is counted. While that is more than LOSS_SHARE of the time, a few steps look: they draft, and verify only what
    promises much; what was not verified is compared with the tokens that came. What was learnt stays with the drafter
    for further calls, and fades while nothing is drafted.

    max_nodes, max_depth: the most nodes of a tree, the root included, and its most levels. has_free_guesses: as the
    drafter says.
    """

    def __init__(self, max_nodes: int, max_depth: int, has_free_guesses: bool = False) -> None:
        self.max_nodes, self.max_depth, self.has_free_guesses = max_nodes, max(max_depth, 1), has_free_guesses
        self.costs: dict[int, StepCosts] = {}
        self.budget = NodeBudget()
        self.rates: dict[int, float] = {}  # tokens of each sequence in a step with drafts
        self.clock = self.elapsed = 0.0  # seconds of all steps, and of this call's
        self.lost = 0.0  # seconds that drafts have lost in this call
        self.since_plain = 0  # steps
        self.seconds_of_token = 0.0  # what it takes to read one known token
        self.is_warm = False  # there was a step with drafts
        self.has_proof = False  # whether a guess of this call was right
        self.pause = self.paused = 0  # steps without drafts until the next, and how many of them there were
        self.num_looks, self.looking = 0, 0.0  # looks of this call, and the seconds that they took
        self.look: float | None = None  # that the last one took
        # The best tree, None for all that the drafter has; for which costs it is, and until when it is good.
        self.best: DraftTree | None = None
        self.chosen: tuple[StepCosts | None, float] = None, 0.0
        self.keeps_all: tuple[StepCosts | None, float] = None, 0.0  # for which costs all nodes are kept, and until when
        # Of this step: what is drafted at most, None for all that the drafter has; levels, None without drafts; whether
        # only what is promising will be verified; seconds that the drafter reads before it can draft, that the choice
        # of the tree took; the batch's tokens to come, None if others wait for a place; what each one's are worth.
        self.tree: DraftTree | None = None
        self.levels: float | None = None
        self.is_look = False
        self.catching_up = self.choosing = 0.0
        self.remaining: np.ndarray | None = None
        self.weights = np.ones(1)
        self.rows = 0  # besides the roots
        self.nodes: BatchNodes | None = None  # what was drafted, if it was looked at

    def begin(self) -> None:
        """A call of `generate` starts to decode."""
        self.elapsed = self.lost = self.looking = 0.0
        self.has_proof, self.pause, self.paused, self.num_looks = False, 0, 0, 0
        self.budget.of_sequences.clear()
        self.rates.clear()

    def wants_drafts(self, remaining: Mapping[int, int], unread: float = 0.0, others_wait: bool = False) -> bool:
        """Whether the next step shall draft; `tree` then bounds its trees.

        remaining: the index of each sequence of the batch -> tokens that it still has to come. unread: known ones that
        the drafter has to read before it can draft, in tokens of the target. others_wait: whether sequences wait for a
        place in the batch.
        """
        costs = self._costs_of(len(remaining))
        self.levels, self.is_look, self.catching_up = None, False, unread * self.seconds_of_token
        if costs.num_plain == 0 or self.since_plain >= PLAIN_AGES[min(costs.num_plain, len(PLAIN_AGES) - 1)]:
            return False
        if self.paused < self.pause:
            self.paused += 1
            return False
        allowance = LOSS_SHARE * (self.elapsed + min(max(remaining.values()), HORIZON) * costs.plain)
        allowance -= self.lost
        if self.has_proof and allowance > 0.0:
            self._weigh(costs, remaining, others_wait)
            self._choose(costs)
            depth = self.max_depth if self.best is None else self.best.max_depth
            if depth > 0 and allowance - self.catching_up >= costs.once + costs.level * depth:
                self.tree, self.levels = self.best, float(depth)
                return True
            if self.has_free_guesses:
                self.tree, self.levels, self.catching_up = ROOT, 0.0, 0.0
                return True
        if not self._wants_look(costs, allowance):
            return False
        self._weigh(costs, remaining, others_wait)
        return True

    def _wants_look(self, costs: StepCosts, allowance: float) -> bool:
        """Whether the next step shall look; sets what it drafts."""
        tree: DraftTree | None = ONE_GUESS
        levels, reading = 1.0, self.catching_up
        if self.has_free_guesses and (self.num_looks + 1) % FREE_LOOKS:
            tree, levels, reading = ROOT, 0.0, 0.0
        elif self._is_cheap(costs):
            tree, levels = None, float(self.max_depth)
        seconds = reading + (self.look if self.look is not None else costs.once + costs.level * levels)
        may_prove = not self.has_proof and seconds < allowance
        if not may_prove and self.looking + seconds > LOOK_SHARE * self.elapsed:
            return False
        self.is_look, self.tree, self.levels, self.catching_up = True, tree, levels, reading
        self.num_looks += 1
        return True

    def _weigh(self, costs: StepCosts, remaining: Mapping[int, int], others_wait: bool) -> None:
        """Sets `weights`: what a token of each sequence is worth, in plain steps; a plain step gives 1 in all.

        A batch is done when its last sequence is. If others will be done before that one, a token of theirs saves only
        what their own rows take. But if more sequences wait for a place, every token counts.
        """
        size = len(remaining)
        self.remaining = None if others_wait else np.array(list(remaining.values()))
        if others_wait or size == 1:
            self.weights = np.full(size, 1.0 / size)
            return
        steps = np.array([left / self.rates.get(sequence, RATE) for sequence, left in remaining.items()])
        of_row = min(costs.row / costs.plain, 1.0 / size)
        is_last = steps >= AHEAD * steps.max()
        self.weights = of_row + (1.0 - of_row * size) * is_last / is_last.sum()

    def _choose(self, costs: StepCosts) -> None:
        """Sets `best`: the tree to draft if all sequences that count had the same; the root alone where none pays."""
        if self._is_cheap(costs):
            # Whatever is drafted: a tree that suits most sequences may be too small for those that are easy to guess.
            self.best, self.chosen = None, (None, 0.0)
        elif not self.is_warm:
            self.best = DraftTree.chain(min(self.max_depth, self.max_nodes - 1, FIRST_DEPTH))
        elif self.chosen[0] is not costs or self.clock >= self.chosen[1] or costs.num_drafted <= 2:
            begin = time.perf_counter()
            size = int((self.weights > 0.5 * self.weights.max()).sum())
            self.best = choose_tree(
                self.budget.acceptance,
                lambda n: costs.plain + (costs.once + size * costs.row * (n - 1) if n > 1 else 0.0),
                max_nodes=self.max_nodes,
                max_depth=self.max_depth,
                level_cost=costs.level,
            )
            self.choosing = time.perf_counter() - begin
            self.chosen = costs, self.clock + self.choosing / CHOICE_SHARE

    def _is_cheap(self, costs: StepCosts) -> bool:
        return costs.level * self.max_depth <= CHEAP * costs.plain

    def narrow(
        self, draft: Draft, confidence: Callable[[], Tensor | None] | None, sequences: Sequence[int]
    ) -> tuple[Draft, Tensor | None]:
        """The part of a draft that is worth verifying, and which of its rows that are, None for all.

        confidence: gives the joint log-probabilities [N] of the nodes by the drafter. sequences: the index of each
        tree's.
        """
        assert self.levels is not None
        costs, num_trees = self._costs_of(len(sequences)), len(sequences)
        self.nodes = None
        self.rows = draft.draft_tokens.shape[0] - num_trees if draft.trees.max_nodes > 1 else 0
        if self.rows == 0:  # nobody has a guess
            return draft, None
        most_rows = max(FIRST_ROWS, 2 * costs.most_rows)
        if (
            not self.is_look
            and self.rows <= most_rows
            and self.keeps_all[0] is costs
            and self.clock < self.keeps_all[1]
        ):
            return draft, None
        begin, nodes = time.perf_counter(), BatchNodes.of(draft.trees)
        fixed = costs.expected(self.levels, 0.0)
        known = None if confidence is None else confidence()
        worth = self.budget.survival(nodes, known, sequences) * self.weights[nodes.tree]
        is_draft = nodes.depth != 0
        count = best_count(worth, is_draft, lambda count: fixed + costs.row * count)
        count = min(count, num_trees + most_rows)
        if self.is_look and count > num_trees:
            most = count - num_trees
            gain = np.sort(worth[is_draft])[-most:].sum()
            if not self.has_proof or (1.0 + gain) * costs.plain < PROMISING * (fixed + costs.row * most):
                count = num_trees
        self.nodes, self.kept, self.drafted = nodes, None, draft.draft_tokens.cpu().numpy()
        self.rows = min(count, len(worth)) - num_trees
        asking = time.perf_counter() - begin
        pays = (len(worth) - count) * costs.row > asking
        self.keeps_all = (None, 0.0) if pays else (costs, self.clock + asking / ASKING_SHARE)
        if count >= len(worth):
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

    def observe(
        self,
        sequences: Sequence[int],
        seconds: float,
        accept_index: Tensor,
        tokens: Tensor,
        drafting: float = 0.0,
    ) -> None:
        """Takes in a step's seconds, those of the drafter among them, and what came of it.

        sequences: their indices. accept_index, tokens: [B, S], the accepted nodes, and the token behind each.
        """
        begin = time.perf_counter()
        costs = self._costs_of(len(sequences))
        self.clock += seconds
        self.elapsed += seconds
        self.lost += self.choosing
        seconds, self.choosing = seconds - self.choosing, 0.0
        if self.levels is None:
            self.since_plain = 0
            costs.add_plain(seconds)
            self.budget.fade()
            return
        self.since_plain += 1
        accepted = accept_index.cpu().numpy()
        found = (accepted >= 0).sum(axis=1)
        # A batch is done when its last sequence is.
        left = self.remaining
        progress = float(found.mean() if left is None else left.max() - max((left - found).max(), 0))
        for sequence, count in zip(sequences, found.tolist(), strict=True):
            self.rates[sequence] = (1.0 - NEWS) * self.rates.get(sequence, RATE) + NEWS * count
        rows = self.rows
        if self.is_look and rows == 0:
            self.look = max(seconds - costs.plain, 0.0)
            self.looking += self.look
        if not self.is_warm:  # it also pays for what is set up only once
            self.is_warm = True
            seconds = min(seconds, (progress + 2.0) * costs.plain)
        else:
            # What one step has accepted is read in the next as a matter of course; more of it tells nothing of levels.
            is_typical = self.since_plain > 1 or not self.catching_up
            seconds = costs.add_drafted(self.levels, rows, drafting, seconds, is_typical)
        if rows == 0:
            self.since_plain = 0
        if self.nodes is not None:
            # Guesses for sequences that are ahead tell little of the others.
            counts = self.weights > 0.5 * self.weights.max()
            tried, right = self.budget.observe(self.nodes, self.drafted, self.kept, accepted, tokens.cpu().numpy())
            self.has_proof |= bool(right.any())
            if rows > 0 or right[counts].any():
                self.pause = 0
            elif tried[counts].any():
                self.pause, self.paused = min(2 * self.pause + 1, MOST_PAUSED), 0
        self.lost += seconds - progress * costs.plain + time.perf_counter() - begin
        self.lost = max(self.lost, -MOST_SAVED * costs.plain)

    def observe_reading(self, num_tokens: int, seconds: float) -> None:
        """Takes in the seconds of a pass of the target over prompts."""
        self.seconds_of_token = seconds / max(num_tokens, 1)

    def _costs_of(self, batch_size: int) -> StepCosts:
        """Batches of about the same size cost about the same."""
        bucket = batch_size.bit_length() if batch_size > 4 else -batch_size
        return self.costs.setdefault(bucket, StepCosts(ROW_TOKENS * self.seconds_of_token))
