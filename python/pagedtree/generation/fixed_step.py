"""Decode steps in fixed buffers, for CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedtree._arguments import refusal
from pagedtree.check_draft import as_draft
from pagedtree.generation.decode_step import DecodeStep
from pagedtree.generation.drafters import Drafter, NgramDrafter, StepResult
from pagedtree.generation.drafters.limits import last_position, limited
from pagedtree.generation.host_mirror import Mirror
from pagedtree.generation.logprobs import Found
from pagedtree.generation.scheduler import GeneratedSequence

IDLE = -1


class FixedStep:
    """One decode step of up to `batch_size` sequences; the rows past them are idle.

    The host updates the buffers, replays, and reads the report, the only synchronisation. The device's changes
    (history, caches, positions) persist. The first call captures the graph with idle rows, which change nothing.
    """

    # Tests set this to False to run the step without a graph, on any device.
    captures = True

    def __init__(
        self, decode_step: DecodeStep, history: Tensor, sequences: list[GeneratedSequence], batch_size: int
    ) -> None:
        self.decode_step, self.history, self.batch_size = decode_step, history, batch_size
        self.drafter = drafter = decode_step.drafter
        self.cache = cache = decode_step.cache
        device = cache.device
        max_tokens = max(sequence.max_length for sequence in sequences) + drafter.max_nodes
        self.rows = Mirror((batch_size,), torch.int64, device, fill=len(sequences))
        self.start = Mirror((batch_size,), torch.int32, device, fill=IDLE)
        self.page_table = Mirror((batch_size, cache.pages_for(max_tokens)), torch.int32, device)
        self.state_index = Mirror((batch_size,), torch.int32, device, fill=IDLE)
        self.prompt_lens = Mirror((batch_size,), torch.int64, device)
        last = [*(last_position(sequence, drafter) for sequence in sequences), 0]
        self.last = torch.tensor(last, dtype=torch.int32).to(device)
        if cache.states is not None:
            prompts = {sequence.group for sequence in sequences if sequence.shared_len}
            cache.states.reserve(len(sequences) + len(prompts))
        self.requests = decode_step.policy.options
        self.options = None if self.requests is None else self.requests.buffers(batch_size)
        drafter.capture(decode_step.model, sequences, batch_size)
        self._graph: Any = None
        self._result: StepResult | None = None
        self._report: Tensor | None = None
        self._found: Found | None = None

    def __call__(self, sequences: list[GeneratedSequence]) -> tuple[StepResult, list[list[int]], Found | None]:
        """Runs the step for these sequences. Returns as `DecodeStep.judge` does, with the report on the host."""
        self.drafter.select_captured(sequences, self.batch_size)
        if self.captures and self._graph is None:
            self._graph = self._capture()
        self.rows.set([sequence.index for sequence in sequences])
        self.start.set([sequence.root for sequence in sequences])
        self.page_table.set([self.cache.pages(sequence.index) for sequence in sequences])
        if self.cache.states is not None:
            self.state_index.set([self.cache.states.state_index(sequence.index) for sequence in sequences])
            self.prompt_lens.set([sequence.prompt_len for sequence in sequences])
        if self.requests is not None and self.options is not None:
            idle = self.batch_size - len(sequences)
            rows = [*(sequence.index for sequence in sequences), *[self.requests.idle_row] * idle]
            lengths = [*(len(sequence.tokens) for sequence in sequences), *[0] * idle]
            self.requests.refresh(self.options, rows, self.history, lengths)
        if self.captures:
            self._graph.replay()
        else:
            self.run()
        assert self._result is not None and self._report is not None
        report = self._report.tolist()[: len(sequences)]
        # The device has already advanced the positions.
        self.start.known(
            [
                IDLE if finished else s.root + count
                for s, (*_, count, finished, _) in zip(sequences, report, strict=True)
            ]
        )
        self._result.sequences = sequences
        return self._result, report, self._found

    def run(self) -> None:
        """Runs the step. Device only."""
        rows, start = self.rows.tensor, self.start.tensor.clone()
        is_active = start >= 0
        history, lengths = self.history.index_select(0, rows), start + 1
        proposal = self.drafter.propose_captured(history, lengths, is_active, rows)
        draft = as_draft(proposal, self.batch_size, history.device)
        if draft.trees.max_depth > 0:
            draft, _ = limited(draft, self.last[rows] - start)
        roots = history.gather(1, start.long().clamp(min=0)[:, None])[:, 0]
        states = self.state_index.tensor, self.prompt_lens.tensor
        packed = self.decode_step.pack(draft, roots, self.page_table.tensor, start, *states, is_active=is_active)
        output = self.decode_step.run(packed)
        options = self.options
        if self.requests is not None and options is not None:
            options = self.requests.with_text(options, history, lengths)
        self._result, self._report, self._found = self.decode_step.judge(
            packed, [], output, history, self.decode_step.policy.sampling.at(rows), options, node_map=draft.node_map
        )
        self._result.features = output.features
        self.decode_step.compact()
        self.history.index_copy_(0, rows, history)
        committed = self._result.commit
        self.start.tensor.copy_(torch.where(committed.finished, IDLE, committed.start))
        self.drafter.observe_captured(self._result, rows)

    def _capture(self) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries allocate at the first call
            self.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph


def check_device(device: torch.device) -> None:
    if FixedStep.captures and device.type != "cuda":
        raise refusal("cuda_graph", "a model on a CUDA device", f"one on {device}")


def check_drafter(drafter: Drafter) -> None:
    kind = type(drafter.given)
    if not vars(kind).get("is_capturable"):
        wanted = "a drafter of NoDrafter, NgramDrafter, MedusaDrafter, ModelDrafter, EagleDrafter, MtpDrafter"
        raise refusal("cuda_graph", wanted, kind.__name__)
    if isinstance(drafter, NgramDrafter) and drafter.remember:
        raise refusal("cuda_graph", "NgramDrafter(remember=0), whose text has a fixed size", drafter.remember)
