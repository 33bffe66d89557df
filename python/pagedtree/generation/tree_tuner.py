"""`generate(tree="auto")`: chooses the depth of drafts and the nodes that the target verifies.

    plan = tuner.plan(remaining)                               # how deep to draft, or not at all
    if plan.depth is not None:
        kept = plan.keep(drafter.propose(), drafter.confidence())   # the nodes worth verifying
    tuner.learn(plan, Outcome(seconds, accept_index, tokens, drafting, kept))

It maximises tokens per second, by past acceptance rates (`Odds`) and step times (`StepCosts`).
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

# Priors until steps are measured: a drafted row costs as much as a prompt token, a plain step as many rows as this.
PLAIN_ROWS = 32.0
# The first steps verify at most this many drafted rows per sequence, later ones at most twice the maximum so far.
FIRST_ROWS = 8
# The estimate of a plain step decays while none is measured: by half after this many steps.
PLAIN_AGE = 32
# Steps longer than this multiple of the expected time are outliers.
HICCUP = 2.0
# Decay of old observations per new one, and the weight of a prior.
KEPT, PRIOR = 0.95, 1.0
# Classes of drafts by surprise, finer at low surprise.
KINDS = 12
# Surprise (negative log-probability) of a drafter's first choice without `confidence`, and the upper bound of odds.
SURPRISE, SUREST = 0.5, 0.97
# Share of the time spent on probes: drafts that the estimates do not justify.
LOOK_SHARE = 0.01
# Drafted rows of a step: all, at most FIRST_ROWS or a multiple of this, as oneDNN compiles each new number of rows.
ROWS = 16
# The least estimated gain for which a step verifies drafts.
LEAST_GAIN = 1.05


class Odds:
    """An acceptance rate of a class of drafts, or accepted drafts per step. The prior counts as `weight`
    observations."""

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
    """Estimates of the seconds of steps of one batch size. plain: a step without drafts. once, row: cost of drafts in
    the target's pass, fixed and per row. level: the drafter's per level and per call."""

    def __init__(self, plain: float, once: float, row: float, level: float) -> None:
        self.plain, self.once, self.row, self.level = plain, once, row, level
        self.age, self.most_rows = PLAIN_AGE, 0  # steps since the last plain one; drafted rows of one step
        self._guess = once, row
        self._plain, self._level = deque[float](maxlen=9), deque[float](maxlen=9)
        # Sums over steps with drafts: 1, rows, rows², added seconds, rows * added seconds.
        self._sums: tuple[float, ...] = (0.0,) * 5

    def drafter(self, levels: int) -> float:
        return self.level * (levels + 1) if levels else 0.0

    def target(self, rows: float) -> float:
        return self.plain + (self.once + self.row * rows if rows else 0.0)

    @property
    def optimistic_plain(self) -> float:
        return self.plain / (1.0 + self.age / PLAIN_AGE)

    def learn(self, rows: int, levels: int, drafting: float, seconds: float) -> None:
        """Records a step. `drafting`: the drafter's share of `seconds`."""
        if levels > 0:  # the first call includes one-time setup
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
        # Linear fit of added seconds over rows, with two prior observations: no rows, and FIRST_ROWS.
        (once, row), (n, x, xx, y, xy) = self._guess, self._sums
        most = once + FIRST_ROWS * row
        n, x, xx, y, xy = n + 2, x + FIRST_ROWS, xx + FIRST_ROWS**2, y + once + most, xy + FIRST_ROWS * most
        self.row = max((n * xy - x * y) / (n * xx - x * x), 0.0)
        self.once = max((y - self.row * x) / n, 0.0)


@dataclass(frozen=True)
class Kept:
    """The nodes of a proposal that the target verifies. rows: int32, their rows in the proposal; None: all of it.
    num_drafted: nodes that are not roots. guesses: (tree, parent's row or -1, class) of each row of the proposal."""

    draft: Draft
    proposal: Draft
    rows: Tensor | None
    num_drafted: int
    guesses: Sequence[tuple[int, int, int]]


@dataclass(frozen=True)
class Outcome:
    """A step's seconds, including the drafter's (None: not representative), accepted nodes and their tokens [B, S]. A
    tree whose nodes are all -1 is ignored."""

    seconds: float | None
    accept_index: Tensor
    tokens: Tensor
    drafting: float = 0.0
    kept: Kept | None = None


@dataclass(frozen=True)
class Plan:
    """The drafting decision for one step.

    depth: most levels; 0: only drafts without a model pass; None: no drafts. is_look: a probe that the estimates do not
    justify. reading: the drafter's seconds outside its levels. weights: value of a token of each sequence, in plain
    steps. remaining, others_wait: see `TreeTuner.plan`.
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
        """Returns the nodes with the most tokens per second, if any. confidence: from `Drafter.confidence`.

        for node in tree:
            odds = acceptance rate of drafts of the same surprise whose parent was accepted
            worth[node] = worth[parent] * min(odds, odds of the previous sibling)
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
                # Sampled drafts must keep all earlier siblings.
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
        """Returns the number of nodes to verify. worth: descending."""
        costs, sunk = self.costs, self.reading + self.costs.drafter(self.depth or 0)
        best, count, promised = LEAST_GAIN / (sunk + costs.optimistic_plain), 0, 0.0
        for i, gain in enumerate(worth[: max(FIRST_ROWS * len(self.remaining), 2 * costs.most_rows)], 1):
            promised += gain
            rate = (1.0 + promised) / (sunk + costs.target(i))
            if rate > best and (i <= FIRST_ROWS or i % ROWS == 0 or i == len(worth)):
                best, count = rate, i
        return count


class TreeTuner:
    """Plans steps, and learns from their outcomes across calls. The arguments are the drafter's attributes."""

    def __init__(self, max_depth: int, grows_by_level: bool = False, has_free_guesses: bool = False) -> None:
        self.max_depth, self.grows_by_level, self.has_free_guesses = max_depth, grows_by_level, has_free_guesses
        self.costs: dict[int, StepCosts] = {}
        self.odds, self.by_depth = Odds(), Odds()  # by_depth: whether any child of an accepted node was accepted
        self.seconds_of_token = 1e-3  # of a prompt
        self.begin()

    def begin(self) -> None:
        # Seconds of all steps and of probes; plain steps that drafts saved per sequence on average, and for the batch.
        self.elapsed = self.looking = self.found = self.saved = 0.0

    def plan(self, remaining: Sequence[int], unread: float = 0.0, others_wait: bool = False) -> Plan:
        """Returns the plan whose depth has the most expected tokens per second.

        remaining: [B], tokens still to generate. unread: tokens that the drafter must read first, in tokens of the
        target. others_wait: whether sequences wait for a place in the batch.
        """
        costs, size = self._costs_of(len(remaining)), len(remaining)
        # A token saves its sequence's row in a later plain step. The rest of that step is saved if the batch ends
        # earlier, with its last sequence: the further behind, the likelier; `trust` has how often it was so.
        shares = [1.0 if others_wait else left for left in remaining]
        trust = (self.saved + PRIOR) / (self.found + PRIOR)
        rows = min(size * costs.row / costs.plain, 1.0)
        weights = [trust * (1.0 - rows) * share / sum(shares) + rows / size for share in shares]
        plan = Plan(remaining, others_wait, weights, costs, self.odds, unread * self.seconds_of_token)
        if costs.level == 0.0:  # the cost of a level is unknown
            return replace(plan, depth=1 if self.grows_by_level else self.max_depth)
        if plan.reading + costs.drafter(self.max_depth) <= LOOK_SHARE * costs.plain:
            return replace(plan, depth=self.max_depth)
        best, depth, reached, promised = 1.0 / costs.optimistic_plain, 0, sum(weights), 0.0
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
        nodes, seconds = outcome.kept, outcome.seconds
        rows = 0 if nodes is None else nodes.num_drafted
        if seconds is not None:
            drafting = min(outcome.drafting, seconds)
            reading = min(plan.reading, drafting)
            plan.costs.learn(rows, plan.depth or 0, drafting - reading, seconds - reading)
            self.elapsed += seconds
            self.looking += drafting * plan.is_look
        if nodes is None:
            return
        paths = outcome.accept_index.tolist()
        if rows > 0:
            counts = [max(sum(node >= 0 for node in path) - 1, 0) for path in paths]
            of_all = sum(w * n for w, n in zip(plan.weights, counts, strict=True)) / sum(plan.weights)
            last = max(plan.remaining) - max(left - n for left, n in zip(plan.remaining, counts, strict=True))
            # Tokens of other sequences count by the chance that theirs becomes the last one.
            saved = of_all if plan.others_wait else last + (of_all - last) / len(counts)
            self.saved, self.found = KEPT * self.saved + saved, KEPT * self.found + of_all
        # Every child of an accepted node is an observation, verified or not.
        rows_of_trees: dict[int, list[int]] = defaultdict(list)
        for row in range(len(nodes.guesses)) if nodes.rows is None else nodes.rows.tolist():
            if row >= 0:
                rows_of_trees[nodes.guesses[row][0]].append(row)
        came: dict[int, int] = {}
        for tree, (path, tokens) in enumerate(zip(paths, outcome.tokens.tolist(), strict=True)):
            came |= {rows_of_trees[tree][n]: token for n, token in zip(path, tokens, strict=True) if n >= 0}
        drafted, depths = nodes.proposal.draft_tokens.tolist(), nodes.proposal.trees.depths.tolist()
        # A node without drafted children above the planned depth counts as a miss.
        is_any_right = {row: False for row in came if depths[row] < (plan.depth or 0)}
        for row, (_, parent, kind) in enumerate(nodes.guesses):
            if parent in came:
                is_right = drafted[row] == came[parent]
                self.odds.add(kind, is_right)
                is_any_right[parent] = is_any_right.get(parent, False) or is_right
        for parent, is_right in is_any_right.items():
            self.by_depth.add(depths[parent] + 1, is_right)

    def learn_reading(self, num_tokens: int, seconds: float) -> None:
        """Records the seconds of a prefill pass of the target."""
        self.seconds_of_token = seconds / max(num_tokens, 1)

    def _costs_of(self, batch_size: int) -> StepCosts:
        if batch_size not in self.costs:
            row = self.seconds_of_token
            near = StepCosts(PLAIN_ROWS * row, 0.0, row, 0.0)
            if self.costs:
                near = self.costs[min(self.costs, key=lambda size: abs(math.log(size / batch_size)))]
            self.costs[batch_size] = new = StepCosts(near.plain, near.once, near.row, near.level)
            new.age, new.most_rows = near.age, near.most_rows
        return self.costs[batch_size]


class TunerOf(NamedTuple):
    """A drafter's tuner and its target. Copies of the drafter get None instead."""

    model: weakref.ref[Any]
    tuner: TreeTuner

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
