"""A decode step in fixed buffers, drafting to commit, which a CUDA graph can hold (`generate(cuda_graph=True)`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from pagedtree import Draft, commit, compact_kv, prepare_step
from pagedtree.generation.drafters import Drafter, NgramDrafter, StepResult
from pagedtree.generation.logprobs import Found, LogprobReader
from pagedtree.generation.mirror import Mirror
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.paged_cache import PagedCache
from pagedtree.generation.paged_step import PagedStep
from pagedtree.generation.recurrent_step import RecurrentStep
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.generation.token_options import RequestRows

__all__ = ["FixedStep", "FixedSteps", "check_device", "check_drafter"]

IDLE = -1


class FixedStep:
    """One decode step of up to `batch_size` sequences; the rows past them are idle.

    The host writes into the buffers what they do not hold yet, replays, and reads the report, which is the only
    synchronisation. What the step changes on the device (history, caches, positions) is still there at the next step. A
    graph is captured at the first call, while all rows are idle: they draft, write and commit nothing.
    """

    # Tests run the step itself instead of a graph of it, on any device.
    captures = True

    def __init__(
        self,
        model: PackedModel,
        cache: PagedCache,
        sampling: Sampling,
        drafter: Drafter,
        history: Tensor,
        eos_ids: Tensor | None,
        sequences: list[GeneratedSequence],
        batch_size: int,
        requests: RequestRows | None = None,
        logprobs: LogprobReader | None = None,
    ) -> None:
        self.model, self.cache, self.sampling, self.eos_ids = model, cache, sampling, eos_ids
        self.history = history  # [sequences + 1, capacity]: the last row is that of idle rows
        self.drafter, self.batch_size = drafter, batch_size
        self.vocab_size = model.vocab_size
        device = cache.device
        max_tokens = max(sequence.max_length for sequence in sequences) + drafter.max_nodes
        self.rows = Mirror((batch_size,), torch.int64, device, fill=len(sequences))
        self.start = Mirror((batch_size,), torch.int32, device, fill=IDLE)
        self.page_table = Mirror((batch_size, cache.pages_for(max_tokens)), torch.int32, device)
        self.slots = Mirror((batch_size,), torch.int32, device, fill=IDLE)
        self.prompt_lens = Mirror((batch_size,), torch.int64, device)
        if cache.states is not None:
            prompts = {sequence.group for sequence in sequences if sequence.shared_len}
            cache.states.reserve(len(sequences) + len(prompts))
        self.requests, self.logprobs = requests, logprobs
        self.options = None if requests is None else requests.buffers(batch_size)
        drafter.capture(model, sequences, batch_size)
        self._graph: Any = None
        self._result: StepResult | None = None
        self._report: Tensor | None = None
        self._found: Found | None = None

    def __call__(self, sequences: list[GeneratedSequence]) -> tuple[StepResult, list[list[int]], Found | None]:
        """Runs the step for these sequences: what came of it, a report, and log-probabilities where they are read.

        Each row of the report is tokens, their number, finished, status.
        """
        self.drafter.select(sequences, self.batch_size)
        if self.captures and self._graph is None:
            self._graph = self._capture()
        self.rows.set([sequence.index for sequence in sequences])
        self.start.set([sequence.root for sequence in sequences])
        self.page_table.set([self.cache.pages(sequence.index) for sequence in sequences])
        if self.cache.states is not None:
            self.slots.set([self.cache.states.slot(sequence.index) for sequence in sequences])
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
        # The step has moved on by itself.
        self.start.known(
            [
                IDLE if finished else s.root + count
                for s, (*_, count, finished, _) in zip(sequences, report, strict=True)
            ]
        )
        self._result.sequences = sequences
        return self._result, report, self._found

    def run(self) -> None:
        """The step, on the device alone."""
        rows, start = self.rows.tensor, self.start.tensor.clone()
        active = start >= 0
        history = self.history.index_select(0, rows)
        lengths = torch.where(active, start + 1, 0)
        draft = cast(Draft, self.drafter.propose(history, lengths, active, rows))
        trees = draft.trees
        num_nodes = trees.parents.shape[0]

        # The root's token. An idle row may have no tree; its token goes behind the last node.
        roots = history.gather(1, (lengths.long() - 1).clamp(min=0)[:, None])[:, 0]
        root_rows = torch.where(active, trees.cu_nodes[:-1].long(), num_nodes)
        tokens = torch.cat([draft.draft_tokens.long(), roots[:1]]).index_copy(0, root_rows, roots)[:num_nodes]
        draft = draft._replace(draft_tokens=tokens)
        positions, seq_lens, cu_seqlens_q, slots = prepare_step(
            trees, self.page_table.tensor, start, self.cache.page_size, total_q=num_nodes
        )
        is_tree = trees.max_nodes > 1
        step = PagedStep(
            self.cache, self.page_table.tensor, seq_lens, cu_seqlens_q, slots, trees.mask if is_tree else None,
            trees.cu_nodes.diff() if is_tree else None, max_seqlen_q=trees.max_nodes,
        )  # fmt: skip
        if self.cache.states is not None:
            step.recurrent = RecurrentStep.of(
                self.cache.states, self.slots.tensor, self.prompt_lens.tensor, trees, cu_seqlens_q, positions
            )
        input_ids = tokens.clamp(0, self.vocab_size - 1)
        logits, hidden, _ = self.model.run(input_ids, positions, step, needs_hidden=self.drafter.needs_hidden)

        sampling, options = self.sampling.at(rows), self.options
        if self.requests is not None and options is not None:
            options = self.requests.with_text(options, history, lengths)
        verdict = sampling.verify(logits, draft, self.drafter.draft_law, start, options)
        if is_tree:
            tensors = self.cache.tensors()
            compact_kv(tensors, self.page_table.tensor, start, verdict.accept_index, verdict.num_accepted)
        if step.recurrent is not None:
            step.recurrent.advance(verdict.accept_index, verdict.num_accepted)
        committed = commit(
            verdict, trees, start, history=history, history_lens=lengths, eos_ids=self.eos_ids, node_map=draft.node_map,
            options=None if self.logprobs is not None and self.logprobs.is_processed else options,
        )  # fmt: skip
        if self.logprobs is not None:
            self._found = self.logprobs.read(logits, verdict, committed, start, sampling, options, None)
        self.history.index_copy_(0, rows, history)
        self.start.tensor.copy_(torch.where(committed.finished, IDLE, committed.start))
        self._result = StepResult([], 0, start, draft, verdict, committed, logits, hidden)
        self.drafter.observe(self._result, rows)
        extra = torch.stack([committed.num_tokens, committed.finished, verdict.status], dim=1)
        self._report = torch.cat([verdict.tokens, extra], dim=1)

    def _capture(self) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries allocate what they need at the first call
            self.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph


class FixedSteps:
    """Fixed steps for any number of sequences: one for each power of two, made when it is needed."""

    def __init__(self, make: Callable[[int], FixedStep]) -> None:
        self._make = make
        self._steps: dict[int, FixedStep] = {}

    def of(self, num_sequences: int) -> FixedStep:
        batch_size = 1 << (num_sequences - 1).bit_length()
        if batch_size not in self._steps:
            self._steps[batch_size] = self._make(batch_size)
        return self._steps[batch_size]


def check_device(device: torch.device) -> None:
    if FixedStep.captures and device.type != "cuda":
        raise ValueError(f"cuda_graph: expected a model on a CUDA device, got one on {device}")


def check_drafter(drafter: Drafter) -> None:
    """Raises ValueError for a drafter whose work cannot be captured in a graph."""
    if not vars(type(drafter)).get("is_capturable"):
        raise ValueError(
            "cuda_graph: expected a drafter of NoDrafter, NgramDrafter, MedusaDrafter, ModelDrafter, got"
            f" {type(drafter).__name__}"
        )
    if isinstance(drafter, NgramDrafter) and drafter.remember:
        raise ValueError(
            f"cuda_graph: expected NgramDrafter(remember=0), whose text has a fixed size, got {drafter.remember}"
        )
