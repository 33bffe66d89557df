"""Drafters: who guesses the next tokens. The distribution of the output never depends on them, only speed does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pagedtree import Commit, Draft, DraftTree, TreeBatch, Verdict, best_first_tree
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.generation.tree_tuner import TunerOf

__all__ = [
    "Drafter",
    "FeatureRows",
    "NoDrafter",
    "Proposal",
    "StepResult",
    "as_drafter",
    "best_trees",
    "roots_only",
]

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
        features: [N, len(feature_layers) * H] at the nodes, in captured steps alone, which have no `read`.

    Under `cuda_graph` there may be more rows than sequences, and the next step writes the tensors anew.
    """

    sequences: list[GeneratedSequence]
    num_read: int
    start: Tensor
    draft: Draft
    verdict: Verdict
    commit: Commit
    logits: Tensor
    hidden: Tensor | None
    features: Tensor | None = None

    @property
    def draft_tokens(self) -> Tensor:
        return self.draft.draft_tokens

    @property
    def trees(self) -> TreeBatch:
        return self.draft.trees


@dataclass
class FeatureRows:
    """The tokens that one pass read, and the target's features of them, as `Drafter.read` sees them.

    Attributes:
        sequences: those that read known tokens, len(counts) of them, then those that decode a tree. None has got tokens
            of this pass yet.
        start: the position of each one's first row: of the first token that it reads, or of its tree's root.
        counts: how many tokens the first ones read, from `start` on. They have their rows one after the other; behind
            them come the rows of the trees, each tree's in the order of its nodes.
        features: [T, len(feature_layers) * H], the layers side by side.
    """

    sequences: list[GeneratedSequence]
    start: list[int]
    counts: list[int]
    features: Tensor

    def known(self) -> list[tuple[GeneratedSequence, int, Tensor]]:
        """Returns for each sequence that read known tokens: it, the first one's position, and their features, [count,
        F]."""
        parts = self.features[: sum(self.counts)].split(self.counts)
        return list(zip(self.sequences, self.start, parts, strict=False))

    def accepted(self, result: StepResult) -> list[tuple[GeneratedSequence, int, Tensor]]:
        """Returns for each sequence that decoded: it, its root's position, and the features of the root and of the
        tokens that it got, but for the newest, which no pass has read yet.

        result: what `observe` is told of the same pass.
        """
        decoded, roots = self.sequences[len(self.counts) :], self.start[len(self.counts) :]
        if decoded and result.trees.max_nodes == 1:  # the roots alone, as they lie
            return list(zip(decoded, roots, self.features[sum(self.counts) :].split(1), strict=True))
        counts = [len(sequence.tokens) - 1 - root for sequence, root in zip(decoded, roots, strict=True)]
        # `result` has one row for each sequence that it tells of which read known tokens.
        shift = sum(self.counts) - result.num_read
        path = result.commit.accept_rows[result.num_read :]
        wanted = [i * path.shape[1] + j for i, count in enumerate(counts) for j in range(count)]
        rows = path.flatten()[torch.tensor(wanted, dtype=torch.int64).to(path.device)] + shift
        return list(zip(decoded, roots, self.features.index_select(0, rows).split(counts), strict=True))


class Drafter:
    """Base of drafters. Only `propose` is needed, and any object with it will do; the rest lets a drafter keep state.

    Attributes:
        max_nodes: the most nodes of a tree, the root included: so many slots are reserved before a drafter is asked.
            0 = not known before the proposals; a drafter with state must set it.
        num_positions: how many positions the drafter's model has, None = any number. The drafter is not asked for a
            sequence whose newest token has none, and no node is verified whose parent has none.
        max_depth: the most levels below the root. 0 = max_nodes - 1.
        needs_hidden: whether `observe` wants the target's hidden states.
        num_weights: parameters used per token that is read; it tells the cost of reading relative to the target.
        model: that drafts, if there is one. Calls of `generate` that share it take turns.
        networks: what it computes drafts with, torch modules and whatever else can be called.
        feature_layers: decoder layers of the target, from 0, whose outputs `read` wants at all tokens of every pass,
            prompts included. The output of layer i is the residual stream behind it, transformers' hidden_states[i + 1]
            (of the last layer: before the final norm, which hidden_states[-1] has behind it), and what SGLang's
            eagle_config calls i in eagle_aux_hidden_state_layer_ids. vLLM's entry of this name counts the inputs of
            layers, and calls it i + 1. Without an entry both take the outputs of the layers 1, n // 2 - 1 and n - 4 of
            n.
        draft_law: how the children of a node are chosen, see `pagedtree.verify_rejection`: "onehot" (chosen without
            chance), or "iid" or "swor", whose proposals have draft_probs. "coupled": by the noise with which rule
            "sampled" samples the target.
        grows_by_level: whether each level takes a pass of a model, so that trees of fewer levels take less time.
        has_free_guesses: whether it can draft without running a model, which `limit_depth(0)` asks for.
        is_chain: whether no node of any tree has two children.
        is_capturable: whether a captured step (`generate(cuda_graph=True)`) can have its work in it. Each class says so
            for itself; it is not inherited, because what a subclass adds may need the host.
    """

    max_nodes: int = 1
    max_depth: int = 0
    num_positions: int | None = None
    needs_hidden: bool = False
    feature_layers: tuple[int, ...] = ()
    draft_law: str = "onehot"
    is_chain: bool = False
    grows_by_level: bool = False
    has_free_guesses: bool = False
    is_capturable: bool = False
    num_weights: int = 0
    model: Any = None
    networks: tuple[Any, ...] = ()
    tuner: TunerOf | None = None  # what `generate(tree="auto")` learnt
    _selected: Sequence[GeneratedSequence] = ()
    _depth: int = 0

    @property
    def given(self) -> Any:
        """The object that keeps the state: another one where `as_drafter` adapted it."""
        return self

    def check_target(self, model: PackedModel) -> None:
        """Is called before `begin` with the target; raises ValueError for one that this drafter is not made for: of
        other sizes, or on another device.
        """

    def prepare(self, sequences: list[GeneratedSequence]) -> None:
        """Is called before `begin` with the sequences of a call; raises ValueError for what this drafter cannot
        serve."""

    def begin(self, page_size: int, sampling: Sampling) -> None:
        """Begins a call of `generate`: nothing is known about any sequence. sampling: how it chooses tokens."""

    def end(self) -> None:
        """Ends the call of `generate`, which is over, or has failed."""

    def select(self, sequences: list[GeneratedSequence], batch_size: int | None = None) -> None:
        """Names the sequences that the rows of the next `propose` stand for.

        batch_size: in front of a captured step, its rows; those past the sequences are idle.
        """
        self._selected = sequences

    def start(self, tokens: Tensor, lengths: Tensor) -> None:
        """Is called with what `propose` will get, while the target is still at work."""

    def propose(
        self, tokens: Tensor, lengths: Tensor, active: Tensor | None = None, rows: Tensor | None = None
    ) -> Proposal:
        """Guesses a continuation for each of B sequences.

        tokens: int64 [B, capacity], prompt and generated tokens. lengths: int32 [B], how many of them are known.
        Returns draft_tokens [N], a TreeBatch of B trees, each with at least its root, whose token is
        tokens[b, lengths[b] - 1] (the root's draft token is ignored), and the distributions they were drawn from, [N,
        V], or None. A `pagedtree.Draft` is a proposal, too; its draft_rows then name the row of draft_probs for each
        node.

        active, rows: given in a captured step alone, where everything stays on the device. active: bool [B], False for
        an idle row, whose tree may have no nodes. rows: int64 [B], the sequences' index, and the number of all
        sequences for an idle row.
        """
        raise NotImplementedError

    def confidence(self) -> Tensor | None:
        """Returns fp32 [N]: the joint log-probability of each node of the last proposal by the drafter, for
        `generate(tree="auto")`, which corrects it by what is accepted. None: not known.
        """
        return None

    def read(self, rows: FeatureRows) -> None:
        """Gives the target's features of what a pass read, with `feature_layers` only, after every pass.

        `observe` of the same pass follows if any of its sequences gains tokens. Outcomes of one prompt read its first
        `shared_len` tokens once: another one then begins with position `shared_len`. An evicted sequence is read again,
        from there or from 0.
        """

    def narrow(self, draft: Draft, rows: Tensor) -> None:
        """Tells that the target verifies this part of the last proposal alone: its rows `rows`, int32."""

    def observe(self, result: StepResult, rows: Tensor | None = None) -> None:
        """Tells what became of the proposals, and what else the pass gave.

        rows: as in `propose`; result.sequences is then empty, and `advance` follows on the host.
        """

    def limit_depth(self, levels: int | None) -> None:
        """Asks for proposals of at most so many levels from now on, where fewer take less time; None: of max_depth. 0,
        only with `has_free_guesses`: for what no model has to run for.
        """
        self._depth = self.max_depth if levels is None else min(max(levels, 1), self.max_depth)

    def unread(self, sequences: list[GeneratedSequence]) -> int:
        """Returns how many known tokens, besides the newest, the drafter's model has to read before it can draft."""
        return 0

    def capture(self, model: PackedModel, sequences: list[GeneratedSequence], batch_size: int) -> None:
        """Makes what captured steps of at most `batch_size` of these sequences need, all that a call of `generate` has.
        From then on it keeps its place. model: the target.
        """

    def advance(self, sequences: list[GeneratedSequence]) -> None:
        """Tells that the sequences have got the tokens of a captured step."""

    def forget(self, sequence: GeneratedSequence) -> None:
        """Tells that the sequence is finished, or evicted: then it may come back and be read again from its start."""


class _Stateless(Drafter):
    """An object that has `propose`, and some of these members."""

    members: tuple[str, ...] = ("propose", "max_nodes", "draft_law", "is_chain", "model", "networks")

    def __init__(self, drafter: Any) -> None:
        found = {name: getattr(drafter, name) for name in self.members if hasattr(drafter, name)}
        vars(self).update({"max_nodes": 0, **found})


class _Stateful(_Stateless):
    """An object that has `observe`, too, and so may have all members of `Drafter`."""

    members = tuple(name for name in vars(Drafter) if not name.startswith("_") and name != "given")
    given: Any = None

    def __init__(self, drafter: Any) -> None:
        super().__init__(drafter)
        self.given = drafter


def as_drafter(drafter: Any) -> Drafter:
    """Returns a `Drafter` for what `generate` was given."""
    if drafter is None:
        return NoDrafter()
    if isinstance(drafter, Drafter):
        return drafter
    if not callable(getattr(drafter, "propose", None)):
        raise TypeError(f"drafter: expected an object with propose(tokens, lengths), got {type(drafter).__name__}")
    return _Stateful(drafter) if callable(getattr(drafter, "observe", None)) else _Stateless(drafter)


def roots_only(batch_size: int, device: torch.device) -> Draft:
    """Trees of the root alone: plain decoding."""
    return Draft(torch.full((batch_size,), -1, dtype=torch.int64, device=device), _roots(batch_size, device))


@lru_cache(maxsize=256)  # making them anew took 5 % of a small model's step
def _roots(batch_size: int, device: torch.device) -> TreeBatch:
    return TreeBatch.from_trees([DraftTree.chain(0)] * batch_size, device=device)


def best_trees(logits: Tensor, num_nodes: int, width: int | None = None) -> tuple[Draft, Tensor]:
    """Makes the trees of the highest joint log-probability by logits [B, num_levels, V], for levels 1, 2, ...

    num_nodes: fewer where no more are possible. width: children of a node at most. Returns the trees, and the joint
    log-probabilities of their nodes.
    """
    logits = logits.float()
    levels, most = logits.shape[1], width or num_nodes - 1
    num_nodes = min(num_nodes, sum(most**level for level in range(levels + 1)))
    # No level has use for more candidates than the tree has nodes.
    best = logits.topk(min(width or num_nodes - 1, num_nodes - 1, logits.shape[-1]), dim=-1)
    log_probs = best.values - logits.logsumexp(-1, keepdim=True)
    roots = best.indices.new_zeros(logits.shape[0])
    draft_tokens, trees, joint = best_first_tree(log_probs, best.indices, roots, num_nodes, return_log_probs=True)
    return Draft(draft_tokens, trees), joint


class NoDrafter(Drafter):
    """No drafts: one token per step."""

    is_chain = True
    is_capturable = True

    def propose(
        self, tokens: Tensor, lengths: Tensor, active: Tensor | None = None, rows: Tensor | None = None
    ) -> Draft:
        return roots_only(tokens.shape[0], tokens.device)
