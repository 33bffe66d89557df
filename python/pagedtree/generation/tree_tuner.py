"""`generate(tree="auto")`: chooses the tree to draft, or none, by what steps cost and what was accepted so far."""

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

# Drafts that do not pay may lose this share of the time, where the time of the next HORIZON tokens counts too. What the
# last call of `generate` did not use of its share may be lost as well.
LOSS_SHARE, HORIZON = 0.01, 128
# Besides that, drafts may lose what they won in the same call, up to the time of so many plain steps.
MOST_SAVED = 8.0
# Besides that, the gain that a tree promises for so many tokens may be lost.
CREDIT = 3.0
# A tree must promise to be faster than plain decoding by this share.
MIN_GAIN = 0.02
# Steps of plain decoding before the first drafts, and the least and the most steps for which their time stays valid.
PLAIN_STEPS, LEAST_PLAIN_AGE, PLAIN_AGE = 3, 8, 64
MAX_DEPTH, MAX_RANKS = 8, 4
# Steps with drafts before an estimate is trusted, and the tree that they draft.
PROBES, PROBE = 2, [-1, 0, 0, 1]
# Share of the time that goes into trying again what did not pay: the machine may have been slow then.
RETRY_SHARE = 0.005
# If a step takes this many times as long as others of its kind, the machine was busy with something else.
HICCUP = 2.0
# One row of a decoding step takes as long as this many tokens of a prompt: it has logits, and they are verified.
ROW_TOKENS = 3.0
# A step and a rehearsal keep these shares of the older evidence, so that a change of the text shows. All earlier calls
# together count as CARRIED guesses. Before there is any evidence, a first choice is taken to be right half the time.
KEPT_IN_STEP, KEPT_IN_REHEARSAL, CARRIED = 0.95, 0.5, 8.0
# Share of the time that goes into rehearsals. They must promise PROMISE tokens per step before the first try, and one
# more for each plain step that a try may lose.
REHEARSAL_SHARE, PROMISE = 0.004, 0.8
# Share of the time that goes into the search for the best tree.
CHOICE_SHARE = 0.005
PRIOR = 0.5 * 0.4 ** np.arange(MAX_RANKS)
PRIOR_WEIGHT = 2.0
# [depth, rank], and replaced rather than changed when a call begins.
PRIOR_HITS = PRIOR_WEIGHT * np.tile(PRIOR, (MAX_DEPTH, 1))
PRIOR_TRIALS = np.full((MAX_DEPTH, MAX_RANKS), PRIOR_WEIGHT)


@dataclass
class Costs:
    """What is known about steps of one batch size.

    Attributes:
        plain: seconds of the last steps without drafts. plain_seconds: what drafts have to beat.
        drafted: (nodes of a tree, depth, seconds) of the last steps with drafts.
        since_plain: steps since the last one without drafts.
        steps, last_drafted: how many steps there were, and the number of the last one with drafts.
        next_choice: when to choose a tree again, by the clock. next_probe: when to try one again, by the steps.
        judged_at: the evidence that `gain` was computed from.
        most_nodes: the largest tree that was drafted.
        probes: steps with drafts to try before a choice counts. probe: the tree that they draft.
        probe_loss: seconds that one try may lose. probe_tokens: tokens that rehearsals promise for it.
        model: seconds of a step with drafts, fitted to `drafted`: a constant, and what a node and a level add.
        tree: the best tree with drafts, even where plain decoding is better.
        gain: seconds per token that `tree`, or `probe` before there is one, saves.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=25))
    plain_seconds: float = 0.0
    drafted: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=48))
    since_plain: int = 0
    steps: int = 0
    last_drafted: int = 0
    next_choice: float = 0.0
    judged_at: int = -1
    next_probe: int = 0
    most_nodes: int = 1
    probes: int = PROBES
    probe: DraftTree | None = None
    probe_loss: float = 0.0
    probe_tokens: float = 1.0
    model: tuple[float, float, float] | None = None
    tree: DraftTree | None = None
    gain: float = 0.0

    @property
    def plain_age(self) -> float:
        """For how many steps plain_seconds stays valid: the plain steps that renew it may cost 1 % of the time."""
        return min(max(100 * self.gain / self.plain_seconds, LEAST_PLAIN_AGE), PLAIN_AGE)

    def measure(self, seconds: float) -> None:
        """Takes in the time of a plain step. Drafts must beat the median less its standard error: noise is no gain."""
        self.plain.append(seconds)
        taken, count = sorted(self.plain), len(self.plain)
        spread = taken[-1 - count // 4] - taken[count // 4]
        self.plain_seconds = max(taken[count // 2] - 0.93 * spread / math.sqrt(count), taken[0])

    def fit(self) -> None:
        nodes, depths, seconds = np.array(self.drafted).T
        seconds = seconds.clip(max=HICCUP * np.median(seconds))
        features = np.stack([np.ones_like(nodes), nodes - 1, depths], axis=1)
        scale = seconds.mean()
        # Where few shapes were tried, a node and a level are taken to cost little rather than nothing.
        ridge, guess = 0.1, np.array([1.0, 0.01, 0.05])
        left = (features.T @ features / len(seconds) + ridge * np.eye(3)).tolist()
        right = (features.T @ (seconds / scale) / len(seconds) + ridge * guess).tolist()
        constant, node, level = (x * scale for x in _solved(left, right))
        self.model = max(float(constant), 1e-9), max(float(node), 0.0), max(float(level), 0.0)

    @property
    def is_stale(self) -> bool:
        """Whether the last drafts are so long ago that another try would cost next to nothing."""
        loss = max(self.probe_loss / self.plain_seconds, 0.5)
        return loss <= RETRY_SHARE * (self.steps - self.last_drafted)

    def forget_drafted(self) -> None:
        """From now on drafts are tried as if for the first time."""
        self.drafted.clear()
        self.model = self.tree = self.probe = None
        self.probes, self.next_choice = 1, 0.0

    def seconds(self, num_nodes: float, depth: float) -> float:
        assert self.model is not None
        constant, node, level = self.model
        return constant + node * (num_nodes - 1) + level * depth


class TreeTuner:
    """Chooses the tree of each step by `choose_tree`, and sees to it that drafts do not cost more than they bring.

    It starts with plain decoding, whose time per token is what drafts have to beat, and then tries a small tree. It
    counts what steps with drafts lose against plain ones, also where an estimate was wrong. While that is more than 1 %
    of the time, there are no drafts. The very first step with drafts also pays for what is set up only once; of its
    time no more is counted than a plain step takes. What was learnt stays with the drafter for further calls. If this
    call does not use up its 1 %, the next one may lose the rest, too.

    A drafter whose guesses cost next to nothing rehearses during plain decoding: its guesses at earlier places of the
    text are compared with the tokens that followed there. Drafts are tried only if that promises a gain. Where drafts
    took too long to pay, they are timed again after so many steps that the try costs 0.5 % of them.

    While all that is known promises a gain, a few tokens' worth of it may be lost, too: a bad start may be chance.

    A batch is done when its last sequence is. If other sequences are ahead of that one, this saves only the part of a
    step that their rows take. Progress is measured in this way, and acceptance is that of the sequences on which the
    end depends. But if more sequences wait for a place in the batch, every token counts.

    max_nodes, max_depth: the most nodes of a tree, the root included, and its most levels.
    """

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        self.max_nodes, self.max_depth = max_nodes, max(min(max_depth, MAX_DEPTH), 1)
        self.costs: dict[int, Costs] = {}
        self.hits, self.trials = PRIOR_HITS, PRIOR_TRIALS
        self.evidence = 0  # how many times something was counted
        self.is_catching_up = False
        self.is_drafting = False
        self.is_warm = False  # there was a step with drafts
        self.clock = 0.0  # seconds of all steps
        self.elapsed = self.lost = 0.0  # seconds of this call's steps, and what drafts lost against plain steps
        self.saved = 0.0  # what the last call won, or left of its share
        self.choosing = 0.0  # seconds of the step that went into choice and rehearsal
        self.seconds_of_token = 0.0  # what it takes to read one known token
        self.can_rehearse = True  # until the drafter says that it cannot
        self.rehearsal, self.since_rehearsal = 0.0, math.inf  # seconds of the last one, and seconds since then
        self.is_informed = False  # a rehearsal has seen this call's text, or there are none
        self.by_rows = 0.0  # share of a step's time that grows with the rows; so much of the progress is in all tokens

    def begin(self) -> None:
        """A call of `generate` starts to decode. What the last call won, or left of its share, may be lost, too."""
        self.saved = max(LOSS_SHARE * self.elapsed - self.lost, 0.0)
        self.elapsed = self.lost = 0.0
        self._keep(min(CARRIED / self.trials[0, 0], 1.0))
        self.is_informed = not self.can_rehearse
        self.since_rehearsal = math.inf

    @property
    def acceptance(self) -> np.ndarray:
        """[depth, rank]: how often a node is accepted where its parent was."""
        rates = self.hits / self.trials
        return rates / np.maximum(rates.sum(axis=1, keepdims=True), 1.0)

    def next_tree(self, remaining: list[int], *, unread: float = 0.0, others_wait: bool = False) -> DraftTree | None:
        """The tree for the next step; None: plain decoding.

        remaining: tokens that each sequence of the batch still has to come. unread: known ones that the drafter has to
        read before it can draft, in tokens of the target. others_wait: whether sequences wait for a place in the batch.
        """
        begin = time.perf_counter()
        tree = self._next_tree(remaining, unread, others_wait)
        self.is_drafting = tree is not None
        self.choosing += time.perf_counter() - begin
        return tree

    def _costs_of(self, batch_size: int) -> Costs:
        bucket = _bucket(batch_size)
        if bucket not in self.costs:
            self.costs[bucket] = Costs()
        return self.costs[bucket]

    def _next_tree(self, remaining: list[int], unread: float, others_wait: bool) -> DraftTree | None:
        batch_size, longest = len(remaining), max(remaining)
        costs = self._costs_of(batch_size)
        self.is_catching_up = unread > 0
        if costs.plain:
            rows = batch_size * ROW_TOKENS * self.seconds_of_token / costs.plain_seconds
            self.by_rows = 1.0 if others_wait else min(rows, 1.0)
        # Much may have been won, but not much of it may be lost.
        self.lost = max(self.lost, -MOST_SAVED * costs.plain_seconds)
        if not self.is_informed or len(costs.plain) < PLAIN_STEPS or costs.since_plain >= costs.plain_age:
            return None
        if costs.judged_at != self.evidence:
            self._judge(costs, batch_size)
        share = LOSS_SHARE * min(longest, HORIZON) * costs.plain_seconds
        allowance = LOSS_SHARE * self.elapsed + share + min(self.saved, share) - self.lost
        allowance += CREDIT * max(costs.gain, 0.0)
        if allowance <= 0.0:
            return None
        catching_up = unread * self.seconds_of_token
        assert costs.probe is not None
        tree = None
        if not self.can_rehearse and costs.steps >= costs.next_probe:  # perhaps drafts pay by now
            costs.probes = max(costs.probes, 1)
        if costs.probes > 0:
            promise = PROMISE + costs.probe_loss / costs.plain_seconds
            has_promise = not self.can_rehearse or costs.probe_tokens >= promise
            if has_promise and costs.probe_loss + catching_up <= allowance:
                tree = costs.probe
        # What the drafter has to read first must be paid by the tokens that are still to come.
        elif costs.gain >= MIN_GAIN * costs.plain_seconds and catching_up <= costs.gain * longest:
            assert costs.tree is not None
            loss = costs.seconds(costs.tree.num_nodes, costs.tree.max_depth) - costs.plain_seconds
            tree = costs.tree if loss <= allowance else None
        return tree

    def observe(self, remaining: list[int], seconds: float, trees: TreeBatch, accept_index: Tensor) -> None:
        """Takes in a step's seconds, trees and accept_index [B, S]. remaining: as it was before the step."""
        begin = time.perf_counter()
        self._observe(remaining, seconds, trees, accept_index)
        spent = time.perf_counter() - begin  # after the step
        self.clock, self.elapsed, self.lost = self.clock + spent, self.elapsed + spent, self.lost + spent

    def _observe(self, remaining: list[int], seconds: float, trees: TreeBatch, accept_index: Tensor) -> None:
        batch_size = len(remaining)
        costs = self._costs_of(batch_size)
        costs.steps += 1
        self.clock += seconds
        self.elapsed += seconds
        self.since_rehearsal += seconds
        # The machine may have done something else meanwhile.
        self.lost += min(self.choosing, costs.plain_seconds)
        seconds, self.choosing = seconds - self.choosing, 0.0
        if not self.is_drafting:
            costs.measure(seconds)
            costs.since_plain = 0
            return
        costs.since_plain += 1
        costs.last_drafted = costs.steps
        if not self.is_warm:
            self.is_warm = True
            self.lost += min(max(seconds - costs.plain_seconds, 0.0), costs.plain_seconds)
            return
        costs.probes -= costs.probes > 0
        if not self.is_catching_up:
            nodes, depth = trees.parents.shape[0] / max(batch_size, 1), float(trees.depths.max())
            costs.drafted.append((nodes, depth, seconds))
            costs.most_nodes = max(costs.most_nodes, round(nodes))
            if costs.model is not None:
                seconds = min(seconds, HICCUP * costs.seconds(nodes, depth))
            elif len(costs.drafted) > 2:
                seconds = min(seconds, HICCUP * statistics.median(taken for _, _, taken in costs.drafted))
        self._keep(KEPT_IN_STEP)
        self._count(trees, accept_index.tolist(), remaining)
        if costs.plain:
            gained = (accept_index >= 0).sum(dim=1).tolist()
            ahead = max(remaining) - max(left - count for left, count in zip(remaining, gained, strict=True))
            progress = self.by_rows * sum(gained) / batch_size + (1 - self.by_rows) * ahead
            self.lost += seconds - progress * costs.plain_seconds

    def observe_reading(self, num_tokens: int, seconds: float) -> None:
        """Takes in the seconds of a pass of the target over prompts."""
        self.seconds_of_token = seconds / max(num_tokens, 1)

    @property
    def may_rehearse(self) -> bool:
        """Whether rehearsals have taken less than their share."""
        return self.can_rehearse and self.since_rehearsal * REHEARSAL_SHARE >= self.rehearsal

    def cannot_rehearse(self) -> None:
        self.can_rehearse, self.is_informed = False, True

    def observe_rehearsal(
        self, remaining: list[int], drafts: list[int], trees: TreeBatch, texts: list[list[int]], begin: float
    ) -> None:
        """Takes in a rehearsal that began at `begin`: these trees were guessed where the texts went on as given.

        remaining: tokens that the sequence of each text still has to come.
        """
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
        self._keep(KEPT_IN_REHEARSAL)
        self._count(trees, paths, remaining)
        self.rehearsal, self.since_rehearsal, self.is_informed = time.perf_counter() - begin, 0.0, True
        self.choosing += self.rehearsal

    def _judge(self, costs: Costs, batch_size: int) -> None:
        """Updates what drafts would gain by all that is known now, and from time to time the best tree."""
        costs.judged_at = self.evidence
        # Without rehearsals, drafts are tried from time to time anyway.
        if self.can_rehearse and costs.tree is not None and costs.is_stale:
            costs.forget_drafted()
        if costs.probe is None:
            # A node of all trees in the batch takes at most this long.
            node_seconds = batch_size * ROW_TOKENS * self.seconds_of_token
            nodes = min(len(PROBE) if (len(PROBE) - 1) * node_seconds <= costs.plain_seconds else 2, self.max_nodes)
            costs.probe = DraftTree(PROBE[: nodes if self.max_depth > 1 else min(nodes, 3)])
            costs.probe_loss = max(node_seconds * (nodes - 1), 0.5 * costs.plain_seconds)
        if costs.tree is None and self.can_rehearse:
            costs.probe_tokens = self._tokens(costs.probe)
            costs.gain = costs.plain_seconds - (costs.plain_seconds + costs.probe_loss) / costs.probe_tokens
        if costs.drafted and costs.probes == 0 and self.clock >= costs.next_choice:
            begin = time.perf_counter()
            self._choose(costs)
            costs.next_choice = self.clock + (time.perf_counter() - begin) / CHOICE_SHARE
        if costs.tree is not None:
            seconds = costs.seconds(costs.tree.num_nodes, costs.tree.max_depth)
            costs.gain = costs.plain_seconds - seconds / self._tokens(costs.tree)
            costs.next_probe = costs.steps + min(max(costs.steps // 4, 4), 64)

    def _choose(self, costs: Costs) -> None:
        assert costs.probe is not None
        costs.fit()
        costs.probe_loss = max(costs.seconds(costs.probe.num_nodes, costs.probe.max_depth) - costs.plain_seconds, 0.0)
        tree = choose_tree(
            self.acceptance,
            lambda n: costs.seconds(n, 0) if n > 1 else costs.plain_seconds,
            # The time of trees much larger than those tried is a guess.
            max_nodes=min(self.max_nodes, 2 * max(len(PROBE), costs.most_nodes)),
            max_depth=self.max_depth,
            level_cost=costs.seconds(1, 1) - costs.seconds(1, 0),
        )
        costs.tree = tree if tree.num_nodes > 1 else costs.probe

    def _tokens(self, tree: DraftTree) -> float:
        """Tokens per step if fewer first guesses are right than seen: by one standard error, to be careful."""
        acceptance = self.acceptance
        first = min(float(acceptance[0].sum()), 1.0)
        careful = max(first - math.sqrt(first * (1 - first) / self.trials[0, 0]), 0.0)
        return 1 + (expected_tokens(tree, acceptance) - 1) * careful / first if first > 0 else 1.0

    def _keep(self, share: float) -> None:
        """Keeps this share of the evidence."""
        self.hits = share * self.hits + (1 - share) * PRIOR_WEIGHT * PRIOR
        self.trials = share * self.trials + (1 - share) * PRIOR_WEIGHT

    def _count(self, trees: TreeBatch, paths: list[list[int]], remaining: list[int]) -> None:
        """Enters which children of the accepted nodes were accepted, weighed by what a token of that sequence saves."""
        self.evidence += 1
        longest = max(remaining)
        of_any, of_last = self.by_rows / len(remaining), (1 - self.by_rows) / remaining.count(longest)
        of_others = of_any / (of_any + of_last)
        first_child, next_sibling = trees.first_child.tolist(), trees.next_sibling.tolist()
        for offset, path, left in zip(trees.cu_nodes.tolist(), paths, remaining, strict=False):
            weight = 1.0 if left == longest else of_others
            if first_child[offset] < 0:  # the drafter had no guess
                self.trials[0] += weight
                continue
            accepted = set(path)
            for depth, node in enumerate(path[:MAX_DEPTH]):
                if node < 0:
                    break
                child, rank = first_child[offset + node], 0
                while child >= 0 and rank < MAX_RANKS:
                    self.trials[depth, rank] += weight
                    self.hits[depth, rank] += weight * (child in accepted)
                    child, rank = next_sibling[offset + child], rank + 1


def _solved(left: list[list[float]], right: list[float]) -> list[float]:
    """Solves left @ x = right, [3, 3] and regular. (A linear algebra library's first call takes milliseconds.)"""

    def det(a: list[float], b: list[float], c: list[float]) -> float:
        cross = b[1] * c[2] - b[2] * c[1], b[2] * c[0] - b[0] * c[2], b[0] * c[1] - b[1] * c[0]
        return sum(x * y for x, y in zip(a, cross, strict=True))

    columns = [list(column) for column in zip(*left, strict=True)]
    return [det(*(right if i == j else columns[j] for j in range(3))) / det(*columns) for i in range(3)]


def _bucket(batch_size: int) -> int:
    """Batches of about the same size cost about the same."""
    return batch_size.bit_length() if batch_size > 4 else -batch_size
