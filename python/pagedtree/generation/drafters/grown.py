"""The base of drafters that grow trees level by level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pagedtree import Draft, drafting, expand_tree, rerank_tree, slot_mapping, start_draft
from pagedtree._arguments import refusal
from pagedtree.generation.drafters.base import Drafter
from pagedtree.generation.host_mirror import Mirror
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.paged_cache import PagedCache
from pagedtree.generation.paged_step import PagedStep
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence

INITIAL_PAGES = 64
# `draft_law` by law of `expand_tree`.
DRAFT_LAWS = {"topk": "onehot", "iid": "iid", "swor": "swor", "coupled": "coupled"}


def chosen_scores(scores: Tensor, num_nodes: int) -> Tensor:
    """Returns [N], the scores of the nodes that `rerank_tree` chooses by the candidates' scores [B, C]."""
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :num_nodes].sort(dim=1).values
    values = scores.gather(1, best)
    return values[values > -torch.inf]


class TreeGrower(Drafter):
    """Base of drafters whose model reads known tokens and then the levels of a tree, by `_read_level`.

    The model's cache is a pool that doubles when full; only running sequences hold pages.
    """

    grows_by_level = True

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        law: str,
        num_nodes: int,
        depth: int,
        width: int,
        branching: Sequence[int] | None = None,
    ) -> None:
        if law not in DRAFT_LAWS:
            raise refusal("law", f"one of {', '.join(DRAFT_LAWS)}", repr(law))
        if branching is not None and law == "topk":
            raise refusal("branching", 'None under law "topk", whose trees take shape by their scores')
        for name, value, least in (("num_nodes", num_nodes, 2), ("depth", depth, 1), ("width", width, 1)):
            if value < least:
                raise refusal(name, f"at least {least}", value)
        if branching is not None and (not branching or min(branching) < 1):
            raise refusal("branching", "levels of at least 1 child each", list(branching))
        self.vocab_size, self.device = vocab_size, device
        self.law, self.draft_law = law, DRAFT_LAWS[law]
        self.max_nodes = num_nodes
        # Children of a node, and how many of the new nodes the model reads, level by level.
        if law == "topk":
            self.num_children = [min(width, vocab_size)] * depth
            self.num_frontier = [width] * (depth - 1)
        else:
            most = vocab_size if law != "iid" else max(branching or [width])
            self.num_children = [min(count, most) for count in branching or [width] + [1] * (depth - 1)]
            self.num_frontier = list(accumulate(self.num_children, mul))[:-1]
        self.is_chain = max(self.num_children) == 1
        self.max_kv_nodes = 1 + sum(self.num_frontier)
        self.max_depth = len(self.num_children)
        self._reset(page_size=1)

    def _reset(self, page_size: int) -> None:
        self.cache = PagedCache(INITIAL_PAGES, page_size, self.device)
        self._known: dict[int, GeneratedSequence] = {}
        self._cached: dict[int, int] = {}  # tokens from the start that the cache certainly holds
        self._grown: Tensor | None = None  # the scores of the last proposal's candidates
        self._depth = self.max_depth
        self._tables: dict[int, Mirror] = {}  # page tables of captured steps, by batch size

    def check_target(self, model: PackedModel) -> None:
        if self.device != model.device:
            raise refusal("drafter", f"its model on the target's device {model.device}", self.device)

    def end(self) -> None:
        self._reset(page_size=1)

    def capture(self, model: PackedModel, sequences: list[GeneratedSequence], batch_size: int) -> None:
        """Grows the pool for all sequences: under a graph it cannot."""
        pages = [self.cache.pages_for(sequence.max_length + self.max_kv_nodes) for sequence in sequences]
        if self.cache.num_pages < sum(pages):
            self.cache.grow(sum(pages) - self.cache.num_pages)
        self._tables[batch_size] = Mirror((batch_size, max(pages)), torch.int32, self.cache.device)

    def confidence(self) -> Tensor | None:
        if self._grown is None or self.law != "topk":
            return None
        return chosen_scores(self._grown, self.max_nodes)

    def forget(self, sequence: GeneratedSequence) -> None:
        self.cache.release(sequence.index)
        self._known.pop(sequence.index, None)
        self._cached.pop(sequence.index, None)

    def _grow(
        self,
        logits: Tensor,
        roots: Tensor,
        table: Tensor,
        start: Tensor,
        sampling: Sampling,
        active: Tensor | None = None,
    ) -> Draft:
        """Returns trees under `roots`, by the model's logits there. start: int32 [B], their positions. Device only."""
        state = start_draft(roots, max_kv_nodes=self.max_kv_nodes, active=active)
        noise: dict[str, Any] = {}
        if self.law != "topk":
            seeds = sampling.seeds if self.law == "coupled" else sampling.draft_seeds(start)
            noise = {"params": sampling.params, "seeds": seeds, "positions": start}
        vocab_size = sampling.vocab_size or logits.shape[-1]
        depth = self._depth
        frontiers = [*self.num_frontier[: depth - 1], 0]
        for num_children, num_frontier in zip(self.num_children[:depth], frontiers, strict=True):
            logits = logits[:, :vocab_size]  # the target lacks the other tokens
            if self.law != "iid":  # the other laws draft no token twice
                num_children = min(num_children, vocab_size)
            num_frontier = min(num_frontier, state.num_frontier * num_children)
            state = expand_tree(
                state, logits, law=self.law, num_children=num_children, num_frontier=num_frontier, **noise
            )
            if num_frontier:
                logits = self._read_level(state, table, start)
        self._grown = state.scores
        draft = rerank_tree(state, self.max_nodes, active=active)
        if draft.draft_probs is not None:  # tokens that the model lacks have probability 0
            padding = vocab_size - draft.draft_probs.shape[-1]
            draft = draft._replace(draft_probs=F.pad(draft.draft_probs, (0, padding)) if padding else draft.draft_probs)
        return draft

    def _read_level(self, state: drafting.DraftState, table: Tensor, start: Tensor) -> Tensor:
        """Runs one pass over the frontiers; returns logits [B * F, V]."""
        raise NotImplementedError

    def _level_step(self, state: drafting.DraftState, table: Tensor, start: Tensor) -> PagedStep:
        tree_lens, offsets, present = state.level_tree_lens, state.cu_seqlens_q, state.level_present
        seq_lens = start + tree_lens
        slots = slot_mapping(table, seq_lens, offsets, self.cache.page_size, total_q=present.shape[0])
        slots = torch.where(present, slots, -1)
        return PagedStep(self.cache, table, seq_lens, offsets, slots, state.level_mask, tree_lens, state.num_frontier)

    def _causal_step(
        self, chunks: list[tuple[GeneratedSequence, int, int]], table: Tensor | None = None
    ) -> tuple[PagedStep, Tensor]:
        """Returns a causal pass's step, and its positions. chunks: sequence, position of its first token, number of
        tokens. table: their pages, if already reserved."""
        offsets = [0, *accumulate(count for _, _, count in chunks)]
        ends = [begin + count for _, begin, count in chunks]
        places = [place for _, begin, count in chunks for place in range(begin, begin + count)]
        if table is None:
            for (sequence, _, _), end in zip(chunks, ends, strict=True):
                self.cache.reserve_growing(sequence.index, end)
            table = self.cache.page_table([sequence.index for sequence, _, _ in chunks])
        seq_lens, cu_seqlens_q = (torch.tensor(x, dtype=torch.int32).to(self.device) for x in (ends, offsets))
        slots = slot_mapping(table, seq_lens, cu_seqlens_q, self.cache.page_size, total_q=offsets[-1])
        longest = max(count for _, _, count in chunks)
        step = PagedStep(self.cache, table, seq_lens, cu_seqlens_q, slots, None, None, longest)
        return step, torch.tensor(places, dtype=torch.int64).to(self.device)

    def _reserve_trees(self, sequences: Sequence[GeneratedSequence]) -> list[list[int]]:
        for sequence in sequences:
            self.cache.reserve_growing(sequence.index, sequence.root + self.max_kv_nodes)
        return [self.cache.pages(sequence.index) for sequence in sequences]
