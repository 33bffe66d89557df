"""`generate(tree="auto")`: whether a step drafts, and how large a tree, by what steps cost and what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pagedtree import Draft, DraftTree, choose_tree, select_nodes
from pagedtree.generation.batch_progress import BatchProgress
from pagedtree.generation.node_budget import NodeBudget, best_count
from pagedtree.generation.step_costs import StepCosts
from pagedtree.proposal import rows_of

__all__ = ["TreeTuner"]

# Drafts may lose this share of the time, where the time of the next HORIZON tokens counts too. Of what they have won,
# MOST_SAVED plain steps may be lost again.
LOSS_SHARE, HORIZON, MOST_SAVED = 0.02, 96, 4.0
# While drafts have lost too much, this share of the time goes into looks; what they find is verified where it promises
# so many times plain decoding's speed.
LOOK_SHARE, PROMISING = 0.01, 1.1
# After how many steps with drafts a plain one follows, if none, one or more of these were measured.
PLAIN_AGES = (0, 4, 32)
# Before a row of a decoding step was measured, it is taken to cost as much as this many tokens of a prompt.
# The first drafts have so many rows at most, further ones at most twice as many as any before.
ROW_TOKENS, FIRST_ROWS = 0.5, 8
# The best tree is looked for where all levels cost more than CHEAP plain steps: after each of the first drafts, and
# then whenever the time of so many plain steps is over. The first drafts are chains of so many levels.
CHEAP, CHOICE_STEPS, FIRST_DEPTH = 0.3, 8, 2
# Where guesses were wrong, there are no drafts until what they took is this share of the time since.
WRONG_SHARE = 0.1
# Of a drafter whose guesses are partly free, every so many looks ask for the others, too.
FREE_LOOKS = 4

ROOT, ONE_GUESS = DraftTree.chain(0), DraftTree.chain(1)


class TreeTuner:
    """Decides whether the next step drafts, with which tree at most, and which of the drafted nodes are verified.

        if no plain step was measured, or none for long: decode plainly
        elif a guess of this call was right, a tree pays, and drafts have not lost too much:
            draft the best tree, and verify the nodes that are worth their time
        else: look, ever more rarely; decode plainly in between

    The best tree is that for what was accepted so far and for the time of levels and rows (`choose_tree`). `NodeBudget`
    estimates what the batch's nodes are worth, which may be nothing. What steps with drafts lose against plain ones is
    counted; LOSS_SHARE of the time is too much. A look drafts to learn: its guesses are compared with the tokens that
    come, and are verified only where that promises much. What was learnt stays with the drafter for further calls, and
    fades while nothing is drafted.

    max_nodes, max_depth: the most nodes of a tree, the root included, and its most levels. has_free_guesses: as the
    drafter says.
    """

    def __init__(self, max_nodes: int, max_depth: int, has_free_guesses: bool = False) -> None:
        self.max_nodes, self.max_depth, self.has_free_guesses = max_nodes, max(max_depth, 1), has_free_guesses
        self.costs: dict[int, StepCosts] = {}
        self.budget = NodeBudget()
        self.seconds_of_token = 0.0  # what it takes to read one known token
        self.is_warm = False  # there was a step with drafts
        self.since_plain = 0  # steps
        # Of this call: seconds of all steps, those that drafts have lost, and that looks beyond that took; whether a
        # guess was right; whether the last step won, by drafts; how many looks there were; until when drafts rest.
        self.elapsed = self.lost = self.looking = 0.0
        self.has_proof, self.has_won, self.num_looks, self.resting_until = False, False, 0, 0.0
        # The best tree, None for all that the drafter has; for which costs it is, by how few steps, and until when.
        self.best: DraftTree | None = None
        self.chosen: tuple[tuple[StepCosts, int] | None, float] = None, 0.0
        # Of this step: what tokens are worth; what is drafted at most, None for all that the drafter has; its levels,
        # None without drafts; whether it is a look, and one beyond what may be lost; seconds that the drafter reads
        # before it can draft; the draft if there are guesses, which of its rows are verified (None for all), and how
        # many besides the roots.
        self.progress: BatchProgress
        self.tree: DraftTree | None = None
        self.levels: float | None = None
        self.is_look = self.is_beyond = False
        self.catching_up = 0.0
        self.draft: Draft | None = None
        self.kept: Tensor | None = None
        self.rows = 0

    def begin(self) -> None:
        """A call of `generate` starts to decode."""
        self.elapsed = self.lost = self.looking = 0.0
        self.has_proof, self.has_won, self.num_looks, self.resting_until = False, False, 0, 0.0
        self.chosen = None, 0.0
        self.budget.begin()

    def wants_drafts(self, remaining: Mapping[int, int], unread: float = 0.0, others_wait: bool = False) -> bool:
        """Whether the next step shall draft; `tree` then bounds its trees.

        remaining: the index of each sequence of the batch -> tokens that it still has to come. unread: known ones that
        the drafter has to read before it can draft, in tokens of the target. others_wait: whether sequences wait for a
        place in the batch.
        """
        costs = self._costs_of(len(remaining))
        self.levels = None
        if costs.num_plain == 0 or self.since_plain >= PLAIN_AGES[min(costs.num_plain, len(PLAIN_AGES) - 1)]:
            return False
        if self.elapsed < self.resting_until:
            return False
        allowance = LOSS_SHARE * (self.elapsed + min(max(remaining.values()), HORIZON) * costs.plain) - self.lost
        looks = costs.plain if self.has_won else LOOK_SHARE * self.elapsed - self.looking
        if max(allowance, looks) <= 0.0:
            return False
        self.progress = BatchProgress(remaining.values(), others_wait, costs.row / costs.plain)
        for tree, is_look in self._candidates(costs, allowance >= costs.once):
            levels = float(self.max_depth if tree is None else tree.max_depth)
            reading = unread * self.seconds_of_token if levels > 0.0 else 0.0
            needed = reading + costs.level * levels + (0.0 if is_look else costs.once)
            if needed <= (max(allowance, looks) if is_look else allowance):
                self.tree, self.levels, self.is_look, self.catching_up = tree, levels, is_look, reading
                self.is_beyond = needed > allowance
                self.num_looks += is_look
                return True
        return False

    def _candidates(self, costs: StepCosts, may_verify: bool) -> Iterator[tuple[DraftTree | None, bool]]:
        """What the next step may draft, in the order of preference, and whether it only looks.

        may_verify: whether more than looks are allowed.
        """
        guess = None if self._is_cheap(costs) else ONE_GUESS
        if not self.has_proof:
            is_free = self.has_free_guesses and (self.num_looks + 1) % FREE_LOOKS > 0
            yield (ROOT if is_free else guess), True
            return
        if may_verify:
            self._choose(costs)
            if self.best is None or self.best.max_depth > 0:
                yield self.best, False
            if self.has_free_guesses:
                yield ROOT, False
        yield (ROOT if self.has_free_guesses else guess), True

    def _choose(self, costs: StepCosts) -> None:
        """Sets `best`: the tree to draft if all sequences that count had the same; the root alone where none pays."""
        if self._is_cheap(costs):
            # Whatever is drafted: a tree that suits most sequences may be too small for those that are easy to guess.
            self.best, self.chosen = None, (None, 0.0)
            return
        if not self.is_warm:
            self.best = DraftTree.chain(min(self.max_depth, self.max_nodes - 1, FIRST_DEPTH))
            return
        basis, size = (costs, min(costs.num_drafted, 3)), sum(self.progress.counts)
        if self.elapsed >= self.chosen[1] or self.chosen[0] != basis:
            self.best = choose_tree(
                self.budget.acceptance,
                lambda n: costs.plain + (costs.once + size * costs.row * (n - 1) if n > 1 else 0.0),
                max_nodes=self.max_nodes,
                max_depth=self.max_depth,
                level_cost=costs.level,
            )
            self.chosen = basis, self.elapsed + CHOICE_STEPS * costs.plain

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
        costs, num_trees, trees = self._costs_of(len(sequences)), len(sequences), draft.trees
        self.rows = draft.draft_tokens.shape[0] - num_trees if trees.max_nodes > 1 else 0
        self.draft = self.kept = None
        if self.rows == 0:  # nobody has a guess
            return draft, None
        self.draft = draft
        survival = self.budget.survival(trees, None if confidence is None else confidence(), sequences)
        worth = survival * np.repeat(self.progress.weights, np.diff(trees.cu_nodes.cpu().numpy()))
        is_draft = trees.parents.cpu().numpy()[: len(worth)] >= 0
        fixed = costs.expected(self.levels, 0.0)
        count = best_count(worth, is_draft, fixed, costs.row)
        count = min(count, num_trees + max(FIRST_ROWS, 2 * costs.most_rows))
        self.rows = count - num_trees
        if self.is_look and self.rows > 0:
            gain = float(np.sort(worth[is_draft])[-self.rows :].sum())
            promised = self.progress.expected(gain) * costs.plain
            if not self.has_proof or promised < PROMISING * (fixed + costs.row * self.rows):
                self.rows = 0
        if count >= len(worth) and self.rows > 0:
            return draft, None
        part, self.kept = select_nodes(trees, torch.from_numpy(worth).float().to(trees.device), num_trees + self.rows)
        return rows_of(draft, part, self.kept), self.kept

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
        costs = self._costs_of(len(sequences))
        self.elapsed += seconds
        if self.levels is None:
            self.since_plain, self.has_won = 0, False
            costs.add_plain(seconds)
            self.budget.fade()
            return
        self.since_plain += 1
        made = self.progress.made((accept_index >= 0).sum(dim=1).tolist())
        if not self.is_warm:  # it also pays for what is set up only once
            self.is_warm = True
            seconds, drafting = min(seconds, (made + 2.0) * costs.plain), min(drafting, 2.0 * costs.plain)
        else:
            # What one step has accepted is read in the next as a matter of course; more of it tells nothing of levels.
            is_typical = self.since_plain > 1 or not self.catching_up
            seconds = costs.add_drafted(self.levels, self.rows, drafting, seconds, is_typical)
        if self.rows == 0:
            self.since_plain = 0
        # Where nothing is verified, only the drafter's time is lost, however long the pass took.
        lost = seconds - made * costs.plain if self.rows > 0 else min(drafting, seconds)
        self.has_won = self.rows > 0 and lost < 0.0
        self.lost = max(self.lost + lost, -MOST_SAVED * costs.plain)
        if self.rows == 0:
            self.looking += self.is_beyond * lost
        if self.draft is not None:
            # Guesses for sequences that are ahead tell little of the others.
            tried, right = self.budget.observe(self.draft, self.kept, accept_index, tokens)
            counts = np.array(self.progress.counts)
            is_news = bool(right[counts].any()) and not (self.is_look and self.has_proof)
            if self.rows == 0 and not is_news and tried[counts].any():
                self.resting_until = self.elapsed + lost / WRONG_SHARE
            self.has_proof |= bool(right.any())
            self.draft = None

    def observe_reading(self, num_tokens: int, seconds: float) -> None:
        """Takes in the seconds of a pass of the target over prompts."""
        self.seconds_of_token = seconds / max(num_tokens, 1)

    def _costs_of(self, batch_size: int) -> StepCosts:
        """Batches of about the same size cost about the same."""
        bucket = batch_size.bit_length() if batch_size > 4 else -batch_size
        return self.costs.setdefault(bucket, StepCosts(ROW_TOKENS * self.seconds_of_token))
