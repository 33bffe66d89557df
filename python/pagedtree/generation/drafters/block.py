"""The drafter of DFlash's block draft models."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pagedtree import Draft, append_kv, slot_mapping
from pagedtree._arguments import refusal
from pagedtree.generation.drafters.base import best_trees
from pagedtree.generation.drafters.block_model import BlockDraftModel
from pagedtree.generation.drafters.block_steps import attend_in_parts, selected_trees
from pagedtree.generation.drafters.grown import INITIAL_PAGES
from pagedtree.generation.drafters.target import check_attention, check_place
from pagedtree.generation.drafters.waiting_features import FeatureReader, WaitingFeatures
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.paged_cache import PagedCache
from pagedtree.generation.paged_step import PagedStep
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence


class BlockDrafter(FeatureReader):
    """A drafter that predicts all levels in one pass and proposes the likeliest tree over them.

    One pass over [root, mask, mask, ...], whose tokens see the text and each other, gives an independent distribution
    per place after the root, for `pagedtree.best_first_tree`. The keys and values of the text come from the target's
    features, of which at most 256 MiB wait while nothing is drafted (`generate(tree="auto")`).

    Sources: DFlash (Chen et al., 2026, arXiv 2602.06036); DDTree (Ringel and Romano, 2026, arXiv 2604.12989).

    model: made for the target of `generate`. num_nodes, depth, width: as in `ModelDrafter`; depth: default all places
    of the block.
    """

    def __init__(
        self, model: BlockDraftModel, *, num_nodes: int = 16, depth: int | None = None, width: int = 8
    ) -> None:
        most = model.config.most_levels
        depth = most if depth is None else depth
        for name, value, least in (("num_nodes", num_nodes, 2), ("depth", depth, 1), ("width", width, 1)):
            if value < least:
                raise refusal(name, f"at least {least}", value)
        if depth > most:
            raise refusal("depth", f"at most {most}, the mask tokens of a block", depth)
        if model.candidate_selector is not None:
            width = min(width, model.candidate_selector.top_k)
        config = model.config
        check_attention(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        self.model, self.device, self.networks = model, model.fc.weight.device, (model,)
        self.feature_layers = model.config.target_layer_ids
        self.width, self.is_chain = width, width == 1
        self.max_nodes = min(num_nodes, self._possible(depth))
        self.max_depth = min(depth, self.max_nodes - 1)
        self._reset(page_size=1)

    def _reset(self, page_size: int) -> None:
        self.cache = PagedCache(INITIAL_PAGES, page_size, self.device)
        # The cache holds the tokens of a sequence from its first one that was seen up to the end, exclusive.
        self._first: dict[int, int] = {}
        self._end: dict[int, int] = {}
        self._known: dict[int, GeneratedSequence] = {}
        self._waiting = WaitingFeatures(self._enter_read, self._read_waiting)
        self._log_probs: Tensor | None = None  # joint ones, of the last proposal's nodes
        self._depth = self.max_depth
        self._vocab_size: int | None = None

    def check_target(self, model: PackedModel) -> None:
        check_place(self.model.parameters(), model, (self.model.embeddings,))
        self.model.check_target(model.hidden_size, model.vocab_size)

    def begin(self, page_size: int, sampling: Sampling) -> None:
        self._reset(page_size)
        self._vocab_size = sampling.vocab_size

    def end(self) -> None:
        self._reset(page_size=1)

    def _possible(self, depth: int) -> int:
        return sum(self.width**level for level in range(depth + 1))

    def forget(self, sequence: GeneratedSequence) -> None:
        self._waiting.forget(sequence.index)
        self._leave(sequence)

    def _leave(self, sequence: GeneratedSequence) -> None:
        self.cache.release(sequence.index)
        for entries in (self._first, self._end, self._known):
            entries.pop(sequence.index, None)

    def _enter_read(self, sequence: GeneratedSequence, begin: int) -> None:
        if begin > self._end.get(sequence.index, 0):  # another outcome of its prompt may have read the pages
            self._read_waiting()
        self._enter(sequence, begin)

    def _read_waiting(self) -> None:
        self._append(self._waiting.take_all())

    def propose(self, tokens: Tensor, lengths: Tensor) -> Draft:
        self._waiting.sort()
        self._read_waiting()
        start = (lengths - 1).long()
        roots = tokens.gather(1, start[:, None])[:, 0]
        states = self._guess(roots, start, self._depth)
        logits = self.model.logits(states)
        if self.model.target_ids is None:
            logits = logits[..., : self._vocab_size]
        num_nodes = min(self.max_nodes, self._possible(self._depth))
        if self.model.candidate_selector is not None:
            draft, self._log_probs = selected_trees(
                self.model.candidate_selector, roots, states, logits, num_nodes, self.width
            )
            return draft
        draft, self._log_probs = best_trees(logits, num_nodes, self.width)
        if self.model.target_ids is None:
            return draft
        return draft._replace(draft_tokens=self.model.target_ids[draft.draft_tokens.clamp(min=0)])

    def confidence(self) -> Tensor | None:
        return self._log_probs

    def _guess(self, roots: Tensor, start: Tensor, depth: int) -> Tensor:
        sequences, config = self._selected, self.model.config
        size, batch = config.block_size, len(self._selected)
        for sequence in sequences:
            self._enter(sequence, sequence.root)
            self._reserve(sequence, sequence.root + size)
        table = self.cache.page_table([sequence.index for sequence in sequences])
        seq_lens = self._int32([sequence.root + size - self._first[sequence.index] for sequence in sequences])
        offsets = self._int32(range(0, (batch + 1) * size, size))
        # The block's keys use these slots until the text reaches them.
        slots = slot_mapping(table, seq_lens, offsets, self.cache.page_size, total_q=batch * size)
        mask = torch.full((batch * size, -(-size // 32)), -1, dtype=torch.int32, device=self.device)
        step = PagedStep(self.cache, table, seq_lens, offsets, slots, mask, torch.full_like(seq_lens, size), size)
        causal = replace(step, tree_mask=None, tree_lens=None)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window, around = config.window(layer), config.two_sided_window(layer)
            if window is None and (config.window_from_anchor or not around):
                # The op places the whole block at its last position and counts the window from there.
                return step.attend(layer, q, k, v, around + size if around else 0, {})
            if window is None or (window and config.window_from_anchor):
                return attend_in_parts(causal, layer, q, k, v, window or 0, around)
            return causal.attend(layer, q, k, v, window, {})

        block = roots.new_full((batch, size), config.mask_token_id)
        block[:, 0] = roots
        positions = start[:, None] + torch.arange(size, device=start.device, dtype=torch.int64)
        states = self.model(block.flatten(), positions.flatten(), attend).view(batch, size, -1)
        first = 0 if config.sample_from_anchor else 1
        return states[:, first : depth + first]

    def _append(self, parts: list[tuple[GeneratedSequence, int, Tensor]]) -> None:
        """Appends to the context: sequences, position of each one's first token, features [n, F]."""
        if not parts:
            return
        first: list[int] = []
        ends: list[int] = []
        offsets, positions = [0], list[int]()
        for sequence, begin, features in parts:
            end = begin + features.shape[0]
            self._enter(sequence, begin)
            self._reserve(sequence, end)
            self._end[sequence.index] = end
            first.append(self._first[sequence.index])
            ends.append(end - first[-1])
            offsets.append(offsets[-1] + features.shape[0])
            positions += range(begin, end)
        table = self.cache.page_table([sequence.index for sequence, _, _ in parts])
        slots = slot_mapping(
            table, self._int32(ends), self._int32(offsets), self.cache.page_size, total_q=len(positions)
        )
        features = torch.cat([features for _, _, features in parts])
        context = self.model.context(features, torch.tensor(positions, dtype=torch.int64).to(self.device))
        for layer, (k, v) in enumerate(context):
            append_kv(k, v, *self.cache.layer(layer, k, v), slots)

    def _enter(self, sequence: GeneratedSequence, begin: int) -> None:
        """Ensures that the context of the sequence ends at `begin`.

        Outcomes share the pages of their prompt. If the text up to `begin` was not seen, the context starts at `begin`;
        only the drafts get worse.
        """
        if self._end.get(sequence.index) == begin:
            return
        self._leave(sequence)
        siblings = (index for index, sibling in self._known.items() if sibling.group == sequence.group)
        donors = (index for index in siblings if self._first[index] == 0 and self._end[index] >= begin)
        donor = next(donors, None) if 0 < begin == sequence.shared_len else None
        if donor is not None:
            self.cache.fork(donor, sequence.index, begin)
        self._first[sequence.index] = begin if donor is None else 0
        self._end[sequence.index], self._known[sequence.index] = begin, sequence

    def _reserve(self, sequence: GeneratedSequence, end: int) -> None:
        self.cache.reserve_growing(sequence.index, end - self._first[sequence.index])

    def _int32(self, values: list[int] | range) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device, non_blocking=True)
