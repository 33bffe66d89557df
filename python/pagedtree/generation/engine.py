"""The loop behind `generate`: draft, one packed pass of the model, verify, compact, commit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from pagedtree import Draft, TreeBatch, Verdict, commit, compact_kv, prepare_step, slot_mapping
from pagedtree.generation.drafters.base import Drafter, FeatureRows, StepResult, roots_only
from pagedtree.generation.drafters.bounded import bounded, without_padding
from pagedtree.generation.fixed_step import FixedStep, FixedSteps, check_drafter
from pagedtree.generation.grammar_steps import GrammarSteps
from pagedtree.generation.logprobs import Found, LogprobReader, TokenLogprobs
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.paged_cache import PagedCache
from pagedtree.generation.paged_step import PagedStep, PrefixPass
from pagedtree.generation.recurrent_step import RecurrentStep
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import Batch, GeneratedSequence, Scheduler
from pagedtree.generation.stats import GenerationStats
from pagedtree.generation.stop_strings import StopStrings
from pagedtree.generation.token_options import RequestRows
from pagedtree.generation.tree_tuner import Kept, Outcome, Plan, TreeTuner

__all__ = ["Engine"]

STATUS_NOT_FINITE = 2


@dataclass
class Pass:
    """One packed pass: sequences that read known tokens come first, then those that decode a tree, then padding.

    verified: the sequences that gain tokens: those that read up to their last token (the first num_read), and all that
    decode. start and draft are theirs; logit_rows (None = all) are the rows of their nodes.
    decode_table: int32 [D, max_pages], the pages of those that decode.
    """

    step: PagedStep
    input_ids: Tensor
    positions: Tensor
    verified: list[GeneratedSequence]
    num_read: int
    decode_table: Tensor
    start: Tensor
    draft: Draft
    logit_rows: Tensor | None


class Engine:
    """Generates until every sequence of the scheduler is finished."""

    def __init__(
        self,
        model: PackedModel,
        scheduler: Scheduler,
        drafter: Drafter,
        sampling: Sampling,
        eos_ids: list[int],
        min_shared_tokens: int | None,
        on_tokens: Callable[[int, list[int]], object] | None,
        on_step: Callable[[StepResult], None] | None,
        stats: GenerationStats,
        is_fixed: bool = False,
        tuner: TreeTuner | None = None,
        stop_strings: StopStrings | None = None,
        requests: RequestRows | None = None,
        grammars: GrammarSteps | None = None,
        logprobs: LogprobReader | None = None,
    ) -> None:
        self.model, self.scheduler, self.sampling = model, scheduler, sampling
        self.drafter = bounded(drafter)
        self.cache: PagedCache = scheduler.cache
        self.device = self.cache.device
        self.eos_ids = self._to_device(eos_ids, torch.int64) if eos_ids else None
        self.min_shared_tokens = min_shared_tokens
        self.on_tokens, self.on_step, self.stop_strings = on_tokens, on_step, stop_strings
        self.requests, self.grammars, self.logprobs = requests, grammars, logprobs
        self.stats = stats
        if logprobs is not None:
            for each in stats.sequences:
                each.logprobs = TokenLogprobs()
        self.tuner, self.has_begun_to_tune = tuner, False
        if tuner is not None:  # to read a token takes as long as there are weights
            self.draft_share = getattr(drafter, "num_weights", 0) / max(model.num_weights, 1)
        self.max_nodes = max(drafter.max_nodes, 1)
        # Any object with `observe` is a drafter.
        self.feature_layers: tuple[int, ...] = tuple(getattr(drafter, "feature_layers", ()))
        self.vocab_size = model.vocab_size
        sequences = scheduler.waiting
        capacity = max((sequence.max_length for sequence in sequences), default=0)
        history = [[*sequence.tokens, *[0] * (capacity - len(sequence.tokens))] for sequence in sequences]
        rows = self._to_device([*history, [0] * capacity], torch.int64).view(len(sequences) + 1, capacity)
        self.history = rows[:-1]
        self.fixed_steps: FixedSteps | None = None
        if is_fixed:
            check_drafter(drafter)
            every = list(sequences)
            self.fixed_steps = FixedSteps(
                lambda batch_size: FixedStep(
                    model, self.cache, sampling, self.drafter, rows, self.eos_ids, every, batch_size, requests, logprobs
                )
            )
        self.to_compact: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self.started = time.perf_counter()

    def run(self) -> None:
        try:
            if hasattr(self.drafter, "check_target"):  # any object with `observe` is a drafter
                self.drafter.check_target(self.model)
            self.drafter.begin(self.cache.page_size, self.sampling.for_drafts())
            while not self.scheduler.is_done:
                self.step()
        finally:
            self.drafter.end()
            if self.grammars is not None:
                self.grammars.close()
        self.stats.wall_time = time.perf_counter() - self.started
        self.stats.num_pages = self.cache.num_pages
        self.stats.peak_pages, self.stats.pages_taken = self.cache.peak_pages, self.cache.pages_taken

    def step(self) -> None:
        begin, drafting = time.perf_counter(), self.stats.draft_time
        batch, draft, choice = self._schedule()
        self._compact()
        if draft is None:
            self._step_in_place(batch.decode)
            return
        packed = self._pack(batch, draft)
        if self.grammars is not None:
            self.grammars.fill(packed.verified, packed.draft)
        logits, hidden, features = self.model.run(
            packed.input_ids, packed.positions, packed.step, packed.logit_rows, self.drafter.needs_hidden,
            self.feature_layers,
        )  # fmt: skip
        if features is not None:
            self._hand_on(batch, features)
        for sequence, count in batch.prefill:
            sequence.cached += count
            if self.cache.states is not None and sequence.cached == sequence.shared_len:
                self.cache.states.keep_prefix(sequence.index)
            if sequence.was_evicted:
                self.stats.sequences[sequence.index].restored_tokens += count
        self.stats.steps += 1
        self.stats.packed_tokens += packed.input_ids.shape[0]
        if packed.verified:
            verdict = self._verify(packed, logits, hidden)
        if self.tuner is not None:
            seconds = time.perf_counter() - begin
            if batch.prefill:
                self.tuner.learn_reading(packed.input_ids.shape[0], seconds)
            elif choice is not None:
                plan, kept = choice
                drafting = self.stats.draft_time - drafting
                self.tuner.learn(plan, Outcome(seconds, verdict.accept_index, verdict.tokens, drafting, kept))

    def _step_in_place(self, sequences: list[GeneratedSequence]) -> None:
        """A fixed step: nothing but decoding, and the drafter's part in it."""
        assert self.fixed_steps is not None
        step = self.fixed_steps.of(len(sequences))
        result, report, found = step(sequences)
        self.stats.steps += 1
        self.stats.packed_tokens += result.draft_tokens.shape[0]
        self._take_over(result, report, found)
        self.drafter.advance(sequences)
        self._finish(result)

    def _schedule(self) -> tuple[Batch, Draft | None, tuple[Plan, Kept | None] | None]:
        """The next pass, the trees of those that decode (None where a fixed step makes them itself), and with a tuner
        what it planned and kept of them.
        """
        while True:
            # A tuner drafts only at times, where there is room.
            batch = self.scheduler.schedule(self.max_nodes if self.tuner is None else 1)
            for sequence in batch.evicted:
                self.drafter.forget(sequence)
                self.stats.sequences[sequence.index].evictions += 1
            if not batch.decode:
                return batch, roots_only(0, self.device), None
            if self.fixed_steps is not None and not batch.prefill:
                return batch, None, None
            plan = None if self.tuner is None else self._plan(self.tuner, batch)
            if plan is not None and plan.depth is None:
                return batch, roots_only(len(batch.decode), self.device), (plan, None)
            draft, choice = self._propose(batch.decode), None
            if plan is not None:
                draft, kept = self._keep(plan, draft)
                choice = plan, kept
            if draft.trees.max_nodes <= self.max_nodes:
                return batch, draft, choice
            # The drafter did not declare trees of this size: make sure of the pages, and ask again.
            self.max_nodes = draft.trees.max_nodes
            self.scheduler.check_capacity(self.max_nodes)

    def _plan(self, tuner: TreeTuner, batch: Batch) -> Plan:
        """How deep to draft, if at all; tells the drafter."""
        if not self.has_begun_to_tune:  # not earlier, as it takes 0.5 % of the time to a short prompt's first token
            self.has_begun_to_tune = True
            tuner.begin()
        unread = self.draft_share * self.drafter.unread(batch.decode)
        remaining = [sequence.max_length - len(sequence.tokens) for sequence in batch.decode]
        plan = tuner.plan(remaining, unread, others_wait=bool(self.scheduler.waiting))
        # Beside prompts, which wait for their first token, only where drafts are known to be accepted.
        is_welcome = plan.depth is not None and (not batch.prefill or tuner.saved > 0.0)
        if not is_welcome or not self.scheduler.reserve(batch.decode, self.max_nodes):
            return replace(plan, depth=None)
        self.drafter.limit_depth(plan.depth)
        self.stats.drafted_steps += 1
        return plan

    def _keep(self, plan: Plan, draft: Draft) -> tuple[Draft, Kept]:
        """The nodes that are worth verifying."""
        # Drawn drafts must not be chosen among by what was drawn: their rules take them for independent of that.
        begin = time.perf_counter()
        is_drawn = self.drafter.draft_law in ("iid", "swor")
        kept = plan.keep(draft, None if is_drawn else self.drafter.confidence())
        if kept.rows is not None:
            self.drafter.narrow(kept.draft, kept.rows)
        draft = without_padding(kept.draft)
        self.stats.draft_time += time.perf_counter() - begin
        return draft, kept

    def _propose(self, sequences: list[GeneratedSequence]) -> Draft:
        lengths = self._to_device([len(sequence.tokens) for sequence in sequences], torch.int32)
        self.drafter.select(sequences)
        known = self._history_of(sequences), lengths
        self.drafter.start(*known)
        self._compact()
        begin = time.perf_counter()
        draft = cast(Draft, self.drafter.propose(*known))
        self.stats.draft_time += time.perf_counter() - begin
        return draft

    def _pack(self, batch: Batch, draft: Draft) -> Pass:
        cache, page_size = self.cache, self.cache.page_size
        trees, num_nodes = draft.trees, draft.draft_tokens.shape[0]

        read = [sequence for sequence, _ in batch.prefill]
        counts = [count for _, count in batch.prefill]
        num_known = sum(counts)
        every = [*read, *batch.decode]
        table = cache.page_table([sequence.index for sequence in every])
        decode_table = table[len(read) :]

        start = self._to_device([sequence.root for sequence in batch.decode], torch.int32)
        positions, seq_lens, cu_seqlens_q, slots = prepare_step(
            trees, decode_table, start, page_size, total_q=num_nodes
        )
        roots = self._to_device([sequence.tokens[-1] for sequence in batch.decode], torch.int64)
        # A tree without a root has no row of its own; `_verify` reports it.
        root_rows = trees.cu_nodes[:-1].long().clamp(min=0, max=max(num_nodes - 1, 0))
        nodes = draft.draft_tokens.long().index_copy(0, root_rows, roots)
        draft = draft._replace(draft_tokens=nodes)
        input_ids, logit_rows = nodes.clamp(0, self.vocab_size - 1), None

        tree_mask = tree_lens = None
        if trees.max_nodes > 1:  # else every sequence is causal
            tree_mask, tree_lens = trees.mask, trees.cu_nodes.diff()
        complete = [i for i, (s, count) in enumerate(batch.prefill) if s.cached + count == len(s.tokens)]
        verified = [*(read[i] for i in complete), *batch.decode]
        if read:
            known = [token for s, count in batch.prefill for token in s.tokens[s.cached : s.cached + count]]
            known_positions = [p for s, count in batch.prefill for p in range(s.cached, s.cached + count)]
            read_lens = self._to_device([sequence.cached + count for sequence, count in batch.prefill], torch.int32)
            read_cu = self._to_device(_offsets(counts), torch.int32)
            read_slots = slot_mapping(table[: len(read)], read_lens, read_cu, page_size, total_q=num_known)
            slots = torch.cat([read_slots, slots])
            seq_lens = torch.cat([read_lens, seq_lens])
            cu_seqlens_q = torch.cat([read_cu, cu_seqlens_q[1:] + num_known])
            positions = torch.cat([self._to_device(known_positions, torch.int64), positions])
            input_ids = torch.cat([self._to_device(known, torch.int64), input_ids])
            if tree_mask is not None and tree_lens is not None:
                tree_mask = torch.cat([tree_mask.new_zeros((num_known, tree_mask.shape[1])), tree_mask])
                tree_lens = torch.cat([tree_lens.new_full((len(read),), -1), tree_lens])
            last_rows = [sum(counts[: i + 1]) - 1 for i in complete]
            logit_rows = self._to_device([*last_rows, *range(num_known, num_known + num_nodes)], torch.int64)
            start = self._to_device([sequence.root for sequence in verified], torch.int32)
            draft = _after_roots(self._to_device([read[i].tokens[-1] for i in complete], torch.int64), draft)
        step = PagedStep(
            cache, table, seq_lens, cu_seqlens_q, slots, tree_mask, tree_lens,
            max_seqlen_q=max([*counts, trees.max_nodes if batch.decode else 1]),
        )  # fmt: skip
        step.prefix = self._shared_prefix(step, read, batch.decode, trees.max_nodes)
        if cache.states is not None:
            slots = self._to_device([cache.states.slot(s.index) for s in every], torch.int32)
            prompt_lens = self._to_device([s.prompt_len for s in every], torch.int64)
            step.recurrent = RecurrentStep.of(
                cache.states, slots, prompt_lens, trees, cu_seqlens_q, positions, num_known
            )

        return Pass(step, input_ids, positions, verified, len(complete), decode_table, start, draft, logit_rows)

    def _hand_on(self, batch: Batch, features: Tensor) -> None:
        """Gives the drafter the features of what the pass read; nothing of it is in `cached` or tokens yet."""
        sequences = [*(sequence for sequence, _ in batch.prefill), *batch.decode]
        start = [*(sequence.cached for sequence, _ in batch.prefill), *(sequence.root for sequence in batch.decode)]
        self.drafter.read(FeatureRows(sequences, start, [count for _, count in batch.prefill], features))

    def _shared_prefix(
        self, step: PagedStep, read: list[GeneratedSequence], decode: list[GeneratedSequence], max_nodes: int
    ) -> PrefixPass | None:
        """Runs of neighbours that hold the same first pages; None if reading those once would save too little."""
        if self.min_shared_tokens is None:
            return None
        runs: list[list[GeneratedSequence]] = []
        for sequence in decode:
            pages = self._shared_pages(sequence)
            if pages and runs and runs[-1][0].group == sequence.group and self._shared_pages(runs[-1][0]) == pages:
                runs[-1].append(sequence)
            else:
                runs.append([sequence])
        saved = sum(run[0].shared_len * (len(run) - 1) for run in runs)
        if saved == 0 or saved < self.min_shared_tokens:
            return None
        shared = [self._shared_pages(run[0]) if len(run) > 1 else [] for run in runs]
        rows = [*([[]] if read else []), *shared]
        first_page = [0] * len(read) + [len(pages) for run, pages in zip(runs, shared, strict=True) for _ in run]
        bounds = _offsets([*([len(read)] if read else []), *(len(run) for run in runs)])
        page_size = self.cache.page_size
        self.stats.shared_prefix_steps += 1
        return PrefixPass(
            page_table=self.cache.table_of(rows),
            seq_lens=self._to_device([len(row) * page_size for row in rows], torch.int32),
            cu_seqlens_q=step.cu_seqlens_q[self._to_device(bounds, torch.int64)],
            own_page_table=self.cache.page_table([s.index for s in [*read, *decode]], first_page),
            own_seq_lens=step.seq_lens - self._to_device([page * page_size for page in first_page], torch.int32),
            max_seqlen_q=max_nodes * max(len(run) for run in runs),
        )

    def _shared_pages(self, sequence: GeneratedSequence) -> list[int]:
        return self.cache.pages(sequence.index)[: self.cache.pages_for(sequence.shared_len)]

    def _verify(self, packed: Pass, logits: Tensor, hidden: Tensor | None) -> Verdict:
        sequences, start, trees = packed.verified, packed.start, packed.draft.trees
        history, lengths = self._history_of(sequences), start + 1
        sampling, options, mask = self.sampling.of(sequences), None, None
        if self.requests is not None:
            options = self.requests.of([sequence.index for sequence in sequences], history, lengths)
        if self.grammars is not None:
            mask = self.grammars.mask()
        verdict = sampling.verify(logits, packed.draft, self.drafter.draft_law, start, options, mask)
        first = packed.num_read  # what was read lies in its place, and is in the recurrent states, already
        accepted = verdict.accept_index[first:], verdict.num_accepted[first:]
        if trees.max_nodes > 1:
            self.to_compact = (packed.decode_table, start[first:], *accepted)
        if packed.step.recurrent is not None:
            packed.step.recurrent.advance(*accepted)
        committed = commit(
            verdict, trees, start, history=history, history_lens=lengths, eos_ids=self.eos_ids,
            options=None if self.logprobs is not None and self.logprobs.is_processed else options,
        )  # fmt: skip
        self._store_history(sequences, history)
        found = None
        if self.logprobs is not None:
            found = self.logprobs.read(logits, verdict, committed, start, sampling, options, mask)

        # The step's one synchronisation.
        extra = torch.stack([committed.num_tokens, committed.finished, verdict.status], dim=1)
        report = torch.cat([verdict.tokens, extra], dim=1).tolist()
        result = StepResult(sequences, packed.num_read, start, packed.draft, verdict, committed, logits, hidden)
        self._take_over(result, report, found)
        self.drafter.observe(result)
        self._finish(result)
        return verdict

    def _compact(self) -> None:
        """Moves the rows of the accepted paths to their places: any time before the next pass writes."""
        if self.to_compact is not None:
            compact_kv(self.cache.tensors(), *self.to_compact)
            self.to_compact = None

    def _take_over(self, result: StepResult, report: list[list[int]], found: Found | None) -> None:
        """Gives the sequences their tokens. report: a row of tokens, their number, finished, status per sequence."""
        sequences = result.sequences
        logprobs = [each.tolist() for each in found or ()]
        for i in sorted(range(len(sequences)), key=lambda i: sequences[i].index):
            sequence, (*tokens, num_tokens, finished, status) = sequences[i], report[i]
            if num_tokens == 0:
                raise ValueError(f"drafter: expected trees of at least a root, got none for sequence {sequence.index}")
            self._append(
                sequence, tokens[:num_tokens], bool(finished), i >= result.num_read, [each[i] for each in logprobs]
            )
            if status & STATUS_NOT_FINITE:
                warnings.warn(f"sequence {sequence.index}: the model's logits have NaN or no finite one", stacklevel=2)

    def _finish(self, result: StepResult) -> None:
        if self.on_step is not None:
            self.on_step(result)
        for sequence in result.sequences:
            if self.stats.sequences[sequence.index].finish_reason:
                self.scheduler.finish(sequence)
                self.drafter.forget(sequence)

    def _append(
        self, sequence: GeneratedSequence, tokens: list[int], is_eos: bool, is_tree: bool, logprobs: list[list[Any]]
    ) -> None:
        """Takes over the committed tokens, up to the length limit or the end of a stop string or grammar."""
        stats = self.stats.sequences[sequence.index]
        sequence.cached = sequence.root + len(tokens)
        self.cache.trim(sequence.index, sequence.cached)
        room = sequence.max_length - len(sequence.tokens)
        if is_eos and len(tokens) <= room:
            stats.finish_reason = "eos"
        elif len(tokens) >= room:
            tokens, stats.finish_reason = tokens[:room], "length"
        if self.stop_strings is not None:
            known = sequence.tokens[len(sequence.tokens) - stats.num_tokens :]
            end = self.stop_strings.end(known, tokens)
            if end is not None:
                tokens, stats.finish_reason = tokens[:end], "stop_string"
        if self.grammars is not None:
            end = self.grammars.end(sequence, tokens)
            if end is not None and (end < len(tokens) or stats.finish_reason in ("", "length")):
                tokens, stats.finish_reason = tokens[:end], "grammar"
        if stats.logprobs is not None:
            stats.logprobs.append(logprobs, len(tokens))
        if stats.num_tokens == 0:
            stats.time_to_first_token = time.perf_counter() - self.started
        stats.num_tokens += len(tokens)
        if is_tree:
            stats.decode_steps += 1
            stats.accepted.append(max(len(tokens) - 1, 0))
        sequence.tokens += tokens
        if self.on_tokens is not None and self.on_tokens(sequence.index, tokens) is True:
            stats.finish_reason = stats.finish_reason or "callback"

    def _history_of(self, sequences: list[GeneratedSequence]) -> Tensor:
        if len(sequences) == self.history.shape[0] and all(s.index == i for i, s in enumerate(sequences)):
            return self.history
        return self.history[self._to_device([sequence.index for sequence in sequences], torch.int64)]

    def _store_history(self, sequences: list[GeneratedSequence], history: Tensor) -> None:
        if history is not self.history:
            self.history[self._to_device([sequence.index for sequence in sequences], torch.int64)] = history

    def _to_device(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)


def _offsets(counts: list[int]) -> list[int]:
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets


def _after_roots(roots: Tensor, draft: Draft) -> Draft:
    """`draft` after a tree of one node for each token of `roots`."""
    num_roots, rows = roots.shape[0], draft.draft_rows
    if num_roots == 0:
        return draft
    trees = roots_only(num_roots, roots.device).trees
    return draft._replace(
        draft_tokens=torch.cat([roots, draft.draft_tokens]),
        trees=TreeBatch.concatenate([trees, draft.trees]),
        # Any row will do for a root that has no children.
        draft_rows=torch.cat([rows.new_zeros(num_roots), rows]) if rows is not None else None,
    )
