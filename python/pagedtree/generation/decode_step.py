"""The shared part of ordinary and captured decode steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedtree import Draft, RequestOptions, TreeBatch, commit, prepare_step, slot_mapping
from pagedtree.generation.drafters.base import Drafter, StepResult, roots_only
from pagedtree.generation.grammar_steps import GrammarSteps
from pagedtree.generation.logprobs import Found, LogprobReader
from pagedtree.generation.packed_model import PackedModel, PassOutput
from pagedtree.generation.paged_cache import PagedCache
from pagedtree.generation.paged_step import PagedStep
from pagedtree.generation.recurrent_step import RecurrentStep
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.generation.stop_strings import StopStrings
from pagedtree.generation.tree_tuner import TreeTuner
from pagedtree.options import OptionRows


@dataclass
class Policy:
    """The arguments of `generate` by which the engine chooses tokens, drafts them and ends texts.

    sampling, options, grammars: of all sequences. tuner: chooses the drafts; None: whole trees.
    """

    sampling: Sampling
    eos_ids: list[int]
    tree: str | None = None
    share_prefix: bool | None = False
    cuda_graph: bool = False
    stop_strings: StopStrings | None = None
    options: OptionRows | None = None
    grammars: GrammarSteps | None = None
    logprobs: LogprobReader | None = None
    callback: Callable[[int, list[int]], object] | None = None
    on_step: Callable[[StepResult], None] | None = None
    tuner: TreeTuner | None = None


class History:
    """A call's texts on the device: rows int64 [sequences + 1, capacity]; the last one is for idle rows of a step."""

    def __init__(self, sequences: Sequence[GeneratedSequence], device: torch.device) -> None:
        capacity = max((sequence.max_length for sequence in sequences), default=0)
        texts = [[*sequence.tokens, *[0] * (capacity - len(sequence.tokens))] for sequence in sequences]
        rows = torch.tensor([*texts, [0] * capacity], dtype=torch.int64).view(len(texts) + 1, capacity)
        self.rows = rows.to(device, non_blocking=True)
        self._all = self.rows[:-1]

    def of(self, sequences: Sequence[GeneratedSequence]) -> Tensor:
        if len(sequences) == len(self._all) and all(s.index == i for i, s in enumerate(sequences)):
            return self._all
        return self.rows[self._indices(sequences)]

    def store(self, sequences: Sequence[GeneratedSequence], texts: Tensor) -> None:
        if texts is not self._all:
            self.rows[self._indices(sequences)] = texts

    def _indices(self, sequences: Sequence[GeneratedSequence]) -> Tensor:
        indices = torch.tensor([sequence.index for sequence in sequences], dtype=torch.int64)
        return indices.to(self.rows.device, non_blocking=True)


@dataclass
class KnownTokens:
    """Prefill tokens of R sequences, placed before the trees of a pass.

    counts: tokens of each sequence; T in all. tokens, positions: int64 [T]. seq_lens: int32 [R], up to the last token
    read. cu_seqlens: int32 [R + 1]. last_rows: the last row of each sequence that finishes prefill.
    """

    counts: list[int]
    tokens: Tensor
    positions: Tensor
    seq_lens: Tensor
    cu_seqlens: Tensor
    last_rows: list[int]


@dataclass
class Pass:
    """One packed pass: sequences in prefill, then sequences that decode a tree, then padding.

    draft, start: trees with root tokens, and root positions, of the num_read sequences that finish prefill, then of the
    decoding ones. decode_table: int32 [D, max_pages], the latter's pages. logit_rows: the nodes' rows; None = all.
    """

    step: PagedStep
    input_ids: Tensor
    positions: Tensor
    draft: Draft
    start: Tensor
    decode_table: Tensor
    num_read: int = 0
    logit_rows: Tensor | None = None


class DecodeStep:
    """The stages of a step: pack trees into a pass, run it, verify the trees, commit the accepted paths. Without
    `KnownTokens` it never needs the host, so a CUDA graph can capture it."""

    def __init__(self, model: PackedModel, cache: PagedCache, drafter: Drafter, policy: Policy) -> None:
        self.model, self.cache, self.drafter, self.policy = model, cache, drafter, policy
        self.vocab_size = model.vocab_size
        eos_ids = torch.tensor(policy.eos_ids, dtype=torch.int64).to(cache.device, non_blocking=True)
        self.eos_ids = eos_ids if policy.eos_ids else None
        self._moves: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def pack(
        self,
        draft: Draft,
        roots: Tensor,
        page_table: Tensor,
        start: Tensor,
        state_index: Tensor | None,
        prompt_lens: Tensor | None,
        known: KnownTokens | None = None,
        is_active: Tensor | None = None,
    ) -> Pass:
        """Prepares the pass over R sequences in prefill (0 without `known`) and the trees of D that decode.

        roots: int64 [D], the last tokens. start: int32 [D], their positions. page_table: int32 [R + D, max_pages].
        state_index: int32 [R + D], prompt_lens: int64 [R + D]; both None without recurrent layers. is_active: bool [D],
        False for rows without a sequence; None = all active.
        """
        trees, num_nodes, page_size = draft.trees, draft.draft_tokens.shape[0], self.cache.page_size
        decode_table = page_table if known is None else page_table[len(known.counts) :]
        positions, seq_lens, cu_seqlens_q, slots = prepare_step(
            trees, decode_table, start, page_size, total_q=num_nodes
        )
        draft = _with_roots(draft, roots, is_active)
        input_ids = draft.draft_tokens.clamp(0, self.vocab_size - 1)
        tree_mask = tree_lens = None
        if trees.max_nodes > 1:  # else every sequence is causal
            tree_mask, tree_lens = trees.mask, trees.cu_nodes.diff()
        step = PagedStep(
            self.cache, page_table, seq_lens, cu_seqlens_q, slots, tree_mask, tree_lens, max_seqlen_q=trees.max_nodes
        )
        packed = Pass(step, input_ids, positions, draft, start, decode_table)
        if known is not None:
            _put_in_front(known, packed, page_size)
        if self.cache.states is not None and state_index is not None and prompt_lens is not None:
            num_known = 0 if known is None else known.tokens.shape[0]
            step.recurrent = RecurrentStep.of(
                self.cache.states, state_index, prompt_lens, trees, step.cu_seqlens_q, packed.positions, num_known
            )
        return packed

    def run(self, packed: Pass) -> PassOutput:
        """Runs the model, with the hidden states and features that the drafter needs."""
        wanted = packed.logit_rows, self.drafter.needs_hidden, tuple(self.drafter.feature_layers)
        return self.model.run(packed.input_ids, packed.positions, packed.step, *wanted)

    def judge(
        self,
        packed: Pass,
        sequences: list[GeneratedSequence],
        output: PassOutput,
        history: Tensor,
        sampling: Sampling,
        options: RequestOptions | None,
        grammar_mask: Tensor | None = None,
        node_map: Tensor | None = None,
    ) -> tuple[StepResult, Tensor, Found | None]:
        """Verifies the trees of B sequences and commits the accepted paths; `compact` must follow before the next pass.

        history: int64 [B, capacity], receives the new tokens. Others: see `Sampling.verify` and `commit`. Returns the
        result, a report int64 [B, S + 3] of tokens, their number, finished and status, and any log-probabilities.
        """
        draft, start, first = packed.draft, packed.start, packed.num_read
        verdict = sampling.verify(output.logits, draft, self.drafter.draft_law, start, options, grammar_mask)
        # Prefill rows are already in place and in the recurrent states.
        accepted = verdict.accept_index[first:], verdict.num_accepted[first:]
        if draft.trees.max_nodes > 1:
            self._moves = (packed.decode_table, start[first:], *accepted)
        if packed.step.recurrent is not None:
            packed.step.recurrent.advance(*accepted)
        text = {"history": history, "history_lens": start + 1, "eos_ids": self.eos_ids}
        # With processed log-probabilities the reader counts the tokens instead of `commit`.
        reader = self.policy.logprobs
        counted = None if reader is not None and reader.is_processed else options
        committed = commit(verdict, draft.trees, start, **text, node_map=node_map, options=counted)
        logprobs = None
        if reader is not None:
            logprobs = reader.read(output.logits, verdict, committed, start, sampling, options, grammar_mask)
        extra = torch.stack([committed.num_tokens, committed.finished, verdict.status], dim=1)
        result = StepResult(sequences, first, start, draft, verdict, committed, output.logits, output.hidden)
        return result, torch.cat([verdict.tokens, extra], dim=1), logprobs

    def compact(self) -> None:
        if self._moves is not None:
            self.cache.compact(*self._moves)
            self._moves = None


def _with_roots(draft: Draft, roots: Tensor, is_active: Tensor | None) -> Draft:
    """Returns `draft` with the roots' tokens, which drafters may omit."""
    tokens, rows = draft.draft_tokens.long(), draft.trees.cu_nodes[:-1].long()
    num_nodes = tokens.shape[0]
    if is_active is None:  # a tree without a root has no row; the engine rejects it after verification
        tokens = tokens.index_copy(0, rows.clamp(min=0, max=max(num_nodes - 1, 0)), roots)
    else:  # an inactive row may have no tree; its token goes after the last node
        rows = torch.where(is_active, rows, num_nodes)
        tokens = torch.cat([tokens, roots[:1]]).index_copy(0, rows, roots)[:num_nodes]
    return draft._replace(draft_tokens=tokens)


def _put_in_front(known: KnownTokens, packed: Pass, page_size: int) -> None:
    """Prepends prefill rows. Sequences whose prompt ends in this pass get a root-only tree."""
    step, device, num_known = packed.step, known.tokens.device, known.tokens.shape[0]
    table = step.page_table[: len(known.counts)]
    slots = slot_mapping(table, known.seq_lens, known.cu_seqlens, page_size, total_q=num_known)
    step.slots = torch.cat([slots, step.slots])
    step.seq_lens = torch.cat([known.seq_lens, step.seq_lens])
    step.cu_seqlens_q = torch.cat([known.cu_seqlens, step.cu_seqlens_q[1:] + num_known])
    step.max_seqlen_q = max(*known.counts, step.max_seqlen_q)
    if step.tree_mask is not None and step.tree_lens is not None:
        step.tree_mask = torch.cat([step.tree_mask.new_zeros((num_known, step.tree_mask.shape[1])), step.tree_mask])
        step.tree_lens = torch.cat([step.tree_lens.new_full((len(known.counts),), -1), step.tree_lens])
    num_nodes = packed.input_ids.shape[0]
    packed.positions = torch.cat([known.positions, packed.positions])
    packed.input_ids = torch.cat([known.tokens, packed.input_ids])
    rows, packed.num_read = [*known.last_rows, *range(num_known, num_known + num_nodes)], len(known.last_rows)
    packed.logit_rows = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
    last = packed.logit_rows[: packed.num_read]
    packed.start = torch.cat([known.positions.index_select(0, last).int(), packed.start])
    packed.draft = _after_roots(known.tokens.index_select(0, last), packed.draft)


def _after_roots(roots: Tensor, draft: Draft) -> Draft:
    num_roots, rows = roots.shape[0], draft.draft_rows
    if num_roots == 0:
        return draft
    trees = roots_only(num_roots, roots.device).trees
    return draft._replace(
        draft_tokens=torch.cat([roots, draft.draft_tokens]),
        trees=TreeBatch.concatenate([trees, draft.trees]),
        # A root without children may use any row.
        draft_rows=torch.cat([rows.new_zeros(num_roots), rows]) if rows is not None else None,
    )
