"""vLLM's scheduler, with grammars on trees: a mask row per node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from pagedtree.grammars import DepthFirstMatcher, GrammarFill, GrammarMasks, GrammarMatcher, TokenTree
from pagedtree.integrations.vllm.proposals import host_trees
from pagedtree.integrations.xgrammar import XGrammarMatcher


@dataclass
class DraftTrees(DraftTokenIds):
    """The worker's message about its proposals. parents: int32 [n + 1] of each request, the root included, or None."""

    parents: list[np.ndarray | None] = field(default_factory=list)


class TreeScheduler(Scheduler):
    """Extends these methods of vLLM's scheduler:

    update_draft_token_ids  vLLM reads a chain and drops drafts after the first forbidden one
    schedule                starts to fill the masks, so that it happens while the target's pass runs
    get_grammar_bitmask     waits for them
    _update_request_as_session  drops accepted tokens behind a stop, which vLLM counts as computed
    """

    _fills_early = True  # whether drafts are known when a step is scheduled

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._masks = GrammarMasks([], self.vllm_config.model_config.get_vocab_size())
        self._fill: tuple[list[str], GrammarFill] | None = None

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Keeps all drafts: their parents' masks rule out forbidden ones."""
        for request_id, tokens, parents in self._trees_of(draft_token_ids):
            request = self.requests[request_id]
            request.spec_token_ids = [] if request.is_prefill_chunk else tokens
            request.draft_parents = parents

    def _trees_of(self, draft_token_ids: DraftTokenIds) -> Iterator[tuple[str, list[int], np.ndarray | None]]:
        trees = getattr(draft_token_ids, "parents", None) or [None] * len(draft_token_ids.req_ids)
        for request_id, tokens, parents in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, trees, strict=True
        ):
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                yield request_id, tokens, parents

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        is_cut = session.num_computed_tokens >= session.num_tokens
        session.num_computed_tokens = min(session.num_computed_tokens, session.num_tokens - 1)
        super()._update_request_as_session(session, update)
        if is_cut:  # read again, as after a preemption: drafters have read the dropped tokens, too
            self._free_request_blocks(session)
            self.encoder_cache_manager.free(session)
            session.num_computed_tokens = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        self._fill = None
        if output.has_structured_output_requests and self._fills_early:
            self._fill = self._start_fill(output)
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        if self._fill is None:
            return None
        request_ids, fill = self._fill
        self._fill = None
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        # Runner V2's placeholders for drafts that only the device knows are no drafts here.
        drafts = [scheduled.get(request_id, []) for request_id in request_ids]
        num_acceptable = [len(tokens) if max(tokens, default=-1) >= 0 else 0 for tokens in drafts]
        return GrammarOutput(request_ids, fill.result().numpy(), num_acceptable)

    def _start_fill(self, output: SchedulerOutput) -> tuple[list[str], GrammarFill] | None:
        request_ids = [
            request_id
            for request_id in output.num_scheduled_tokens
            if (request := self.requests.get(request_id)) is not None  # it may have ended since it was scheduled
            and request.use_structured_output
            and not request.is_prefill_chunk
        ]
        if not request_ids:
            return None
        drafts = [output.scheduled_spec_decode_tokens.get(request_id, []) for request_id in request_ids]
        parents = [
            tree_of(len(tokens), getattr(self.requests[request_id], "draft_parents", None))
            for request_id, tokens in zip(request_ids, drafts, strict=True)
        ]
        self._masks.matchers = [self._matcher(self.requests[request_id]) for request_id in request_ids]
        tokens = torch.tensor([token for of_request in drafts for token in (-1, *of_request)], dtype=torch.int64)
        return request_ids, self._masks.fill(tokens, host_trees(parents))

    def _matcher(self, request: Any) -> GrammarMatcher | None:
        """Returns None if every token is allowed, as after a grammar's end: vLLM stops there, unless EOS is ignored."""
        manager = self.structured_output_manager
        grammar = request.structured_output_request.grammar
        if manager._get_constraint_bounds(request, ()).constraint_start == 0:
            if grammar.is_terminated():
                return None
            if isinstance(grammar, XgrammarGrammar):
                # Made once per request, as that fills a row to see how wide it is.
                matcher: _XgrammarMatcher | None = getattr(request, "draft_matcher", None)
                if matcher is None or matcher.matcher is not grammar.matcher:
                    matcher = request.draft_matcher = _XgrammarMatcher(grammar)
                return matcher
        return _VllmMatcher(manager, request)

    def shutdown(self) -> None:
        self._masks.close()
        super().shutdown()


def tree_of(num_drafts: int, parents: np.ndarray | None) -> np.ndarray:
    """Returns the parents of the root and `num_drafts` drafts; a chain if vLLM scheduled drafts without a proposal."""
    if parents is None or len(parents) <= num_drafts:
        parents = np.arange(-1, num_drafts)
    return parents[: num_drafts + 1].astype(np.int32)


class _XgrammarMatcher(XGrammarMatcher):
    def __init__(self, grammar: XgrammarGrammar) -> None:
        super().__init__(grammar.matcher, grammar.vocab_size)
        self.ends = np.array(self.stop_token_ids, dtype=np.int64)
        self.stop_token_ids = ()  # where no token may follow none is allowed instead: vLLM calls that an error

    def fill_tree(self, tree: TokenTree, mask: np.ndarray) -> None:
        super().fill_tree(tree, mask)
        mask[np.isin(tree.tokens, self.ends) & ~(mask != 0).any(axis=1)] = -1


class _VllmMatcher(DepthFirstMatcher):
    """A grammar of any of vLLM's engines, which may begin inside the tree, after reasoning. After its end vLLM allows
    every token."""

    stop_token_ids: Sequence[int] = ()

    def __init__(self, manager: Any, request: Any) -> None:
        self.manager, self.request = manager, request
        self.grammar = request.structured_output_request.grammar
        self.vocab_size = 32 * manager.backend.allocate_token_bitmask(1).shape[1]
        self._path: list[int] = []
        self._fed: list[bool] = []  # whether the grammar has read the token

    def accept(self, token: int) -> bool:
        if self._has_ended():
            return False
        path = [*self._path, token]
        is_fed = self._bounds(path).grammar_start < len(path)
        if is_fed and not self.grammar.accept_tokens(self.request.request_id, [token]):
            return False
        self._path = path
        self._fed.append(is_fed)
        return True

    def rollback(self, count: int) -> None:
        for _ in range(count):
            self._path.pop()
            if self._fed.pop():
                self.grammar.rollback(1)

    def is_terminated(self) -> bool:
        return False

    def fill_row(self, row: np.ndarray) -> None:
        if self._is_constrained() and not self._has_ended():
            self.grammar.fill_bitmask(torch.from_numpy(row)[None], 0)

    def _has_ended(self) -> bool:
        return self._is_constrained() and bool(self.grammar.is_terminated())

    def _is_constrained(self) -> bool:
        return bool(self._bounds(self._path).constraint_start <= len(self._path))

    def _bounds(self, path: Sequence[int]) -> Any:
        return self.manager._get_constraint_bounds(self.request, path)
