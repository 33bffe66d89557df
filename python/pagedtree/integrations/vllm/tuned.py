"""Chooses the nodes of each request of vLLM's batch, for the highest throughput by `generation.tree_tuner`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagedtree import Draft
from pagedtree.generation.tree_tuner import PLAIN_ROWS, Kept, Outcome, Plan, TreeTuner
from pagedtree.integrations.vllm.proposals import NO_GUESS, Proposal, host_proposals, host_trees


@dataclass(frozen=True)
class Pass:
    """A target pass over `num_rows` tokens of these requests, drafts included. new_tokens: of each; none in prefill."""

    request_ids: Sequence[str]
    new_tokens: Sequence[Sequence[int]]
    num_rows: int
    seconds: float


@dataclass
class _Step:
    request_ids: Sequence[str]
    plan: Plan
    begin: float
    proposals: Sequence[Proposal] = ()
    kept: Kept | None = None
    drafting: float = 0.0


class BatchTuner:
    """Chooses among a drafter's proposed nodes. After each pass:

        plan = tuner.plan(passed, request_ids)          # learns from the last proposals
        if plan.depth is not None:
            proposals = tuner.keep(proposals)

    max_depth, grows_by_level: the drafter's. clock: seconds.
    """

    def __init__(
        self, max_depth: int, grows_by_level: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.tuner, self._clock = TreeTuner(max_depth, grows_by_level), clock
        self._step: _Step | None = None

    def plan(self, passed: Pass, request_ids: Sequence[str], unread: float = 0.0) -> Plan:
        """Decides how deep to draft for these requests. unread: target tokens that the drafter has to read first."""
        now = self._clock()
        self._learn(passed, now)
        # Whatever request ends, another one may come: no token counts more than others.
        plan = self.tuner.plan([1] * len(request_ids), unread, others_wait=True)
        self._step = _Step(request_ids, plan, now)
        return plan

    def keep(self, proposals: Sequence[Proposal]) -> list[Proposal]:
        step = self._step
        assert step is not None
        if any(tokens for tokens, _, _ in proposals):
            drafted_tokens = [token for tokens, _, _ in proposals for token in (-1, *tokens)]
            trees = host_trees([parents for _, parents, _ in proposals])
            draft = Draft(torch.tensor(drafted_tokens, dtype=torch.int64), trees)
            confidences = [log_probs for _, _, log_probs in proposals if log_probs is not None]
            confidence = torch.from_numpy(np.concatenate(confidences)) if len(confidences) == len(proposals) else None
            step.kept = step.plan.keep(draft, confidence)
            if step.kept.num_drafted == 0:
                proposals = [NO_GUESS] * len(proposals)
            elif step.kept.rows is not None:
                proposals = host_proposals(step.kept.draft)
        step.proposals, step.drafting = proposals, self._clock() - step.begin
        return list(proposals)

    def _learn(self, passed: Pass, now: float) -> None:
        step, self._step = self._step, None
        decoding = set() if step is None else set(step.request_ids)
        # A pass over few tokens says little about prefill: most of its cost is fixed.
        if not decoding.issuperset(passed.request_ids) and passed.num_rows >= PLAIN_ROWS:
            self.tuner.learn_reading(passed.num_rows, passed.seconds)
        if step is None:
            return
        new = dict(zip(passed.request_ids, passed.new_tokens, strict=True))
        num_drafted, paths = 0, [list[tuple[int, int]]() for _ in step.request_ids]
        if step.kept is not None:
            num_drafted = step.kept.num_drafted
            token_lists = [new.get(request_id, ()) for request_id in step.request_ids]
            paths = [accepted_path(*pair) for pair in zip(step.proposals, token_lists, strict=True)]
        # Requests that are read, end or begin anew, and drafts that found no room, make it a pass of another size.
        is_whole = decoding == new.keys() and passed.num_rows == len(decoding) + num_drafted
        nodes, tokens = (_padded([[node[i] for node in path] for path in paths]) for i in range(2))
        seconds = now - step.begin if is_whole else None
        self.tuner.learn(step.plan, Outcome(seconds, nodes, tokens, step.drafting, step.kept))
        if step.plan.depth and not step.plan.is_look:
            # Hours in which drafts paid give no right to try them for minutes once they do not.
            self.tuner.elapsed = self.tuner.looking = 0.0


def accepted_path(proposal: Proposal, new_tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the accepted nodes, the root first, each with the token after it; none without a new token."""
    tokens, parents, _ = proposal
    path: list[tuple[int, int]] = []
    for token in new_tokens:
        node = 0
        if path:
            last, wanted = path[-1]
            found = (i for i in range(last + 1, len(parents)) if parents[i] == last and tokens[i - 1] == wanted)
            node = next(found, -1)
        if node < 0:
            break
        path.append((node, token))
    return path


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.int64)
