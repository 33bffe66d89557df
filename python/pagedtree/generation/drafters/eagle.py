"""EAGLE-3: trees that a head grows from the target's features, with its own paged cache (Li et al., 2025)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from pagedtree import Draft, DraftState
from pagedtree.generation.drafters.base import FeatureRows, StepResult, roots_only
from pagedtree.generation.drafters.eagle_head import EagleHead
from pagedtree.generation.drafters.grown import TreeGrower
from pagedtree.generation.drafters.target import check_place
from pagedtree.generation.drafters.waiting_features import WaitingFeatures
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.paged_step import PagedStep
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence

__all__ = ["EagleDrafter"]


class EagleDrafter(TreeGrower):
    """An EAGLE-3 head grows a tree of at most `num_nodes` nodes and `depth` levels, by its most likely tokens.

    Each step runs the head `depth` times: over what the target has read since the last step, with the target's
    features, then over the best `width` nodes of each level but the last, with its own states in their place. Of all
    candidates the `num_nodes` best are the tree (EAGLE-2). The head has pages of its own, which do not count in
    `num_pages` of `generate`; only running sequences hold pages. The pool doubles when it is full. While nothing is
    drafted, as `generate(tree="auto")` may decide, at most 256 MiB of features wait to be read.

    Args:
        head: the head, made for the target that `generate` gets.
        num_nodes: nodes of the tree, the root included.
        depth, width: levels, and children of a node; width 1 gives a chain.
    """

    def __init__(self, head: EagleHead, *, num_nodes: int = 16, depth: int = 5, width: int = 4) -> None:
        head.check_attention()
        self.head, self.feature_layers, self.networks = head, head.feature_layers, (head,)
        self.num_weights = sum(weight.numel() for weight in head.parameters())
        super().__init__(head.vocab_size, head.target_ids.device, "topk", num_nodes, depth, width)

    def _reset(self, page_size: int) -> None:
        super()._reset(page_size)
        self._waiting = WaitingFeatures(self._enter, self._read_known)
        self._states: Tensor | None = None  # [B * F, H], what the head gave at the frontier that it read last

    def check_target(self, model: PackedModel) -> None:
        super().check_target(model)
        check_place([*self.head.parameters(), self.head.input_rows, self.head.output_rows], model)
        self.head.check_target(model.hidden_size, model.vocab_size)

    def begin(self, page_size: int, sampling: Sampling) -> None:
        largest = int(self.head.target_ids.max())
        if sampling.vocab_size is not None and largest >= sampling.vocab_size:
            raise ValueError(f"drafter: expected a head of the target's {sampling.vocab_size} tokens, got {largest}")
        self._reset(page_size)
        self._sampling = sampling

    def read(self, rows: FeatureRows) -> None:
        self._waiting.read(rows)

    def observe(self, result: StepResult, rows: Tensor | None = None) -> None:
        self._waiting.observe(result)

    def unread(self, sequences: list[GeneratedSequence]) -> int:
        return self._waiting.unread(sequences)

    def forget(self, sequence: GeneratedSequence) -> None:
        self._waiting.forget(sequence.index)
        super().forget(sequence)

    def propose(
        self, tokens: Tensor, lengths: Tensor, active: Tensor | None = None, rows: Tensor | None = None
    ) -> Draft:
        self._waiting.sort()
        if not all(sequence.index in self._known for sequence in self._selected):
            self._grown = None
            # A text of one token, or one of which another outcome has read all but the last, has no features yet.
            return roots_only(tokens.shape[0], tokens.device)
        draft = self._guess(self.cache.table_of(self._reserve_trees(self._selected)), lengths)
        for sequence in self._selected:  # of the tree's nodes nothing stays
            self.cache.trim(sequence.index, self._cached[sequence.index])
        return draft._replace(draft_tokens=self.head.target_ids[draft.draft_tokens.clamp(min=0)])

    def _guess(self, table: Tensor, lengths: Tensor) -> Draft:
        """The trees of the selected sequences, in tokens of the draft vocabulary."""
        states = self._read_until(self._unread_ends(), table)
        # The head's row of the root's token stands at the place of the token before it, whose features it has.
        start = lengths - 2
        self._states = states
        draft = self._grow(self.head.logits(states), torch.zeros_like(start).long(), table, start, self._sampling)
        self._states = None
        return draft

    def _unread_ends(self) -> list[tuple[GeneratedSequence, int]]:
        return [(sequence, sequence.root) for sequence in self._selected]

    def _enter(self, sequence: GeneratedSequence, start: int) -> None:
        """Makes the sequence known, of which another outcome of the prompt has read the pages before `start`."""
        if sequence.index in self._known:
            return
        if start:
            donor = next(
                other
                for index, other in self._known.items()
                if other.group == sequence.group and self._cached[index] + self._waiting.count(index) >= start
            )
            if self._cached[donor.index] < start:
                self._read_until([(donor, start)])
            self.cache.fork(donor.index, sequence.index, start)
        self._known[sequence.index], self._cached[sequence.index] = sequence, start

    def _read_known(self) -> None:
        """Reads what waits, but for the newest token of each sequence, whose state `propose` needs."""
        ends = [(sequence, sequence.root - 1) for sequence in self._known.values()]
        if any(self._num_readable(sequence, end) for sequence, end in ends):
            self._read_until(ends)

    def _num_readable(self, sequence: GeneratedSequence, end: int) -> int:
        """Returns how many of the sequence's waiting features stand in front of position `end`."""
        return max(min(end - self._cached[sequence.index], self._waiting.count(sequence.index)), 0)

    def _read_until(
        self, ends: list[tuple[GeneratedSequence, int]], table: Tensor | None = None, num_unknown: int = 0
    ) -> Tensor:
        """Reads the waiting features of each sequence in front of a position, and returns the states at the last ones
        read, [B, H] if all had some. The token at that position must be known.

        table: the page table of all these sequences, where it is made already. num_unknown: so many tokens behind that
        position are read with them, of P-EAGLE's kind, and not kept; the states are then [B, 1 + num_unknown, H].
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
            fused = torch.cat([part for known in fused.split(counts) for part in (known, unknown)])
        states = self._run(torch.tensor(tokens).to(self.device), fused, positions, step)
        last = step.cu_seqlens_q[1:].long() - 1
        if num_unknown:
            last = last[:, None] + torch.arange(-num_unknown, 1, device=last.device)
        return states[last]

    def _read_level(self, state: DraftState, table: Tensor, start: Tensor) -> Tensor:
        assert self._states is not None
        # A node reads the state of its parent, which the head gave in the pass before.
        batch, newest = state.batch_size, state.level_sizes[-1]
        before = self._states.shape[0] // batch
        parent = (state.frontier.long() - (state.num_candidates - newest)) // (newest // before)
        rows = parent.clamp(0, before - 1) + torch.arange(batch, device=parent.device)[:, None] * before
        step = self._level_step(state, table, start)
        tokens = self.head.target_ids[state.level_tokens]
        self._states = self._run(tokens, self._states[rows.flatten()], state.level_positions(start), step)
        return self.head.logits(self._states)

    def _run(self, tokens: Tensor, states: Tensor, positions: Tensor, step: PagedStep) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = 0) -> Tensor:
            return step.attend(layer, q, k, v, window=0, options={})

        return self.head(tokens, states, positions, attend)
