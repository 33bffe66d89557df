"""`scheduler.TreeScheduler` for asynchronous scheduling, where a step is scheduled before the last one's result."""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds

from pagedtree.integrations.vllm.scheduler import TreeScheduler


class AsyncTreeScheduler(TreeScheduler, AsyncScheduler):
    """scheduler_cls for asynchronous scheduling, on runner V2; fills grammar masks once the target's pass has begun."""

    _fills_early = False

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        for request_id, tokens, parents in self._trees_of(draft_token_ids):
            if placeholders := scheduled.get(request_id):
                scheduled[request_id] = tokens[: len(placeholders)]
                self.requests[request_id].draft_parents = parents

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        if scheduler_output.has_structured_output_requests:
            self._fill = self._start_fill(scheduler_output)
        return super().get_grammar_bitmask(scheduler_output)
