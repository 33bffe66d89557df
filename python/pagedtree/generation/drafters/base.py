"""Drafters guess the next tokens, which changes speed but never the distribution of the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pagedtree import Commit, Draft, DraftTree, TreeBatch, Verdict, best_first_tree
from pagedtree._arguments import refusal
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.generation.tree_tuner import TunerOf

# Members of `Drafter` that an object without `observe` may have.
STATELESS = ["propose", "max_nodes", "draft_law", "is_chain", "model", "networks"]

Proposal = Draft | tuple[Tensor, TreeBatch, Tensor | None]


@dataclass
class StepResult:
    """One verified pass, as `Drafter.observe` and the `on_step` callback of `generate` receive it.

    Attributes:
        sequences: B, with their new tokens. The first `num_read` finished prefill in this pass: root-only trees.
        start: int32 [B], the roots' positions.
        draft: draft_tokens int64 [N] includes the roots' tokens; draft_probs and draft_rows: under draft_law "iid" or
            "swor".
        logits: [N, V], the target's. hidden: [N, H], the output layer's input, if the drafter has `needs_hidden`.
        features: [N, len(feature_layers) * H]; only in captured steps, which have no `read`.

    Under `cuda_graph` there may be more rows than sequences; the next step overwrites the tensors.
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
    """The tokens of one pass and the target's features at them, as `Drafter.read` receives them.

    Attributes:
        sequences: len(counts) sequences in prefill, then the decoding ones, without the tokens of this pass.
        start: position of each sequence's first prefill token, or root.
        counts: prefill tokens per sequence in prefill. Their rows precede the trees' rows, in node order.
        features: [T, len(feature_layers) * H], the layers concatenated.
    """

    sequences: list[GeneratedSequence]
    start: list[int]
    counts: list[int]
    features: Tensor

    def known(self) -> list[tuple[GeneratedSequence, int, Tensor]]:
        """Returns (sequence, position of its first token, features [count, F]) for each sequence in prefill."""
        parts = self.features[: sum(self.counts)].split(self.counts)
        return list(zip(self.sequences, self.start, parts, strict=False))

    def accepted(self, result: StepResult) -> list[tuple[GeneratedSequence, int, Tensor]]:
        """Returns (sequence, position of its root, features of root and accepted tokens) for each sequence that
        decoded. result: `observe`'s, of the same pass."""
        decoded, roots = self.sequences[len(self.counts) :], self.start[len(self.counts) :]
        if decoded and result.trees.max_nodes == 1:  # root-only trees: the rows are in order
            return list(zip(decoded, roots, self.features[sum(self.counts) :].split(1), strict=True))
        counts = [len(sequence.tokens) - 1 - root for sequence, root in zip(decoded, roots, strict=True)]
        # `result` has one row for each sequence that finished prefill.
        shift = sum(self.counts) - result.num_read
        path = result.commit.accept_rows[result.num_read :]
        indices = [i * path.shape[1] + j for i, count in enumerate(counts) for j in range(count)]
        rows = path.flatten()[torch.tensor(indices, dtype=torch.int64).to(path.device)] + shift
        return list(zip(decoded, roots, self.features.index_select(0, rows).split(counts), strict=True))


class Drafter:
    """Base class of drafters. Any object with `propose` works; the rest supports drafters with state.

    Attributes:
        max_nodes: most nodes of a tree, root included. 0 = unknown before `propose`, for drafters without state.
        num_positions: positions of the drafter's model, None = unlimited. The drafter does not get sequences whose
            newest token is past them, and no node is verified whose parent is.
        max_depth: most levels below the root. 0 = max_nodes - 1.
        needs_hidden: whether `observe` needs the target's hidden states.
        num_weights: parameters used per token read, for the cost relative to the target.
        model: the draft model, if any. Calls of `generate` that share it take turns.
        networks: torch modules and other callables that compute drafts.
        feature_layers: decoder layers of the target, from 0, whose outputs `read` needs at all tokens, prompts
            included. The output of layer i is the residual stream after it: transformers' hidden_states[i + 1] (of the
            last layer before the final norm), entry i of SGLang's eagle_aux_hidden_state_layer_ids, i + 1 of vLLM's.
        draft_law: how the children of a node are chosen, see `pagedtree.verify_rejection`: "onehot" (deterministic), or
            "iid" or "swor", whose proposals have draft_probs. "coupled": drawn with the noise of rule "sampled".
        grows_by_level: whether each level takes a model pass.
        has_free_guesses: whether it can draft without a model pass, on `limit_depth(0)`.
        is_chain: whether no node of any tree has two children.
        is_capturable: whether steps of `generate(cuda_graph=True)` can hold its work; not inherited.
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
    tuner: TunerOf | None = None  # state of `generate(tree="auto")`
    _selected: Sequence[GeneratedSequence] = ()
    _depth: int = 0

    @property
    def given(self) -> Any:
        """`self`, or the object that `as_drafter` adapted."""
        return self

    def check_target(self, model: PackedModel) -> None:
        """Raises ValueError, before `begin`, for a target of other sizes or on another device."""

    def begin(self, page_size: int, sampling: Sampling) -> None:
        """Begins a call of `generate` without any sequence's state. sampling: how the call chooses tokens."""

    def end(self) -> None:
        """Ends the call of `generate`, also after a failure."""

    def select(self, sequences: list[GeneratedSequence]) -> None:
        """Sets the sequences of the next `propose`'s rows."""
        self._selected = sequences

    def start(self, tokens: Tensor, lengths: Tensor) -> None:
        """Receives the next `propose`'s arguments while the target still runs."""

    def propose(self, tokens: Tensor, lengths: Tensor) -> Proposal:
        """Drafts continuations of B sequences.

        tokens: int64 [B, capacity], prompt and generated tokens. lengths: int32 [B], the number of valid tokens.
        Returns a `pagedtree.Draft`, or draft_tokens [N], a TreeBatch of B trees, and the distributions they were drawn
        from, [N, V], or None. The root of a tree is tokens[b, lengths[b] - 1]; its draft token is ignored.
        """
        raise NotImplementedError

    def confidence(self) -> Tensor | None:
        """Returns fp32 [N], the drafter's joint log-probability of each node of the last proposal; None: unknown."""
        return None

    def read(self, rows: FeatureRows) -> None:
        """Receives the target's features of every pass, with `feature_layers` only; `observe` follows if any sequence
        gains tokens. One outcome of a prompt reads its first `shared_len` tokens, the others begin there. An evicted
        sequence is read again, from there or from 0."""

    def narrow(self, draft: Draft, rows: Tensor) -> None:
        """Receives the rows, int32, of the last proposal that the target verifies."""

    def observe(self, result: StepResult) -> None:
        """Receives the verified pass."""

    def limit_depth(self, levels: int | None) -> None:
        """Limits further proposals to this many levels, if that saves time; None: max_depth; 0, with
        `has_free_guesses`: no model pass."""
        self._depth = self.max_depth if levels is None else min(max(levels, 1), self.max_depth)

    def unread(self, sequences: list[GeneratedSequence]) -> int:
        """Returns the number of tokens, excluding the newest, that the drafter's model has to read first."""
        return 0

    def capture(self, model: PackedModel, sequences: list[GeneratedSequence], batch_size: int) -> None:
        """Allocates, at fixed addresses, the state of captured steps of at most `batch_size` of the call's sequences.
        model: the target."""

    def select_captured(self, sequences: list[GeneratedSequence], batch_size: int) -> None:
        """Prepares a captured step on the host. Its first rows are of these sequences, the others idle."""
        self._selected = sequences

    def propose_captured(self, tokens: Tensor, lengths: Tensor, active: Tensor, rows: Tensor) -> Proposal:
        """Like `propose`, which is the default, on the device alone. active: bool [B], False for an idle row, whose
        tree may be empty. rows: int64 [B], the sequences' index; their number for an idle row."""
        return self.propose(tokens, lengths)

    def observe_captured(self, result: StepResult, rows: Tensor) -> None:
        """Like `observe`, on the device alone; result.sequences is empty. rows: as in `propose_captured`."""

    def advance(self, sequences: list[GeneratedSequence]) -> None:
        """Updates the host's state after a captured step has committed tokens of these sequences."""

    def forget(self, sequence: GeneratedSequence) -> None:
        """Drops a finished or evicted sequence; an evicted one may return."""


class _Adapted(Drafter):
    """An object with `propose`, and the members of `Drafter` that it has; without `observe`, those without state."""

    given: Any = None

    def __init__(self, drafter: Any) -> None:
        names = [name for name in vars(Drafter) if not name.startswith("_") and name != "given"]
        if not callable(getattr(drafter, "observe", None)):
            names = STATELESS
        values = {name: getattr(drafter, name) for name in names if hasattr(drafter, name)}
        vars(self).update({"max_nodes": 0, **values, "given": drafter})


def as_drafter(drafter: Any) -> Drafter:
    """Returns the argument `drafter` of `generate` as a `Drafter`. Raises TypeError for an object without `propose`."""
    if drafter is None:
        return NoDrafter()
    if isinstance(drafter, Drafter):
        return drafter
    if not callable(getattr(drafter, "propose", None)):
        raise refusal("drafter", "an object with propose(tokens, lengths)", type(drafter).__name__, TypeError)
    return _Adapted(drafter)


def roots_only(batch_size: int, device: torch.device) -> Draft:
    """Returns root-only trees: plain decoding."""
    return Draft(torch.full((batch_size,), -1, dtype=torch.int64, device=device), _roots(batch_size, device))


@lru_cache(maxsize=256)  # without the cache this took 5 % of a small model's step
def _roots(batch_size: int, device: torch.device) -> TreeBatch:
    return TreeBatch.from_trees([DraftTree.chain(0)] * batch_size, device=device)


def best_trees(logits: Tensor, num_nodes: int, width: int | None = None) -> tuple[Draft, Tensor]:
    """Returns the trees of the highest joint log-probability under logits [B, num_levels, V] of levels 1, 2, ..., and
    their nodes' joint log-probabilities. num_nodes: fewer if no more are possible. width: most children of a node."""
    logits = logits.float()
    levels, most = logits.shape[1], width or num_nodes - 1
    num_nodes = min(num_nodes, sum(most**level for level in range(levels + 1)))
    # A level never needs more candidates than the tree has nodes.
    best = logits.topk(min(width or num_nodes - 1, num_nodes - 1, logits.shape[-1]), dim=-1)
    log_probs = best.values - logits.logsumexp(-1, keepdim=True)
    roots = best.indices.new_zeros(logits.shape[0])
    draft_tokens, trees, joint = best_first_tree(log_probs, best.indices, roots, num_nodes, return_log_probs=True)
    return Draft(draft_tokens, trees), joint


class NoDrafter(Drafter):
    """A drafter without drafts: one token per step."""

    is_chain = True
    is_capturable = True

    def propose(self, tokens: Tensor, lengths: Tensor) -> Draft:
        return roots_only(tokens.shape[0], tokens.device)
