"""Drafts from a smaller model: trees grown level by level with its own paged cache, by score or by drawing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate
from operator import mul
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from pagedtree import (
    Commit,
    Draft,
    DraftState,
    DraftTree,
    Verdict,
    commit,
    compact_kv,
    expand_tree,
    rerank_tree,
    slot_mapping,
    start_draft,
)
from pagedtree.generation.drafters.base import Drafter, StepResult
from pagedtree.generation.mirror import Mirror
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.paged_cache import PagedCache
from pagedtree.generation.paged_step import PagedStep
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence

__all__ = ["ModelDrafter"]

INITIAL_PAGES = 64
# Models of one tokenizer pad their vocabularies to multiples of at most some hundred.
MAX_PADDING = 1024
# What `expand_tree` calls its law, and what that is to the rules of verification.
DRAFT_LAWS = {"topk": "onehot", "iid": "iid", "swor": "swor", "coupled": "coupled"}


class ModelDrafter(Drafter):
    """A draft model of the target's tokenizer grows a tree of at most `num_nodes` nodes and `depth` levels.

    Each step runs the draft model `depth` times: over what it has not read yet, then over some nodes of each level but
    the last. What it read of the accepted path stays in its cache. It has pages of its own, which do not count in
    `num_pages` of `generate`. That number limits them all the same: only running sequences hold pages, for their tokens
    and the nodes read. The pool doubles when it is full.

    Token ids mean the same to both models, but one may pad its vocabulary further than the other (Qwen2.5 has 151936 or
    152064 rows): what the target lacks is never drafted, and has probability 0. Sizes that differ by more than 1024 are
    refused when `generate` begins. Another tokenizer of about the same size cannot be told from padding: its drafts are
    rejected, and the text stays right.

    Args:
        model: a causal language model (a `PackedModel`; in `pagedtree.integrations.transformers` one of transformers),
            under the same conditions as the target, on the same device.
        law: how the children of a node are chosen (`pagedtree.expand_tree`).
            "topk": the likeliest ones; the tree takes shape by their scores (EAGLE-2). Any rule but "traversal".
            "iid", "swor": drawn from what the draft model gives under the sampling parameters of `generate`,
                independently or without replacement. The rules that weigh probabilities accept most of these.
            "coupled": as "swor", but by the noise with which rule "sampled" samples the target, for that rule only.
        num_nodes: nodes of the tree, the root included.
        depth, width: levels, and children of a node; width 1 gives a chain. Under "topk" the best `width` nodes of a
            level have children. Under the other laws the root has `width` children and every other node has one, which
            gives `width` chains.
        branching: in place of depth and width, not under "topk": children of each node, level by level, of which
            `num_nodes` keeps the first ones.
        max_batch_tokens: prompts are read in chunks, so that a pass has about this many tokens.
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
        packed = self.pack(model)
        if law not in DRAFT_LAWS:
            raise ValueError(f"law: expected one of {', '.join(DRAFT_LAWS)}, got {law!r}")
        if branching is not None and law == "topk":
            raise ValueError('branching: expected None under law "topk", whose trees take shape by their scores')
        for name, value, least in (("num_nodes", num_nodes, 2), ("depth", depth, 1), ("width", width, 1)):
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if branching is not None and (not branching or min(branching) < 1):
            raise ValueError(f"branching: expected levels of at least 1 child each, got {list(branching)}")
        self.model, self.packed = model, packed
        self.vocab_size, self.device = packed.vocab_size, packed.device
        self.law, self.draft_law = law, DRAFT_LAWS[law]
        self.max_nodes = num_nodes
        self.max_batch_tokens = max_batch_tokens
        # Children of a node, and how many of the new nodes the draft model reads, level by level.
        if law == "topk":
            self.num_children = [min(width, self.vocab_size)] * depth
            self.num_frontier = [width] * (depth - 1)
        else:
            most = self.vocab_size if law != "iid" else max(branching or [width])
            self.num_children = [min(count, most) for count in branching or [width] + [1] * (depth - 1)]
            self.num_frontier = list(accumulate(self.num_children, mul))[:-1]
        self.is_chain = max(self.num_children) == 1
        self.max_kv_nodes = 1 + sum(self.num_frontier)
        self.max_depth = len(self.num_children)
        self._context, self._attends = ExitStack(), False
        self._is_long: bool | None = None  # found by `prepare`; None where nobody calls it, as in vLLM
        self._reset(page_size=1)

    def _reset(self, page_size: int) -> None:
        self.cache = PagedCache(INITIAL_PAGES, page_size, self.device)
        self._known: dict[int, GeneratedSequence] = {}
        self._cached: dict[int, int] = {}  # tokens from the start that the cache holds for certain
        self._selected: list[GeneratedSequence] = []
        self._draft: Draft | None = None
        self._grown: tuple[Tensor, int] | None = None  # the scores of the last proposal's candidates, and its nodes
        self._tables: dict[int, Mirror] = {}  # page tables of captured steps, by batch size
        self._limits = (self.max_nodes, self.max_depth)

    def pack(self, model: Any) -> PackedModel:
        """`model` as the drafter runs it; adapters take models of their library and override this."""
        return cast(PackedModel, model)

    def prepare(self, sequences: list[GeneratedSequence]) -> None:
        self._is_long = self.packed.check_sequences("drafter: its model", sequences)

    def begin(self, page_size: int, sampling: Sampling) -> None:
        if self.law != "topk" and sampling.params is None:
            raise ValueError(f'drafter: law "{self.law}" draws by the params of `generate`, got None')
        own, of_target = self.packed.num_logits, sampling.vocab_size
        if of_target is not None and abs(own - of_target) > MAX_PADDING:
            raise ValueError(
                f"drafter: expected a draft model of the target's vocabulary, {of_target} tokens up to {MAX_PADDING} of"
                f" padding, got {own}"
            )
        self._reset(page_size)
        self._sampling = sampling

    def end(self) -> None:
        self._context.close()
        self._attends, self._is_long = False, None
        self._reset(page_size=1)

    def _attend(self) -> None:
        """Gives the draft model our attention. In `begin` this would delay a short prompt's first token by 1 %."""
        if not self._attends:
            self._context.enter_context(self.packed.use(self._is_long))
            self._attends = True

    def capture(self, model: PackedModel, sequences: list[GeneratedSequence], batch_size: int) -> None:
        """Makes the pool hold all sequences from here on: it cannot grow under a graph."""
        self._attend()
        pages = [self.cache.pages_for(sequence.max_length + self.max_kv_nodes) for sequence in sequences]
        if self.cache.num_pages < sum(pages):
            self.cache.grow(sum(pages) - self.cache.num_pages)
        self._tables[batch_size] = Mirror((batch_size, max(pages)), torch.int32, self.cache.device)

    def select(self, sequences: list[GeneratedSequence], batch_size: int | None = None) -> None:
        self._selected = sequences
        if batch_size is None:
            return
        unread = [s for s in sequences if s.index not in self._known or self._cached[s.index] < len(s.tokens) - 2]
        if unread:
            self._read(unread)
        self._tables[batch_size].set(self._reserve_trees(sequences))

    def propose(
        self, tokens: Tensor, lengths: Tensor, active: Tensor | None = None, rows: Tensor | None = None
    ) -> Draft:
        start = lengths - 1
        roots = tokens.gather(1, start.long().clamp(min=0)[:, None])[:, 0]
        if rows is not None:
            table = self._tables[rows.shape[0]].tensor
            logits = self._read_last_two(tokens, lengths, table)
            return self._grow(logits, roots, table, start, self._sampling.at(rows), active)
        logits = self._read(self._selected)
        table = self.cache.table_of(self._reserve_trees(self._selected))
        self._draft = self._grow(logits, roots, table, start, self._sampling.of(self._selected))
        return self._draft

    def _grow(
        self,
        logits: Tensor,
        roots: Tensor,
        table: Tensor,
        start: Tensor,
        sampling: Sampling,
        active: Tensor | None = None,
    ) -> Draft:
        """Trees under `roots`, where the draft model's logits are known; runs on the device alone."""
        state = start_draft(roots, max_kv_nodes=self.max_kv_nodes, active=active)
        noise: dict[str, Any] = {}
        if self.law != "topk":
            seeds = sampling.seeds if self.law == "coupled" else sampling.draft_seeds(start)
            noise = {"params": sampling.params, "seeds": seeds, "positions": start.long()}
        vocab_size = sampling.vocab_size or logits.shape[-1]
        num_nodes, depth = self._limits
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
        self._grown = state.scores, num_nodes
        draft = rerank_tree(state, num_nodes, active=active)
        if draft.draft_probs is not None:  # the draft model gives 0 to tokens that it lacks
            missing = vocab_size - draft.draft_probs.shape[-1]
            draft = draft._replace(draft_probs=F.pad(draft.draft_probs, (0, missing)) if missing else draft.draft_probs)
        return draft

    def observe(self, result: StepResult, rows: Tensor | None = None) -> None:
        """Moves what the draft model read of the accepted paths to its place."""
        if rows is not None:
            self._compact(self._tables[rows.shape[0]].tensor, result.start, result.commit)
            return
        if result.num_read == len(result.sequences) or self._draft is None:
            return
        drafted = result.sequences[result.num_read :]
        start = result.start[result.num_read :]
        verdict = Verdict(*(tensor[result.num_read :] for tensor in result.verdict))
        committed = commit(verdict, self._draft.trees, start, node_map=self._draft.node_map)
        self._compact(self.cache.page_table([sequence.index for sequence in drafted]), start, committed)
        self.advance(drafted)
        self._draft = None

    def narrow(self, draft: Draft, rows: Tensor) -> None:
        self._draft = draft

    def confidence(self) -> Tensor | None:
        if self._grown is None or self.law != "topk":
            return None
        scores, num_nodes = self._grown
        best = scores.argsort(dim=1, descending=True, stable=True)[:, :num_nodes].sort(dim=1).values
        chosen = scores.gather(1, best)
        return chosen[chosen > -torch.inf]

    def use_tree(self, tree: DraftTree | None) -> None:
        if tree is None:
            self._limits = self.max_nodes, self.max_depth
            return
        self._limits = (min(max(tree.num_nodes, 2), self.max_nodes), min(max(tree.max_depth, 1), self.max_depth))

    def unread(self, sequences: list[GeneratedSequence]) -> int:
        return sum(len(sequence.tokens) - self._cached.get(sequence.index, 0) - 2 for sequence in sequences)

    def _compact(self, table: Tensor, start: Tensor, committed: Commit) -> None:
        assert committed.draft_accept_index is not None and committed.draft_num_accepted is not None
        compact_kv(self.cache.tensors(), table, start, committed.draft_accept_index, committed.draft_num_accepted)

    def advance(self, sequences: list[GeneratedSequence]) -> None:
        """Takes in that the rows of the accepted paths are in place: the pages behind them are given back."""
        for sequence in sequences:
            # The last accepted token may not have been read. Reading it again costs less than asking the device.
            self._cached[sequence.index] = len(sequence.tokens) - 2
            self.cache.trim(sequence.index, len(sequence.tokens) - 1)

    def forget(self, sequence: GeneratedSequence) -> None:
        self.cache.release(sequence.index)
        self._known.pop(sequence.index, None)
        self._cached.pop(sequence.index, None)

    def _read(self, sequences: list[GeneratedSequence]) -> Tensor:
        """Reads all tokens that the cache lacks; returns logits [B, V] at the last ones."""
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
        """Makes the sequence known, with pages shared by another outcome of its prompt; False while that is read."""
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
        """One causal pass over the next tokens of each; returns which are read to their end, and their logits."""
        tokens: list[int] = []
        positions: list[int] = []
        offsets, ends = [0], []
        complete, rows = [], []
        for sequence, count in chunks:
            begin = self._cached[sequence.index]
            self._reserve(sequence, begin + count)
            tokens += sequence.tokens[begin : begin + count]
            positions += range(begin, begin + count)
            offsets.append(len(tokens))
            ends.append(begin + count)
            self._cached[sequence.index] = begin + count
            if begin + count == len(sequence.tokens):
                complete.append(sequence)
                rows.append(len(tokens) - 1)
        table = self.cache.page_table([sequence.index for sequence, _ in chunks])
        seq_lens, cu_seqlens_q = (torch.tensor(x, dtype=torch.int32).to(self.device) for x in (ends, offsets))
        slots = slot_mapping(table, seq_lens, cu_seqlens_q, self.cache.page_size, total_q=len(tokens))
        longest = max(count for _, count in chunks)
        step = PagedStep(self.cache, table, seq_lens, cu_seqlens_q, slots, None, None, longest)
        ids = torch.tensor(tokens).clamp(max=self.vocab_size - 1).to(self.device)
        logits, _ = self.packed.run(
            ids,
            torch.tensor(positions).to(self.device),
            step,
            torch.tensor(rows, dtype=torch.int64).to(self.device),
        )
        return complete, logits

    def _read_last_two(self, tokens: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """Reads the root of each row and the token before it, which may be in the cache or not; returns logits [B, V]
        at the roots. Runs on the device alone.
        """
        num_rows = lengths.shape[0]
        positions = (lengths - 1).long()[:, None] + torch.arange(-1, 1, device=lengths.device)
        ids = tokens.gather(1, positions.clamp(min=0)).flatten().clamp(max=self.vocab_size - 1)
        offsets = torch.arange(num_rows + 1, dtype=torch.int32, device=lengths.device) * 2
        slots = slot_mapping(table, lengths, offsets, self.cache.page_size, total_q=2 * num_rows)
        step = PagedStep(self.cache, table, lengths, offsets, slots, None, None, max_seqlen_q=2)
        logits, _ = self.packed.run(ids, positions.clamp(min=0).flatten(), step)
        return logits[1::2]

    def _read_level(self, state: DraftState, table: Tensor, start: Tensor) -> Tensor:
        """One pass over the frontiers; returns logits [B * F, V]."""
        positions = state.level_positions(start)
        seq_lens = start + state.level_tree_lens
        slots = slot_mapping(table, seq_lens, state.cu_seqlens_q, self.cache.page_size, total_q=positions.shape[0])
        step = PagedStep(
            self.cache, table, seq_lens, state.cu_seqlens_q, torch.where(state.level_present, slots, -1),
            state.level_mask, state.level_tree_lens, state.num_frontier,
        )  # fmt: skip
        return self.packed.run(state.level_tokens, positions, step)[0]

    def _reserve_trees(self, sequences: list[GeneratedSequence]) -> list[list[int]]:
        """The page table of these sequences, with room for a tree."""
        for sequence in sequences:
            self._reserve(sequence, sequence.root + self.max_kv_nodes)
        return [self.cache.pages(sequence.index) for sequence in sequences]

    def _reserve(self, sequence: GeneratedSequence, num_tokens: int) -> None:
        if not self.cache.reserve(sequence.index, num_tokens):
            self.cache.grow(max(self.cache.num_pages, self.cache.pages_for(num_tokens)))
            self.cache.reserve(sequence.index, num_tokens)
