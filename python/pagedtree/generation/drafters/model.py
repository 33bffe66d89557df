"""Drafts of a smaller model with a separate paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor

from pagedtree import Commit, Draft, Verdict, commit, drafting, slot_mapping
from pagedtree._arguments import argument_error, refusal
from pagedtree.generation.drafters.base import StepResult
from pagedtree.generation.drafters.grown import TreeGrower
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.paged_step import PagedStep
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence

# Vocabularies are padded to multiples of at most a few hundred.
MAX_PADDING = 1024


class ModelDrafter(TreeGrower):
    """A draft model with the target's tokenizer that grows a tree of at most `num_nodes` nodes and `depth` levels.

    Each step runs the draft model `depth` times: over the unread tokens, then over some nodes of each level but the
    last. Its cache, outside `num_pages` of `generate`, doubles when full.

    Vocabulary padding may differ by at most 1024: tokens that the target lacks are never drafted, tokens that the draft
    model lacks have probability 0.

    Args:
        model: a causal language model (a `PackedModel`; in `pagedtree.integrations.transformers` one of transformers)
            with the target's tokenizer, on its device, without recurrent layers.
        law: how the children of a node are chosen (`pagedtree.expand_tree`).
            "topk": the likeliest ones (EAGLE-2). Any rule but "traversal".
            "iid", "swor": drawn under the sampling parameters of `generate`, independently or without replacement. The
                rules that weigh probabilities accept most of these.
            "coupled": like "swor", with the noise of rule "sampled", only for it.
        num_nodes: nodes of the tree, root included.
        depth, width: levels, and children of a node; width 1 gives a chain. Under "topk" the best `width` nodes of a
            level have children; the other laws make `width` chains.
        branching: children of each node by level, instead of depth and width, not under "topk"; `num_nodes` keeps the
            first nodes.
        max_batch_tokens: about the most prompt tokens per pass.
    """

    is_capturable = True

    def __init__(
        self,
        model: Any,
        *,
        law: str = "topk",
        num_nodes: int = 16,
        depth: int = 4,
        width: int = 4,
        branching: Sequence[int] | None = None,
        max_batch_tokens: int = 4096,
    ) -> None:
        self.model, self.packed, self.networks = model, self.pack(model), (model,)
        if self.packed.is_recurrent:  # a tree grows level by level, and a state belongs to a single path
            raise refusal("drafter", "a draft model without recurrent layers", type(model).__name__)
        self.num_weights, self.num_positions = self.packed.num_weights, self.packed.num_positions
        self.max_batch_tokens = max_batch_tokens
        self._context, self._attends = ExitStack(), False
        super().__init__(self.packed.vocab_size, self.packed.device, law, num_nodes, depth, width, branching)

    def _reset(self, page_size: int) -> None:
        super()._reset(page_size)
        # The last proposal, and the part of it that the target verifies.
        self._grown_draft: Draft | None = None
        self._draft: Draft | None = None
        self._table: Tensor | None = None  # the page table of the last proposal

    def pack(self, model: Any) -> PackedModel:
        """Returns `model` as a `PackedModel`; adapters override this for models of their library."""
        return cast(PackedModel, model)

    def begin(self, page_size: int, sampling: Sampling) -> None:
        if self.law != "topk" and sampling.params is None:
            raise argument_error("drafter", f'law "{self.law}" draws by the params of `generate`, got None')
        size, of_target = self.packed.num_logits, sampling.vocab_size
        if of_target is not None and abs(size - of_target) > MAX_PADDING:
            wanted = f"a draft model of the target's vocabulary, {of_target} tokens up to {MAX_PADDING} of padding"
            raise refusal("drafter", wanted, size)
        self._reset(page_size)
        self._sampling = sampling

    def end(self) -> None:
        self._context.close()
        self._attends = False
        super().end()

    def _attend(self) -> None:
        """Installs our attention. In `begin` this would delay a short prompt's first token by 1 %."""
        if not self._attends:
            self._context.enter_context(self.packed.use())
            self._attends = True

    def capture(self, model: PackedModel, sequences: list[GeneratedSequence], batch_size: int) -> None:
        self._attend()
        super().capture(model, sequences, batch_size)

    def select_captured(self, sequences: list[GeneratedSequence], batch_size: int) -> None:
        super().select_captured(sequences, batch_size)
        unread = [
            s
            for s in sequences
            if self._has_position(s.root) and (s.index not in self._known or self._cached[s.index] < len(s.tokens) - 2)
        ]
        if unread:
            self._read(unread)
        self._tables[batch_size].set(self._reserve_trees(sequences))

    def propose(self, tokens: Tensor, lengths: Tensor) -> Draft:
        start = lengths - 1
        roots, logits = tokens.gather(1, start.long()[:, None])[:, 0], self._read(self._selected)
        self._table = table = self.cache.table_of(self._reserve_trees(self._selected))
        self._draft = self._grown_draft = self._grow(logits, roots, table, start, self._sampling.of(self._selected))
        return self._draft

    def propose_captured(self, tokens: Tensor, lengths: Tensor, active: Tensor, rows: Tensor) -> Draft:
        start, table = lengths - 1, self._tables[rows.shape[0]].tensor
        roots = tokens.gather(1, start.long().clamp(min=0)[:, None])[:, 0]
        logits = self._read_last_two(tokens, lengths, table)
        return self._grow(logits, roots, table, start, self._sampling.at(rows), active)

    def observe_captured(self, result: StepResult, rows: Tensor) -> None:
        self._compact(self._tables[rows.shape[0]].tensor, result.start, result.commit)

    def observe(self, result: StepResult) -> None:
        if result.num_read == len(result.sequences) or self._draft is None:
            return
        drafted, start = result.sequences[result.num_read :], result.start[result.num_read :]
        verdict = Verdict(*(tensor[result.num_read :] for tensor in result.verdict))
        if len(drafted) > len(self._selected):  # another drafter drafted for the rest
            places = {sequence.index: i for i, sequence in enumerate(drafted)}
            which = torch.tensor([places[s.index] for s in self._selected], dtype=torch.int64).to(start.device)
            drafted, start = list(self._selected), start.index_select(0, which)
            verdict = Verdict(*(tensor.index_select(0, which) for tensor in verdict))
        committed = commit(verdict, self._draft.trees, start, node_map=self._draft.node_map)
        assert self._table is not None  # of the selected sequences
        self._compact(self._table, start, committed)
        self.advance(drafted)
        self._draft = self._grown_draft = self._table = None

    def narrow(self, draft: Draft, rows: Tensor) -> None:
        assert self._grown_draft is not None and self._grown_draft.node_map is not None
        self._draft = draft._replace(node_map=self._grown_draft.node_map[rows.clamp(min=0).long()])

    def unread(self, sequences: list[GeneratedSequence]) -> int:
        return sum(max(len(s.tokens) - self._cached.get(s.index, 0) - 2, 0) for s in sequences)

    def _compact(self, table: Tensor, start: Tensor, committed: Commit) -> None:
        assert committed.draft_accept_index is not None and committed.draft_num_accepted is not None
        self.cache.compact(table, start, committed.draft_accept_index, committed.draft_num_accepted)

    def advance(self, sequences: list[GeneratedSequence]) -> None:
        for sequence in sequences:
            # The last accepted token may be unread. Reading it again is cheaper than a device synchronisation.
            self._cached[sequence.index] = len(sequence.tokens) - 2
            self.cache.trim(sequence.index, len(sequence.tokens) - 1)

    def _read(self, sequences: Sequence[GeneratedSequence]) -> Tensor:
        self._attend()
        logits: dict[int, Tensor] = {}
        while len(logits) < len(sequences):
            budget = self.max_batch_tokens
            chunks: list[tuple[GeneratedSequence, int]] = []
            for sequence in sequences:
                if sequence.index in logits or not self._enter(sequence):
                    continue
                count = min(len(sequence.tokens) - self._cached[sequence.index], budget)
                if count > 0:
                    chunks.append((sequence, count))
                    budget -= count
            complete, last = self._read_chunks(chunks)
            logits.update(zip((sequence.index for sequence in complete), last, strict=True))
        return torch.stack([logits[sequence.index] for sequence in sequences])

    def _enter(self, sequence: GeneratedSequence) -> bool:
        """Registers a sequence with its prompt's pages; False while another outcome reads these."""
        if sequence.index in self._known:
            return True
        siblings = [index for index, other in self._known.items() if other.group == sequence.group]
        donor = next((index for index in siblings if self._cached[index] >= sequence.shared_len > 0), None)
        if sequence.shared_len and siblings and donor is None:
            return False
        if donor is not None:
            self.cache.fork(donor, sequence.index, sequence.shared_len)
        self._known[sequence.index] = sequence
        self._cached[sequence.index] = sequence.shared_len if donor is not None else 0
        return True

    def _read_chunks(self, chunks: list[tuple[GeneratedSequence, int]]) -> tuple[list[GeneratedSequence], Tensor]:
        tokens: list[int] = []
        complete, rows = [], []
        step, positions = self._causal_step([(s, self._cached[s.index], count) for s, count in chunks])
        for sequence, count in chunks:
            begin = self._cached[sequence.index]
            tokens += sequence.tokens[begin : begin + count]
            self._cached[sequence.index] = begin + count
            if begin + count == len(sequence.tokens):
                complete.append(sequence)
                rows.append(len(tokens) - 1)
        ids = torch.tensor(tokens, dtype=torch.int64).clamp(max=self.vocab_size - 1).to(self.device)
        indices = torch.tensor(rows, dtype=torch.int64).to(self.device)
        return complete, self.packed.run(ids, positions, step, indices).logits

    def _read_last_two(self, tokens: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """Returns logits [B, V] at the roots, after reading them and the tokens before. Device only."""
        num_rows = lengths.shape[0]
        positions = (lengths - 1).long()[:, None] + torch.arange(-1, 1, device=lengths.device, dtype=torch.int64)
        ids = tokens.gather(1, positions.clamp(min=0)).flatten().clamp(max=self.vocab_size - 1)
        offsets = torch.arange(num_rows + 1, dtype=torch.int32, device=lengths.device) * 2
        slots = slot_mapping(table, lengths, offsets, self.cache.page_size, total_q=2 * num_rows)
        step = PagedStep(self.cache, table, lengths, offsets, slots, None, None, max_seqlen_q=2)
        return self.packed.run(ids, self._clamped(positions).flatten(), step).logits[1::2]

    def _read_level(self, state: drafting.DraftState, table: Tensor, start: Tensor) -> Tensor:
        step = self._level_step(state, table, start)
        return self.packed.run(state.level_tokens, self._clamped(state.level_positions(start)), step).logits

    def _has_position(self, position: int) -> bool:
        return self.num_positions is None or position < self.num_positions

    def _clamped(self, positions: Tensor) -> Tensor:
        return positions.clamp(min=0, max=None if self.num_positions is None else self.num_positions - 1)
