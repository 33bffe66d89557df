"""`generate(tree="auto")`: how deep a step drafts, and which of the drafted nodes the target verifies.

    plan = tuner.plan(remaining)                               # how deep to draft, or not at all
    if plan.depth is not None:
        kept = plan.keep(drafter.propose(), drafter.confidence())   # the nodes that are worth their time
    tuner.learn(plan, Outcome(seconds, accept_index, tokens, drafting, kept))

One number decides: tokens per second, of a step with drafts and of one without. Tokens are what the nodes promise by
what was accepted before (`Odds`), seconds by what steps took before (`StepCosts`).
"""

from __future__ import annotations

import math
import statistics
import weakref
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedtree import Draft, select_nodes
from pagedtree.check_draft import rows_of

__all__ = ["Kept", "Outcome", "Plan", "TreeTuner", "TunerOf"]

# Until steps are measured, a drafted row is taken to cost what a token of a prompt did, and a plain step as much as so
# many rows.
PLAIN_ROWS = 32.0
# The first steps verify at most so many drafted rows for each sequence, further ones at most twice the most so far.
FIRST_ROWS = 8
# A plain step is taken to be the faster, the longer none was measured: by half after so many steps.
PLAIN_AGE = 32
# A step that takes so many times as long as expected was held up by something else.
HICCUP = 2.0
# What evidence keeps of its weight when new evidence comes; and the weight of a first guess.
KEPT, PRIOR = 0.95, 1.0
# Classes of guesses by their surprise; they are finer where guesses are sure.
KINDS = 12
# The surprise (negative log-probability) of a drafter's first choice where it does not tell its own; and the odds that
# no node exceeds.
SURPRISE, SUREST = 0.5, 0.97
# The share of the time that may go into drafts for which nothing speaks, to see whether that has changed.
LOOK_SHARE = 0.01
# A token of a sequence counts by this power of what it still has to come: the batch ends with its last sequence.
BEHIND = 2.0


class Odds:
    """Estimates how often guesses of a class are right, or how many of them in one step.

    weight: for how many observations a first guess stands.
    """

    def __init__(self, weight: float = PRIOR) -> None:
        self.weight = weight
        self._seen: dict[Hashable, tuple[float, float]] = {}

    def of(self, kind: Hashable, prior: float) -> float:
        right, tried = self._seen.get(kind, (0.0, 0.0))
        return (right + self.weight * prior) / (tried + self.weight)

    def add(self, kind: Hashable, is_right: float) -> None:
        right, tried = self._seen.get(kind, (0.0, 0.0))
        self._seen[kind] = KEPT * right + is_right, KEPT * tried + 1.0


class StepCosts:
    """Estimates the seconds of steps of one batch size: guesses at first, then what was measured.

    plain: a step without drafts. once, row: what any drafts add to the target's pass, and each drafted row. level: what
    the drafter takes for each level, and for a call as a whole.
    """

    def __init__(self, plain: float, once: float, row: float, level: float) -> None:
        self.plain, self.once, self.row, self.level = plain, once, row, level
        self.age, self.most_rows = PLAIN_AGE, 0  # steps since the last plain one; drafted rows of one step
        self._guess = once, row
        self._plain, self._level = deque[float](maxlen=9), deque[float](maxlen=9)
        # Sums over steps with drafts: their number, rows, rows², what they added, and rows times that.
        self._sums: tuple[float, ...] = (0.0,) * 5

    def drafter(self, levels: int) -> float:
        return self.level * (levels + 1) if levels else 0.0

    def target(self, rows: float) -> float:
        """Seconds of the target's pass."""
        return self.plain + (self.once + self.row * rows if rows else 0.0)

    @property
    def optimistic_plain(self) -> float:
        return self.plain / (1.0 + self.age / PLAIN_AGE)

    def learn(self, rows: int, levels: int, drafting: float, seconds: float) -> None:
        """Takes in a step with so many drafted rows and levels, `drafting` of whose seconds were the drafter's."""
        if levels > 0:  # the first call also pays for what is set up only once
            self._level.append((drafting if self._level else min(drafting, seconds - drafting)) / (levels + 1))
            self.level = max(statistics.median_low(self._level), 1e-9)
        seconds -= drafting
        if rows == 0:
            self._plain.append(seconds)
            self.plain, self.age = statistics.median_low(self._plain), 0
            return
        self.age, self.most_rows = self.age + 1, max(self.most_rows, rows)
        if not self._plain:
            self.plain = max(seconds - self.once - self.row * rows, 0.5 * seconds)
        elif self._sums[0] > 1.0:
            seconds = min(seconds, HICCUP * self.target(rows))
        added = seconds - self.plain
        news = (1.0, rows, rows * rows, added, rows * added)
        self._sums = tuple(KEPT * old + new for old, new in zip(self._sums, news, strict=True))
        # The line through what rows added, as if one step with none and one with FIRST_ROWS had confirmed the guesses.
        (once, row), (n, x, xx, y, xy) = self._guess, self._sums
        most = once + FIRST_ROWS * row
        n, x, xx, y, xy = n + 2, x + FIRST_ROWS, xx + FIRST_ROWS**2, y + once + most, xy + FIRST_ROWS * most
        self.row = max((n * xy - x * y) / (n * xx - x * x), 0.0)
        self.once = max((y - self.row * x) / n, 0.0)


@dataclass(frozen=True)
class Kept:
    """The nodes of a proposal that the target verifies.

    rows: int32, where they are in the proposal; None: all of it. num_drafted: how many are no roots. guesses: of each
    row of the proposal its tree, its parent's row (-1 at roots) and its class.
    """

    draft: Draft
    proposal: Draft
    rows: Tensor | None
    num_drafted: int
    guesses: Sequence[tuple[int, int, int]]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step: its seconds, the drafter's among them; [B, S] accepted nodes and the tokens behind them.

    seconds is None where they do not tell what such a step takes. A tree whose nodes are all -1 tells nothing.
    """

    seconds: float | None
    accept_index: Tensor
    tokens: Tensor
    drafting: float = 0.0
    kept: Kept | None = None


@dataclass(frozen=True)
class Plan:
    """A decision what to draft in a step.

    depth: at most so many levels; 0: only guesses that no model is asked for; None: nothing. is_look: whether nothing
    speaks for it. reading: seconds of the drafter besides its levels. weights: what a token of each sequence is worth,
    in plain steps. remaining, others_wait: as `TreeTuner.plan` got them.
    """

    remaining: Sequence[int]
    others_wait: bool
    weights: Sequence[float]
    costs: StepCosts
    odds: Odds
    reading: float
    depth: int | None = None
    is_look: bool = False

    def keep(self, proposal: Draft, confidence: Tensor | None = None) -> Kept:
        """Finds the nodes that give the most tokens per second, if any; `confidence` as `Drafter.confidence` tells it.

        for node in tree:
            odds = how often guesses were right that surprised the drafter as much, where their parent was accepted
            worth[node] = worth[parent] * min(odds, odds of the sibling before it)
        """
        trees, log_probs = proposal.trees, None if confidence is None else confidence.tolist()
        offsets, parents = trees.cu_nodes.tolist(), trees.parents.tolist()
        guesses, worth = [(0, -1, 0)] * len(parents), [0.0] * len(parents)
        odds = [self.odds.of(kind, math.exp(-(((kind + 0.5) / 4.0) ** 2))) for kind in range(KINDS)]
        for tree, (first, end) in enumerate(pairwise(offsets)):
            rank, least = [0] * (end - first), [SUREST] * (end - first)
            for row in range(first, end):
                if not 0 <= (place := parents[row]) < row - first:  # a root
                    guesses[row], worth[row] = (tree, -1, 0), self.weights[tree]
                    continue
                surprise = SURPRISE + rank[place] if log_probs is None else log_probs[first + place] - log_probs[row]
                kind = min(int(4.0 * math.sqrt(surprise)), KINDS - 1) if surprise > 0.0 else 0
                # Drafts that were drawn must not lose a sibling before them.
                least[place] = min(least[place], odds[kind])
                guesses[row], worth[row] = (tree, first + place, kind), worth[first + place] * least[place]
                rank[place] += 1
        drafted = sorted((worth[row] for row, guess in enumerate(guesses) if guess[1] >= 0), reverse=True)
        size, count = len(offsets) - 1, self.count(drafted)
        draft, rows = proposal, None
        if count < len(drafted):
            scores = torch.tensor(worth, dtype=torch.float32).to(trees.device).masked_fill(trees.parents < 0, math.inf)
            part, rows = select_nodes(trees, scores, size + count)
            draft = rows_of(proposal, part, rows)
        return Kept(draft, proposal, rows, count, guesses)

    def count(self, worth: list[float]) -> int:
        """Returns how many of the nodes are verified; they come in the order of what they are worth."""
        costs, sunk = self.costs, self.reading + self.costs.drafter(self.depth or 0)
        best, count, promised = 1.0 / (sunk + costs.optimistic_plain), 0, 0.0
        for i, gain in enumerate(worth[: max(FIRST_ROWS * len(self.remaining), 2 * costs.most_rows)], 1):
            promised += gain
            rate = (1.0 + promised) / (sunk + costs.target(i))
            if rate > best:
                best, count = rate, i
        return count


class TreeTuner:
    """Plans steps, and learns from what came of them; what it has learnt serves further calls.

    max_depth: the drafter's most levels. grows_by_level, has_free_guesses: as the drafter says.
    """

    def __init__(self, max_depth: int, grows_by_level: bool = False, has_free_guesses: bool = False) -> None:
        self.max_depth, self.grows_by_level, self.has_free_guesses = max_depth, grows_by_level, has_free_guesses
        self.costs: dict[int, StepCosts] = {}
        self.odds, self.by_depth = Odds(), Odds()  # the latter of whether any child of an accepted node was right
        self.seconds_of_token = 1e-3  # of a prompt
        self.begin()

    def begin(self) -> None:
        """Begins with a call of `generate` that starts to decode."""
        # Seconds of all steps and of looks; plain steps that drafts have saved the sequences on average, and the batch.
        self.elapsed = self.looking = self.found = self.saved = 0.0

    def plan(self, remaining: Sequence[int], unread: float = 0.0, others_wait: bool = False) -> Plan:
        """Finds the depth with the most expected tokens per second.

        remaining: [B], how many tokens each sequence still has to come. unread: how many the drafter has to read before
        it can draft, in tokens of the target. others_wait: whether sequences wait for a place in the batch, which
        therefore does not end with its last one.
        """
        costs, size = self._costs_of(len(remaining)), len(remaining)
        shares = [1.0 if others_wait else (left / max(remaining)) ** BEHIND for left in remaining]
        # Sequences that are brought forward one by one save the batch less than they save themselves.
        trust = (self.saved + PRIOR) / (self.found + PRIOR)
        weights = [trust * share / sum(shares) for share in shares]
        plan = Plan(remaining, others_wait, weights, costs, self.odds, unread * self.seconds_of_token)
        if costs.level == 0.0:  # nobody knows yet what levels take
            return replace(plan, depth=1 if self.grows_by_level else self.max_depth)
        if plan.reading + costs.drafter(self.max_depth) <= LOOK_SHARE * costs.plain:
            return replace(plan, depth=self.max_depth)
        best, depth, reached, promised = 1.0 / costs.optimistic_plain, 0, trust, 0.0
        for level in range(1, self.max_depth + 1):
            reached *= self.by_depth.of(level, math.exp(-SURPRISE))
            promised += reached
            drafting = plan.reading + costs.drafter(level if self.grows_by_level else self.max_depth)
            rate = (1.0 + promised) / (drafting + costs.target(size * level))
            if rate > best:
                best, depth = rate, level
        least = 1 if self.grows_by_level else self.max_depth
        if depth > 0:
            return replace(plan, depth=max(depth, least))
        if self.looking + plan.reading + costs.drafter(least) <= LOOK_SHARE * self.elapsed:
            return replace(plan, depth=least, is_look=True)
        return replace(plan, depth=0 if self.has_free_guesses else None, reading=0.0)

    def learn(self, plan: Plan, outcome: Outcome) -> None:
        """Takes in what came of a step."""
        kept, seconds = outcome.kept, outcome.seconds
        rows = 0 if kept is None else kept.num_drafted
        if seconds is not None:
            drafting = min(outcome.drafting, seconds)
            reading = min(plan.reading, drafting)
            plan.costs.learn(rows, plan.depth or 0, drafting - reading, seconds - reading)
            self.elapsed += seconds
            self.looking += drafting * plan.is_look
        if kept is None:
            return
        paths = outcome.accept_index.tolist()
        if rows > 0:
            found = [max(sum(node >= 0 for node in path) - 1, 0) for path in paths]
            of_all = sum(w * n for w, n in zip(plan.weights, found, strict=True)) / sum(plan.weights)
            last = max(plan.remaining) - max(left - n for left, n in zip(plan.remaining, found, strict=True))
            # The others' tokens count by the chance that theirs will be the last sequence later.
            saved = of_all if plan.others_wait else last + (of_all - last) / len(found)
            self.saved, self.found = KEPT * self.saved + saved, KEPT * self.found + of_all
        # Every child of an accepted node tells something, verified or not.
        rows_of_trees: dict[int, list[int]] = defaultdict(list)
        for row in range(len(kept.guesses)) if kept.rows is None else kept.rows.tolist():
            if row >= 0:
                rows_of_trees[kept.guesses[row][0]].append(row)
        came: dict[int, int] = {}
        for tree, (path, tokens) in enumerate(zip(paths, outcome.tokens.tolist(), strict=True)):
            came |= {rows_of_trees[tree][n]: token for n, token in zip(path, tokens, strict=True) if n >= 0}
        drafted, depths = kept.proposal.draft_tokens.tolist(), kept.proposal.trees.depths.tolist()
        # Where nothing was drafted below, though it might have been, nothing was right.
        is_any_right = {row: False for row in came if depths[row] < (plan.depth or 0)}
        for row, (_, parent, kind) in enumerate(kept.guesses):
            if parent in came:
                is_right = drafted[row] == came[parent]
                self.odds.add(kind, is_right)
                is_any_right[parent] = is_any_right.get(parent, False) or is_right
        for parent, is_right in is_any_right.items():
            self.by_depth.add(depths[parent] + 1, is_right)

    def learn_reading(self, num_tokens: int, seconds: float) -> None:
        """Takes in the seconds of a pass of the target over prompts."""
        self.seconds_of_token = seconds / max(num_tokens, 1)

    def _costs_of(self, batch_size: int) -> StepCosts:
        """Finds the costs of a batch size; they begin with what the nearest size has taught."""
        if batch_size not in self.costs:
            row = self.seconds_of_token
            near = StepCosts(PLAIN_ROWS * row, 0.0, row, 0.0)
            if self.costs:
                near = self.costs[min(self.costs, key=lambda size: abs(math.log(size / batch_size)))]
            self.costs[batch_size] = new = StepCosts(near.plain, near.once, near.row, near.level)
            new.age, new.most_rows = near.age, near.most_rows
        return self.costs[batch_size]


class TunerOf(NamedTuple):
    """What a drafter has learnt, and with which target. Copies of the drafter, also pickled ones, have None instead."""

    model: weakref.ref[Any]
    tuner: TreeTuner

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
