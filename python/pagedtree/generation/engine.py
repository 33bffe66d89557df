"""The loop of `generate`: draft, run one packed pass of the model, verify, compact, commit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pagedtree import Draft, Verdict
from pagedtree._arguments import refusal
from pagedtree.generation.decode_step import DecodeStep, History, KnownTokens, Pass, Policy
from pagedtree.generation.drafters.base import Drafter, FeatureRows, StepResult, roots_only
from pagedtree.generation.drafters.limits import Question, without_padding
from pagedtree.generation.fixed_step import FixedStep, check_drafter
from pagedtree.generation.logprobs import Found, TokenLogprobs
from pagedtree.generation.packed_model import PackedModel, PassOutput
from pagedtree.generation.paged_step import PagedStep, PrefixPass
from pagedtree.generation.scheduler import Batch, GeneratedSequence, Scheduler
from pagedtree.generation.stats import GenerationStats, SequenceStats
from pagedtree.generation.tree_tuner import Kept, Outcome, Plan, TreeTuner

STATUS_NOT_FINITE = 2
# Reading a prefix once takes two more launches per layer. Measured on the CPU, that pays from about here on for single
# queries; for trees of 16 nodes, bound by arithmetic rather than by reading, it makes little difference.
MIN_SHARED_TOKENS = 1024


class Engine:
    def __init__(self, model: PackedModel, scheduler: Scheduler, drafter: Drafter, policy: Policy) -> None:
        self.model, self.scheduler, self.drafter, self.policy = model, scheduler, drafter, policy
        self.cache, self.device = scheduler.cache, scheduler.cache.device
        self.has_begun_to_tune = False
        if policy.tuner is not None:  # reading a token costs time in proportion to the weights
            self.draft_share = drafter.num_weights / max(model.num_weights, 1)
        self.max_nodes = max(drafter.max_nodes, 1)
        sequences = list(scheduler.waiting)
        logprobs = [None if policy.logprobs is None else TokenLogprobs() for _ in sequences]
        self.stats = GenerationStats(sequences=[SequenceStats(logprobs=each) for each in logprobs])
        self.history = History(sequences, self.device)
        self.decode_step = DecodeStep(model, self.cache, drafter, policy)
        self.fixed_step: Callable[[int], FixedStep] | None = None  # by batch size
        if policy.cuda_graph:
            check_drafter(drafter)
            self.fixed_step = cache(
                lambda batch_size: FixedStep(self.decode_step, self.history.rows, sequences, batch_size)
            )
        self.started = time.perf_counter()

    def run(self) -> GenerationStats:
        try:
            self.drafter.check_target(self.model)
            self.drafter.begin(self.cache.page_size, self.policy.sampling.for_drafts())
            while not self.scheduler.is_done:
                self.step()
        finally:
            self.drafter.end()
            if (grammars := self.policy.grammars) is not None:
                self.stats.grammar_time, self.stats.grammar_wait = grammars.close()
        self.stats.wall_time = time.perf_counter() - self.started
        self.stats.num_pages = self.cache.num_pages
        self.stats.peak_pages, self.stats.pages_taken = self.cache.peak_pages, self.cache.pages_taken
        return self.stats

    def step(self) -> None:
        begin, drafting = time.perf_counter(), self.stats.draft_time
        batch, draft, choice = self._schedule()
        self.decode_step.compact()
        if draft is None:
            self._step_in_place(batch.decode)
            return
        packed = self._pack(batch, draft)
        verified = [*(s for s, count in batch.prefill if _is_all(s, count)), *batch.decode]
        if self.policy.grammars is not None:
            self.policy.grammars.fill(verified, packed.draft)
        output = self.decode_step.run(packed)
        if output.features is not None:
            self._hand_on(batch, output.features)
        for sequence, count in batch.prefill:
            sequence.cached += count
            if self.cache.states is not None and sequence.cached == sequence.shared_len:
                self.cache.states.keep_prefix(sequence.index)
            if sequence.was_evicted:
                self.stats.sequences[sequence.index].restored_tokens += count
        self.stats.steps += 1
        self.stats.packed_tokens += packed.input_ids.shape[0]
        if verified:
            verdict = self._verify(packed, verified, output)
        if (tuner := self.policy.tuner) is not None:
            seconds = time.perf_counter() - begin
            if batch.prefill:
                tuner.learn_reading(packed.input_ids.shape[0], seconds)
            elif choice is not None:
                plan, nodes = choice
                drafting = self.stats.draft_time - drafting
                tuner.learn(plan, Outcome(seconds, verdict.accept_index, verdict.tokens, drafting, nodes))

    def _step_in_place(self, sequences: list[GeneratedSequence]) -> None:
        assert self.fixed_step is not None
        step = self.fixed_step(1 << (len(sequences) - 1).bit_length())  # one per power of two
        result, report, logprobs = step(sequences)
        self.stats.steps += 1
        self.stats.packed_tokens += result.draft_tokens.shape[0]
        self._take_over(result, report, logprobs)
        self.drafter.advance(sequences)
        self._finish(result)

    def _schedule(self) -> tuple[Batch, Draft | None, tuple[Plan, Kept | None] | None]:
        """Returns the next batch, its trees (None: a captured step drafts), and any plan and nodes of the tuner."""
        tuner = self.policy.tuner
        while True:
            # A tuner drafts only in some steps, if pages are free.
            batch = self.scheduler.schedule(self.max_nodes if tuner is None else 1)
            for sequence in batch.evicted:
                self.drafter.forget(sequence)
                self.stats.sequences[sequence.index].evictions += 1
            if not batch.decode:
                return batch, roots_only(0, self.device), None
            if self.fixed_step is not None and not batch.prefill:
                return batch, None, None
            plan = None if tuner is None else self._plan(tuner, batch)
            if plan is not None and plan.depth is None:
                return batch, roots_only(len(batch.decode), self.device), (plan, None)
            lengths = self._to_device([len(sequence.tokens) for sequence in batch.decode], torch.int32)
            question = Question(self.drafter, batch.decode, self.history.of(batch.decode), lengths)
            self.decode_step.compact()
            begin = time.perf_counter()
            draft, choice = question.answer(), None
            self.stats.draft_time += time.perf_counter() - begin
            if plan is not None:
                nodes = self._keep(plan, draft, question)
                draft, choice = nodes.draft, (plan, nodes)
            draft = without_padding(draft)
            if draft.trees.max_nodes <= self.max_nodes:
                return batch, draft, choice
            # The drafter did not declare trees of this size: check capacity and draft again.
            self.max_nodes = draft.trees.max_nodes
            self.scheduler.check_capacity(self.max_nodes)

    def _plan(self, tuner: TreeTuner, batch: Batch) -> Plan:
        if not self.has_begun_to_tune:  # any earlier, it would cost 0.5 % of a short prompt's time to first token
            self.has_begun_to_tune = True
            tuner.begin()
        unread = self.draft_share * self.drafter.unread(batch.decode)
        remaining = [sequence.max_length - len(sequence.tokens) for sequence in batch.decode]
        plan = tuner.plan(remaining, unread, others_wait=bool(self.scheduler.waiting))
        # During prefill, draft only if drafts were accepted before: prompts wait for their first token.
        is_welcome = plan.depth is not None and (not batch.prefill or tuner.saved > 0.0)
        if not is_welcome or not self.scheduler.reserve(batch.decode, self.max_nodes):
            return replace(plan, depth=None)
        self.drafter.limit_depth(plan.depth)
        self.stats.drafted_steps += 1
        return plan

    def _keep(self, plan: Plan, draft: Draft, question: Question) -> Kept:
        # Sampled drafts are not selected by probability: the rules need a selection independent of the draw.
        begin = time.perf_counter()
        is_drawn = self.drafter.draft_law in ("iid", "swor")
        nodes = plan.keep(draft, None if is_drawn else question.confidence())
        if nodes.rows is not None:
            question.narrow(nodes.draft, nodes.rows)
        self.stats.draft_time += time.perf_counter() - begin
        return nodes

    def _pack(self, batch: Batch, draft: Draft) -> Pass:
        sequences = [*(sequence for sequence, _ in batch.prefill), *batch.decode]
        table = self.cache.page_table([sequence.index for sequence in sequences])
        roots = self._to_device([sequence.tokens[-1] for sequence in batch.decode], torch.int64)
        start = self._to_device([sequence.root for sequence in batch.decode], torch.int32)
        state_index = prompt_lens = None
        if self.cache.states is not None:
            state_index = self._to_device([self.cache.states.state_index(s.index) for s in sequences], torch.int32)
            prompt_lens = self._to_device([s.prompt_len for s in sequences], torch.int64)
        tokens = self._known(batch.prefill) if batch.prefill else None
        packed = self.decode_step.pack(draft, roots, table, start, state_index, prompt_lens, tokens)
        packed.step.prefix = self._shared_prefix(packed.step, batch, draft.trees.max_nodes)
        return packed

    def _known(self, prefill: list[tuple[GeneratedSequence, int]]) -> KnownTokens:
        counts = [count for _, count in prefill]
        offsets = [0, *accumulate(counts)]
        return KnownTokens(
            counts,
            tokens=self._to_device(
                [t for s, count in prefill for t in s.tokens[s.cached : s.cached + count]], torch.int64
            ),
            positions=self._to_device(
                [p for s, count in prefill for p in range(s.cached, s.cached + count)], torch.int64
            ),
            seq_lens=self._to_device([s.cached + count for s, count in prefill], torch.int32),
            cu_seqlens=self._to_device(offsets, torch.int32),
            last_rows=[end - 1 for end, chunk in zip(offsets[1:], prefill, strict=True) if _is_all(*chunk)],
        )

    def _hand_on(self, batch: Batch, features: Tensor) -> None:
        """Passes the features to the drafter before `cached` and the tokens are updated."""
        sequences = [*(sequence for sequence, _ in batch.prefill), *batch.decode]
        start = [*(sequence.cached for sequence, _ in batch.prefill), *(sequence.root for sequence in batch.decode)]
        self.drafter.read(FeatureRows(sequences, start, [count for _, count in batch.prefill], features))

    def _shared_prefix(self, step: PagedStep, batch: Batch, max_nodes: int) -> PrefixPass | None:
        """Returns runs of neighbours with the same first pages; None if reading them once saves too little."""
        if self.policy.share_prefix not in (None, True):
            return None
        runs: list[list[GeneratedSequence]] = []
        read = [sequence for sequence, _ in batch.prefill]
        for sequence in batch.decode:
            pages = self._shared_pages(sequence)
            if pages and runs and runs[-1][0].group == sequence.group and self._shared_pages(runs[-1][0]) == pages:
                runs[-1].append(sequence)
            else:
                runs.append([sequence])
        saved = sum(run[0].shared_len * (len(run) - 1) for run in runs)
        if saved == 0 or (saved < MIN_SHARED_TOKENS and not self.policy.share_prefix):
            return None
        prefixes = [self._shared_pages(run[0]) if len(run) > 1 else [] for run in runs]
        rows = [*([[]] if read else []), *prefixes]
        first_page = [0] * len(read) + [len(pages) for run, pages in zip(runs, prefixes, strict=True) for _ in run]
        bounds = [0, *accumulate([*([len(read)] if read else []), *(len(run) for run in runs)])]
        page_size = self.cache.page_size
        self.stats.shared_prefix_steps += 1
        return PrefixPass(
            page_table=self.cache.table_of(rows),
            seq_lens=self._to_device([len(row) * page_size for row in rows], torch.int32),
            cu_seqlens_q=step.cu_seqlens_q[self._to_device(bounds, torch.int64)],
            own_page_table=self.cache.page_table([s.index for s in [*read, *batch.decode]], first_page),
            own_seq_lens=step.seq_lens - self._to_device([page * page_size for page in first_page], torch.int32),
            max_seqlen_q=max_nodes * max(len(run) for run in runs),
        )

    def _shared_pages(self, sequence: GeneratedSequence) -> list[int]:
        return self.cache.pages(sequence.index)[: self.cache.pages_for(sequence.shared_len)]

    def _verify(self, packed: Pass, sequences: list[GeneratedSequence], output: PassOutput) -> Verdict:
        policy, texts = self.policy, self.history.of(sequences)
        sampling, options, mask = policy.sampling.of(sequences), None, None
        if policy.options is not None:
            options = policy.options.of([sequence.index for sequence in sequences], texts, packed.start + 1)
        if policy.grammars is not None:
            mask = policy.grammars.mask()
        result, report, logprobs = self.decode_step.judge(packed, sequences, output, texts, sampling, options, mask)
        self.history.store(sequences, texts)
        self._take_over(result, report.tolist(), logprobs)  # the step's one synchronisation
        self.drafter.observe(result)
        self._finish(result)
        return result.verdict

    def _take_over(self, result: StepResult, report: list[list[int]], found: Found | None) -> None:
        """Appends the new tokens. report: a row of tokens, their number, finished, status per sequence."""
        sequences = result.sequences
        logprobs = [values.tolist() for values in found or ()]
        for i in sorted(range(len(sequences)), key=lambda i: sequences[i].index):
            sequence, (*tokens, num_tokens, finished, status) = sequences[i], report[i]
            if num_tokens == 0:
                raise refusal("drafter", "trees of at least a root", f"none for sequence {sequence.index}")
            self._append(
                sequence, tokens[:num_tokens], bool(finished), i >= result.num_read, [values[i] for values in logprobs]
            )
            if status & STATUS_NOT_FINITE:
                warnings.warn(f"sequence {sequence.index}: the model's logits have NaN or no finite one", stacklevel=2)

    def _finish(self, result: StepResult) -> None:
        if self.policy.on_step is not None:
            self.policy.on_step(result)
        for sequence in result.sequences:
            if self.stats.sequences[sequence.index].finish_reason:
                self.scheduler.finish(sequence)
                self.drafter.forget(sequence)

    def _append(
        self, sequence: GeneratedSequence, tokens: list[int], is_eos: bool, is_tree: bool, logprobs: list[list[Any]]
    ) -> None:
        policy, stats = self.policy, self.stats.sequences[sequence.index]
        sequence.cached = sequence.root + len(tokens)
        self.cache.trim(sequence.index, sequence.cached)
        room = sequence.max_length - len(sequence.tokens)
        if is_eos and len(tokens) <= room:
            stats.finish_reason = "eos"
        elif len(tokens) >= room:
            tokens, stats.finish_reason = tokens[:room], "length"
        if policy.stop_strings is not None:
            text = sequence.tokens[len(sequence.tokens) - stats.num_tokens :]
            end = policy.stop_strings.end(text, tokens)
            if end is not None:
                tokens, stats.finish_reason = tokens[:end], "stop_string"
        if policy.grammars is not None:
            end = policy.grammars.end(sequence, tokens)
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
        if policy.callback is not None and policy.callback(sequence.index, tokens):
            stats.finish_reason = stats.finish_reason or "callback"

    def _to_device(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)


def _is_all(sequence: GeneratedSequence, count: int) -> bool:
    return sequence.cached + count == len(sequence.tokens)
