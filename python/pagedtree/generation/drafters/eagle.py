"""The drafters of EAGLE-3 heads (Li et al., 2025) and of P-EAGLE heads (Hui et al., 2026)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from pagedtree import Draft, drafting, slot_mapping
from pagedtree._arguments import refusal
from pagedtree.generation.drafters.base import StepResult, best_trees, roots_only
from pagedtree.generation.drafters.eagle_head import EagleHead
from pagedtree.generation.drafters.grown import TreeGrower
from pagedtree.generation.drafters.target import check_place
from pagedtree.generation.drafters.waiting_features import FeatureReader, FixedFeatures, WaitingFeatures
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.paged_step import PagedStep
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence


class EagleDrafter(FeatureReader, TreeGrower):
    """An EAGLE-3 head that grows a tree of at most `num_nodes` nodes and `depth` levels.

    Each step runs the head over the tokens that the target has read since, with its features, then over the best
    `width` nodes of each level but the last, with its own states. The `num_nodes` best candidates form the tree
    (EAGLE-2). Pages and unread features are kept as in `BlockDrafter`.

    head: made for the target of `generate`. num_nodes, depth, width: as in `ModelDrafter`.
    """

    is_capturable = True

    def __init__(self, head: EagleHead, *, num_nodes: int = 16, depth: int = 5, width: int = 4) -> None:
        head.check_attention()
        self.head, self.feature_layers, self.networks = head, head.feature_layers, (head,)
        self.num_weights = sum(weight.numel() for weight in head.parameters())
        super().__init__(head.vocab_size, head.target_ids.device, "topk", num_nodes, depth, width)

    def _reset(self, page_size: int) -> None:
        super()._reset(page_size)
        self._waiting = WaitingFeatures(self._enter, self._read_known)
        self._fixed: FixedFeatures | None = None  # of captured steps; `_roots`: first roots of the last one
        self._roots: dict[int, int] = {}
        self._states: Tensor | None = None  # [B * F, H], the head's output at the last frontier

    def check_target(self, model: PackedModel) -> None:
        super().check_target(model)
        check_place(self.head.parameters(), model, (self.head.input_rows, self.head.output_rows))
        self.head.check_target(model.hidden_size, model.vocab_size)

    def begin(self, page_size: int, sampling: Sampling) -> None:
        largest = int(self.head.target_ids.max())
        if sampling.vocab_size is not None and largest >= sampling.vocab_size:
            raise refusal("drafter", f"a head of the target's {sampling.vocab_size} tokens", largest)
        self._reset(page_size)
        self._sampling = sampling

    def observe_captured(self, result: StepResult, rows: Tensor) -> None:
        assert self._fixed is not None
        self._fixed.store(result, rows)

    def forget(self, sequence: GeneratedSequence) -> None:
        self._waiting.forget(sequence.index)
        if self._fixed is not None:
            self._fixed.held.pop(sequence.index, None)
        super().forget(sequence)

    def propose(self, tokens: Tensor, lengths: Tensor) -> Draft:
        self._waiting.sort()
        if self._fixed is not None:
            self._waiting.put(self._fixed.take(self._selected))
        if not all(sequence.index in self._known for sequence in self._selected):
            self._grown = None
            # There are no features yet for a one-token text, or if another outcome has read all but the last token.
            return roots_only(tokens.shape[0], tokens.device)
        draft = self._guess(self.cache.table_of(self._reserve_trees(self._selected)), lengths)
        for sequence in self._selected:  # the tree's rows are dropped
            self.cache.trim(sequence.index, self._cached[sequence.index])
        return self._of_target(draft)

    def _of_target(self, draft: Draft) -> Draft:
        return draft._replace(draft_tokens=self.head.target_ids[draft.draft_tokens.clamp(min=0)])

    def capture(self, model: PackedModel, sequences: list[GeneratedSequence], batch_size: int) -> None:
        super().capture(model, sequences, batch_size)
        if self._fixed is None:
            width, weight = len(self.feature_layers) * model.hidden_size, next(self.head.parameters())
            count = max((sequence.index for sequence in sequences), default=-1) + 1
            self._fixed = FixedFeatures(count, self.max_depth + 1, width, weight.dtype, weight.device)

    def select_captured(self, sequences: list[GeneratedSequence], batch_size: int) -> None:
        """Also reads the features of ordinary passes but each sequence's last."""
        super().select_captured(sequences, batch_size)
        assert self._fixed is not None
        self._waiting.sort()
        for sequence in sequences:
            if sequence.index not in self._known:  # no features yet, see `propose`
                self._enter(sequence, sequence.root)
                self._fixed.clear(sequence)
        ends = [(sequence, sequence.root - 1) for sequence in sequences]
        if unread := [pair for pair in ends if self._num_readable(*pair)]:
            self._read_until(unread)
        for sequence in sequences:
            if self._waiting.count(sequence.index):
                self._fixed.put(sequence, self._waiting.take(sequence.index, 1))
        self._roots = {sequence.index: sequence.root for sequence in sequences}
        self._tables[batch_size].set(self._reserve_trees(sequences))

    def advance(self, sequences: list[GeneratedSequence]) -> None:
        """Marks the tokens before the step's initial root as read; the later ones wait."""
        assert self._fixed is not None
        for sequence in sequences:
            begin = self._roots[sequence.index]
            self._cached[sequence.index] = self._fixed.held[sequence.index] = begin
            self.cache.trim(sequence.index, sequence.root)

    def propose_captured(self, tokens: Tensor, lengths: Tensor, active: Tensor, rows: Tensor) -> Draft:
        assert self._fixed is not None
        table, features = self._tables[rows.shape[0]].tensor, self._fixed.features.index_select(0, rows)
        counts = self._fixed.counts.index_select(0, rows).where(active, 0)
        batch, most = features.shape[:2]
        begin = (lengths - 1 - counts).clamp(min=0)
        offsets = F.pad(counts.cumsum(0), (1, 0))
        # The sequences' tokens are concatenated, followed by padding.
        row = torch.arange(batch * most, device=rows.device, dtype=torch.int64)
        owner = torch.bucketize(row, offsets[1:], right=True).clamp(max=batch - 1)
        place = (row - offsets[owner]).clamp(max=most - 1)
        positions = begin[owner] + place
        # The head's row of a token has the position and features of the token before it.
        ids = tokens[owner, (positions + 1).clamp(max=tokens.shape[1] - 1)]
        seq_lens, offsets = (begin + counts).int(), offsets.int()
        slots = slot_mapping(table, seq_lens, offsets, self.cache.page_size, total_q=batch * most)
        step = PagedStep(self.cache, table, seq_lens, offsets, slots, None, None, max_seqlen_q=most)
        states = self._run(ids, self.head.fuse(features[owner, place]), positions, step)
        last = (offsets[1:] - 1).clamp(min=0)
        start = (lengths - 2).clamp(min=0)
        return self._of_target(self._grow_under(states.index_select(0, last), table, start, active))

    def _guess(self, table: Tensor, lengths: Tensor) -> Draft:
        # The head's row of the root has the position and features of the token before it.
        return self._grow_under(self._read_until(self._unread_ends(), table), table, lengths - 2)

    def _grow_under(self, states: Tensor, table: Tensor, start: Tensor, active: Tensor | None = None) -> Draft:
        self._states = states
        roots = torch.zeros_like(start).long()
        draft = self._grow(self.head.logits(states), roots, table, start, self._sampling, active)
        self._states = None
        return draft

    def _unread_ends(self) -> list[tuple[GeneratedSequence, int]]:
        return [(sequence, sequence.root) for sequence in self._selected]

    def _enter(self, sequence: GeneratedSequence, start: int) -> None:
        if sequence.index in self._known:
            return
        if start:
            donor = next(
                sibling
                for index, sibling in self._known.items()
                if sibling.group == sequence.group and self._cached[index] + self._waiting.count(index) >= start
            )
            if self._cached[donor.index] < start:
                self._read_until([(donor, start)])
            self.cache.fork(donor.index, sequence.index, start)
        self._known[sequence.index], self._cached[sequence.index] = sequence, start

    def _read_known(self) -> None:
        ends = [(sequence, sequence.root - 1) for sequence in self._known.values()]
        if any(self._num_readable(sequence, end) for sequence, end in ends):
            self._read_until(ends)

    def _num_readable(self, sequence: GeneratedSequence, end: int) -> int:
        return max(min(end - self._cached[sequence.index], self._waiting.count(sequence.index)), 0)

    def _read_until(
        self, ends: list[tuple[GeneratedSequence, int]], table: Tensor | None = None, num_unknown: int = 0
    ) -> Tensor:
        """Reads each sequence's waiting features before a position; returns the states at the last ones, [B, H] if
        every sequence had some.

        table: the page table, if already built. num_unknown: P-EAGLE's unknown tokens, read but not kept; the states
        are then [B, 1 + num_unknown, H].
        """
        chunks, tokens, features, counts = list[tuple[GeneratedSequence, int, int]](), list[int](), [], []
        masks = [cast(int, self.head.config.mask_token_id)] * num_unknown if num_unknown else []
        for sequence, end in ends:
            start, count = self._cached[sequence.index], self._num_readable(sequence, end)
            if count == 0:
                continue
            features.append(self._waiting.take(sequence.index, count))
            counts.append(count)
            chunks.append((sequence, start, count + num_unknown))
            tokens += sequence.tokens[start + 1 : start + count + 1] + masks
            self._cached[sequence.index] = start + count
        step, positions = self._causal_step(chunks, table)
        fused = self.head.fuse(torch.cat(features))
        if num_unknown:
            unknown = self.head.unknown_state().expand(num_unknown, -1)
            fused = torch.cat([part for chunk in fused.split(counts) for part in (chunk, unknown)])
        states = self._run(torch.tensor(tokens, dtype=torch.int64).to(self.device), fused, positions, step)
        last = step.cu_seqlens_q[1:].long() - 1
        if num_unknown:
            last = last[:, None] + torch.arange(-num_unknown, 1, device=last.device, dtype=torch.int64)
        return states[last]

    def _read_level(self, state: drafting.DraftState, table: Tensor, start: Tensor) -> Tensor:
        assert self._states is not None
        # A node reads its parent's state, the head's output of the previous pass.
        batch, newest = state.batch_size, state.level_sizes[-1]
        before = self._states.shape[0] // batch
        parent = (state.frontier.long() - (state.num_candidates - newest)) // (newest // before)
        first = torch.arange(batch, device=parent.device, dtype=torch.int64)[:, None] * before
        rows = first + parent.clamp(0, before - 1)
        step = self._level_step(state, table, start)
        tokens = self.head.target_ids[state.level_tokens]
        self._states = self._run(tokens, self._states[rows.flatten()], state.level_positions(start), step)
        return self.head.logits(self._states)

    def _run(self, tokens: Tensor, states: Tensor, positions: Tensor, step: PagedStep) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = 0) -> Tensor:
            return step.attend(layer, q, k, v, window=0, options={})

        return self.head(tokens, states, positions, attend)


class ParallelEagleDrafter(EagleDrafter):
    """A P-EAGLE head that predicts all levels in one pass and proposes the likeliest tree over them.

    The text is followed by `depth - 1` unknown tokens, the head's mask token with `mask_hidden` as features. Each sees
    the text and the ones before it, and gives one level's distribution. Trees are as in `BlockDrafter`, the rest as in
    `EagleDrafter`.

    head: one with `mask_hidden` (`EagleHead.from_pretrained` of a folder of speculators); ValueError without.
    num_nodes, depth, width: as in `ModelDrafter`.
    """

    grows_by_level = False
    is_capturable = False

    def __init__(self, head: EagleHead, *, num_nodes: int = 16, depth: int = 8, width: int = 8) -> None:
        with torch.no_grad():
            head.unknown_state()  # refuses other heads
        super().__init__(head, num_nodes=num_nodes, depth=depth, width=width)
        self.width = width
        self._log_probs: Tensor | None = None  # joint ones, of the last proposal's nodes

    def propose(self, tokens: Tensor, lengths: Tensor) -> Draft:
        self._log_probs = None  # of trees of the root alone
        return super().propose(tokens, lengths)

    def confidence(self) -> Tensor | None:
        return self._log_probs

    def _guess(self, table: Tensor, lengths: Tensor) -> Draft:
        states = self._read_until(self._unread_ends(), table, num_unknown=self._depth - 1)
        logits = self.head.logits(states.view(len(self._selected), self._depth, -1))
        draft, self._log_probs = best_trees(logits, self.max_nodes, self.width)
        return draft
