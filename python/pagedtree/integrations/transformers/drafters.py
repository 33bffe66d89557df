"""Drafters: who guesses the next tokens. The law of the output never depends on them, only speed does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from pagedtree import Commit, Draft, DraftTree, TreeBatch, Verdict, medusa_propose, ngram_propose, rejected_predictions
from pagedtree.integrations.transformers.rules import Sampling
from pagedtree.integrations.transformers.scheduler import Sequence
from pagedtree.integrations.transformers.tree_tuner import TreeTuner

__all__ = ["Drafter", "MedusaDrafter", "NgramDrafter", "NoDrafter", "Proposal", "StepResult"]

Proposal = Draft | tuple[Tensor, TreeBatch, Tensor | None]


@dataclass
class StepResult:
    """One verified pass, as `Drafter.observe` and the `on_step` callback of `generate` see it.

    Attributes:
        sequences: B sequences, their new tokens already appended. The first `num_read` of them read known tokens
            (prompt, restoration) in this pass and have a tree of the root alone; the others have what was proposed.
        start: int32 [B], the roots' positions.
        draft: of all B sequences; draft_tokens int64 [N] with the roots' tokens too, draft_probs and draft_rows where
            the drafter's draft_law is "iid" or "swor".
        verdict, commit: of all B sequences.
        logits: [N, V], the target's at every node.
        hidden: [N, H], what the output layer turned into these logits, if the drafter asked for it (`needs_hidden`).

    Under `cuda_graph` there may be more rows than sequences, and the next step writes the tensors anew.
    """

    sequences: list[Sequence]
    num_read: int
    start: Tensor
    draft: Draft
    verdict: Verdict
    commit: Commit
    logits: Tensor
    hidden: Tensor | None

    @property
    def draft_tokens(self) -> Tensor:
        return self.draft.draft_tokens

    @property
    def trees(self) -> TreeBatch:
        return self.draft.trees


class Drafter:
    """Base of drafters. Only `propose` is needed, and any object with it will do; the rest lets a drafter keep state.

    Attributes:
        max_nodes: the most nodes of a tree, the root included: so many slots are reserved before a drafter is asked.
            0 = not known before the proposals, which a drafter with state must not leave it at.
        max_depth: the most levels below the root, which `use_tree` is not asked to pass; 0 = max_nodes - 1.
        needs_hidden: whether `observe` wants the target's hidden states.
        draft_law: how the children of a node are chosen, see `pagedtree.verify_rejection`: "onehot" (without chance of
            their own), or "iid" or "swor", whose proposals have draft_probs. "coupled": by the noise with which rule
            "sampled" samples the target.
        is_chain: whether no node of any tree has two children.
    """

    max_nodes: int = 1
    max_depth: int = 0
    needs_hidden: bool = False
    draft_law: str = "onehot"
    is_chain: bool = False
    tuner: tuple[weakref.ref[Any], TreeTuner] | None = None  # of `generate(tree="auto")`, and for which model

    def prepare(self, sequences: list[Sequence]) -> None:
        """What a call of `generate` is to run, before `begin`; raises ValueError for what this drafter cannot serve."""

    def begin(self, page_size: int, sampling: Sampling) -> None:
        """A call of `generate` starts: nothing is known about any sequence. sampling: how it chooses tokens."""

    def end(self) -> None:
        """The call of `generate` is over, or has failed."""

    def select(self, sequences: list[Sequence]) -> None:
        """The sequences that the rows of the next `propose` stand for."""

    def start(self, tokens: Tensor, lengths: Tensor) -> None:
        """What `propose` will be called with, while the target still has something to do."""

    def propose(self, tokens: Tensor, lengths: Tensor) -> Proposal:
        """Guesses a continuation for each of B sequences.

        tokens: int64 [B, capacity], prompt and generated tokens. lengths: int32 [B], how many of them are known.
        Returns draft_tokens [N], a TreeBatch of B trees, each with at least its root, whose token is
        tokens[b, lengths[b] - 1] (the root's draft token is ignored), and the laws they were drawn from, [N, V], or
        None. A `pagedtree.Draft` is a proposal, too; its draft_rows then name the row of draft_probs for each node.
        """
        raise NotImplementedError

    def rehearse(self, tokens: Tensor, lengths: Tensor) -> Proposal | None:
        """As `propose`, in the middle of texts that are known further, so that `generate(tree="auto")` can compare the
        guesses with how they went on. None: that would cost too much, or leave traces.
        """
        return None

    def observe(self, result: StepResult) -> None:
        """What became of the proposals, and what else the pass told."""

    def use_tree(self, tree: DraftTree) -> None:
        """Proposals shall not go beyond this tree from now on, where that makes them cheaper; max_nodes stays."""

    def unread(self, sequences: list[Sequence]) -> int:
        """Known tokens that a model of this drafter has to read before the next proposal, besides the newest ones."""
        return 0

    def forget(self, sequence: Sequence) -> None:
        """The sequence is finished, or evicted: it may come back and be read again from its start."""


class _Stateless(Drafter):
    """Any object with `propose`."""

    def __init__(self, drafter: Any) -> None:
        self.max_nodes = int(getattr(drafter, "max_nodes", 0))
        self.draft_law = getattr(drafter, "draft_law", "onehot")
        self.is_chain = bool(getattr(drafter, "is_chain", False))
        self.propose = drafter.propose  # type: ignore[method-assign]


def as_drafter(drafter: Any) -> Drafter:
    if drafter is None:
        return NoDrafter()
    if isinstance(drafter, Drafter) or callable(getattr(drafter, "observe", None)):
        return cast(Drafter, drafter)
    if not callable(getattr(drafter, "propose", None)):
        raise TypeError(f"drafter: expected an object with propose(tokens, lengths), got {type(drafter).__name__}")
    return _Stateless(drafter)


def roots_only(tokens: Tensor, lengths: Tensor) -> Proposal:
    """Trees of the root alone: plain decoding."""
    batch = tokens.shape[0]
    return tokens.new_full((batch,), -1), _roots(batch, tokens.device), None


@lru_cache(maxsize=256)  # to make them took 5 % of a step of a small model
def _roots(batch: int, device: torch.device) -> TreeBatch:
    return TreeBatch.from_trees([DraftTree.chain(0)] * batch, device=device)


class NoDrafter(Drafter):
    """No drafts: one token a step."""

    is_chain = True

    def propose(self, tokens: Tensor, lengths: Tensor) -> Proposal:
        return roots_only(tokens, lengths)


class NgramDrafter(Drafter):
    """Prompt lookup: what followed the last n-gram earlier in the same text (`pagedtree.ngram_propose`).

    Args:
        num_nodes: nodes of a tree, the root included.
        max_depth: tokens of the longest guess, by default all of the nodes for a chain, else half of them.
        max_branches: continuations merged into a tree; 1 gives a chain.
        min_ngram, max_ngram: lengths of the n-grams that are looked for; what follows a longer one comes first.
        remember: also look in what the target predicted at rejected nodes of that many earlier steps.
    """

    def __init__(
        self,
        num_nodes: int = 16,
        *,
        max_depth: int | None = None,
        max_branches: int = 4,
        min_ngram: int = 1,
        max_ngram: int = 4,
        remember: int = 0,
    ) -> None:
        if num_nodes < 2:
            raise ValueError(f"num_nodes: expected at least 2 (the root and a draft token), got {num_nodes}")
        self.max_nodes = num_nodes
        self.max_depth = max_depth or (num_nodes - 1 if max_branches == 1 else num_nodes // 2)
        self.max_branches, self.is_chain = max_branches, max_branches == 1
        self._limits = (num_nodes, self.max_depth, max_branches)
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self.remember = remember
        self._rejected: dict[int, Tensor] = {}
        self._selected: list[Sequence] = []

    def begin(self, page_size: int, sampling: Sampling) -> None:
        self._rejected.clear()
        self._limits = (self.max_nodes, self.max_depth, self.max_branches)

    def select(self, sequences: list[Sequence]) -> None:
        self._selected = sequences

    def use_tree(self, tree: DraftTree) -> None:
        leaves = int((tree.first_child < 0).sum())
        limits = (max(tree.num_nodes, 2), max(tree.max_depth, 1), leaves)
        whole = (self.max_nodes, self.max_depth, self.max_branches)
        self._limits = tuple(map(min, limits, whole))  # type: ignore[assignment]

    def propose(self, tokens: Tensor, lengths: Tensor) -> Proposal:
        return self._look_up(tokens, lengths, self._limits, self._extra(tokens) if self._rejected else None)

    def rehearse(self, tokens: Tensor, lengths: Tensor) -> Proposal:
        return self._look_up(tokens, lengths, (self.max_nodes, self.max_depth, self.max_branches), None)

    def _look_up(self, tokens: Tensor, lengths: Tensor, limits: tuple[int, int, int], extra: Tensor | None) -> Proposal:
        max_nodes, max_depth, max_branches = limits
        draft = ngram_propose(
            tokens,
            lengths,
            max_nodes=max_nodes,
            max_depth=max_depth,
            min_ngram=self.min_ngram,
            max_ngram=self.max_ngram,
            max_branches=max_branches,
            extra=extra,
        )
        return draft.draft_tokens, draft.trees, None

    def observe(self, result: StepResult) -> None:
        if not self.remember or result.trees.max_nodes == 1:
            return
        new = rejected_predictions(
            result.trees, result.draft_tokens, result.logits.argmax(-1), result.verdict.accept_index,
            context=self.max_ngram,
        )  # fmt: skip
        for sequence, text in zip(result.sequences, new, strict=True):
            known = self._rejected.get(sequence.index, text[:0])
            self._rejected[sequence.index] = torch.cat([known, text])[-self.remember * text.shape[0] :]

    def forget(self, sequence: Sequence) -> None:
        self._rejected.pop(sequence.index, None)

    def _extra(self, tokens: Tensor) -> Tensor:
        """The rejected predictions of the selected sequences, -1 in front of what they have."""
        texts = [self._rejected.get(sequence.index, tokens[0, :0]) for sequence in self._selected]
        width = max(text.shape[0] for text in texts)
        return torch.stack([F.pad(text, (width - text.shape[0], 0), value=-1) for text in texts])


class MedusaDrafter(Drafter):
    """Medusa: heads on the target's last hidden state guess the tokens after the next one, at one fixed tree.

    Args:
        heads: hidden states [B, H] -> logits [B, num_heads, V] (`medusa.MedusaHeads`); head i guesses the token i + 2
            after the state's position.
        tree: its nodes take the token of their child rank in the head of their depth; `medusa.medusa_tree` is a fair
            one.
    """

    needs_hidden = True

    def __init__(self, heads: Callable[[Tensor], Tensor], tree: DraftTree) -> None:
        self.heads, self.tree, self._tree = heads, tree, tree
        self.max_nodes, self.max_depth = tree.num_nodes, tree.max_depth
        self.is_chain = tree.num_nodes == tree.max_depth + 1
        self._hidden: dict[int, Tensor] = {}
        self._selected: list[Sequence] = []

    def begin(self, page_size: int, sampling: Sampling) -> None:
        self._hidden.clear()
        self._tree = self.tree

    def select(self, sequences: list[Sequence]) -> None:
        self._selected = sequences

    def use_tree(self, tree: DraftTree) -> None:
        self._tree = tree

    def propose(self, tokens: Tensor, lengths: Tensor) -> Proposal:
        states = [self._hidden.get(sequence.index) for sequence in self._selected]
        known = next((state for state in states if state is not None), None)
        if known is None:
            return roots_only(tokens, lengths)
        # A sequence that no pass has read yet drafts from an arbitrary state, which costs nothing.
        logits = self.heads(torch.stack([state if state is not None else known for state in states]))
        draft = medusa_propose(logits, self._tree)
        return draft.draft_tokens, draft.trees, None

    def observe(self, result: StepResult) -> None:
        assert result.hidden is not None
        last_rows = result.commit.accept_rows.gather(1, result.commit.num_accepted[:, None].long())[:, 0]
        last = result.hidden[last_rows]
        for sequence, state in zip(result.sequences, last, strict=True):
            self._hidden[sequence.index] = state

    def forget(self, sequence: Sequence) -> None:
        self._hidden.pop(sequence.index, None)
