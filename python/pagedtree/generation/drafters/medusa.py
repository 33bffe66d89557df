"""Medusa-1 heads and their drafter (Cai et al., ICML 2024)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pagedtree import Commit, Draft, DraftTree, medusa_propose
from pagedtree._arguments import refusal
from pagedtree.generation.drafters.base import Drafter, StepResult, best_trees, roots_only
from pagedtree.generation.drafters.checkpoint import StoredTensors, save_checkpoint
from pagedtree.generation.drafters.checkpoint_config import HARMLESS, ConfigEntries
from pagedtree.generation.drafters.target import Target, call_shared, check_place
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence

WEIGHTS_NAME = "medusa.safetensors"
SHAPES = {"weight": "num_heads, hidden_size, hidden_size", "bias": "num_heads, hidden_size"}
OWN_OUTPUTS = {"outputs": "num_heads, vocab_size, hidden_size"}
# File names of Medusa's format, and a head's tensor names in it.
PUBLISHED_NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
PUBLISHED = {
    "0.linear.weight": ("weight", "hidden_size, hidden_size"),
    "0.linear.bias": ("bias", "hidden_size"),
    "1.weight": ("outputs", "vocab_size, hidden_size"),
}
MAX_HEADS = 1024


class MedusaHeads(nn.Module):
    """Residual blocks that map a model's last hidden state to a later position's, read by the model's `lm_head`.

    `lm_head` predicts the token after the hidden state's position; head i (from 0) predicts token i + 2 after it.
    vocab_size: of heads with separate output layers; None: they share `lm_head`. Raises ValueError for a hidden_size
    that `lm_head` does not read.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, lm_head: Callable[[Tensor], Tensor], vocab_size: int | None = None
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("num_heads", num_heads)):
            if size < 1:
                raise refusal(name, "at least 1", size)
        if (width := getattr(lm_head, "in_features", hidden_size)) != hidden_size:
            raise refusal("hidden_size", f"{width}, what lm_head reads", hidden_size)
        # Zero blocks are the identity: training starts from the model's next-token prediction.
        dtype = torch.get_default_dtype()
        self.weight = nn.Parameter(torch.zeros(num_heads, hidden_size, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num_heads, hidden_size, dtype=dtype))
        self.outputs: nn.Parameter | None = None
        if vocab_size is not None:
            self.outputs = nn.Parameter(torch.zeros(num_heads, vocab_size, hidden_size, dtype=dtype))
        # In a tuple, so that the model's layer does not become a submodule and is not saved.
        self._lm_head = (lm_head,)

    @property
    def num_heads(self) -> int:
        return self.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[2]

    def check_target(self, hidden_size: int) -> None:
        """Raises ValueError unless the weights fit `hidden_size`, the input of the target's output layer."""
        shape = (self.num_heads, hidden_size, hidden_size)
        if self.weight.shape != shape or self.bias.shape != shape[:2]:
            wanted = f"heads of the target's hidden size {hidden_size}, weight {[*shape]} and bias {[*shape[:2]]}"
            raise refusal("drafter", wanted, f"{[*self.weight.shape]} and {[*self.bias.shape]}")

    @property
    def vocab_size(self) -> int | None:
        return getattr(self._lm_head[0], "out_features", None) if self.outputs is None else self.outputs.shape[1]

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden states [..., hidden], normalised as `lm_head` expects, to logits [..., num_heads, vocab]."""
        update = torch.einsum("...d,hed->...he", hidden, self.weight) + self.bias
        states = hidden.unsqueeze(-2) + F.silu(update)
        if self.outputs is not None:
            return torch.einsum("...hd,hvd->...hv", states, self.outputs)
        return call_shared(self._lm_head[0], states)

    def save_pretrained(self, path: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        config = {"model_type": "medusa", "num_heads": self.num_heads, "hidden_size": self.hidden_size}
        if self.outputs is not None:
            config["vocab_size"] = self.outputs.shape[1]
        save_checkpoint(path, config, self.state_dict(), dtype, name=WEIGHTS_NAME)

    @classmethod
    def from_pretrained(cls, path: str | Path, model: Any) -> MedusaHeads:
        """Returns heads for `model` (its output layer, device and dtype) from the folder `path`, in the format of
        `save_pretrained` or of Medusa: config.json with medusa_num_heads, and medusa_lm_head.safetensors or
        medusa_lm_head.pt, all of whose heads are used. Raises as `EagleHead.from_pretrained` does."""
        target = Target.of(model)
        heads = cls.load(path, target.lm_head)
        if heads.outputs is not None and heads.outputs.shape[1] not in target.vocab_sizes:
            sizes = " or ".join(map(str, sorted(target.vocab_sizes)))
            raise refusal(path, f"heads of the target's {sizes} tokens", heads.outputs.shape[1])
        return heads.to(*target.place).eval()

    @classmethod
    def load(cls, path: str | Path, lm_head: Callable[[Tensor], Tensor]) -> MedusaHeads:
        """Like `from_pretrained`, with any `lm_head`."""
        path = Path(path)
        entries, width = ConfigEntries.load(path), getattr(lm_head, "in_features", None)
        weights = (_published if "medusa_num_heads" in entries else _own)(path, entries, width)
        (num_heads, hidden_size), outputs = weights["bias"].shape, weights.get("outputs")
        heads = cls(hidden_size, num_heads, lm_head, None if outputs is None else outputs.shape[1])
        heads.load_state_dict(weights, assign=True)
        return heads


def _own(path: Path, entries: ConfigEntries, width: int | None) -> dict[str, Tensor]:
    entries.word("model_type", ("medusa",), "medusa")
    sizes = {name: entries.integer(name) for name in ("num_heads", "hidden_size")}
    shapes = SHAPES
    if "vocab_size" in entries:
        sizes["vocab_size"], shapes = entries.integer("vocab_size"), {**SHAPES, **OWN_OUTPUTS}
    entries.refuse_others(HARMLESS)
    if width not in (None, sizes["hidden_size"]):
        entries.refuse("hidden_size", f"the target's {width}")
    stored = StoredTensors(path, (WEIGHTS_NAME,))
    stored.expect(shapes, sizes)
    return {name: stored.load(name) for name in shapes}


def _published(path: Path, entries: ConfigEntries, width: int | None) -> dict[str, Tensor]:
    stored = StoredTensors(path, PUBLISHED_NAMES, lambda name: name.removeprefix("medusa_head."))
    least = entries.integer("medusa_num_heads", most=MAX_HEADS)
    count = sum(name.endswith(".0.linear.bias") for name in stored.names)
    if count < least:
        entries.refuse("medusa_num_heads", f"at most the {count} heads of the file")
    entries.only(medusa_num_layers=1)
    entries.refuse_others({*HARMLESS, "base_model_name_or_path", "version"})
    hidden_size, vocab_size = stored.first_size("0.0.linear.bias"), stored.first_size("0.1.weight")
    if hidden_size is None or vocab_size is None:
        raise refusal(path, "tensors 0.0.linear.bias and 0.1.weight of Medusa's first head", "none")
    if width not in (None, hidden_size):
        raise refusal(f"{path}: 0.0.linear.bias", f"the target's hidden_size {width}", hidden_size)
    shapes = {f"{i}.{name}": shape for i in range(count) for name, (_, shape) in PUBLISHED.items()}
    stored.expect(shapes, {"hidden_size": hidden_size, "vocab_size": vocab_size})
    weights = {key: [stored.load(f"{i}.{name}") for i in range(count)] for name, (key, _) in PUBLISHED.items()}
    return {key: torch.stack(tensors) for key, tensors in weights.items()}


def medusa_tree(num_heads: int, num_nodes: int) -> DraftTree:
    """Returns the likeliest tree of `num_nodes` nodes if each of a head's guesses is half as likely as the previous."""
    paths: list[list[int]] = []
    queue: list[tuple[int, list[int]]] = [(1, [0])]
    while len(paths) < num_nodes - 1:
        cost, path = heapq.heappop(queue)
        paths.append(path)
        heapq.heappush(queue, (cost + 1, [*path[:-1], path[-1] + 1]))
        if len(path) < num_heads:
            heapq.heappush(queue, (cost + 1, [*path, 0]))
    return DraftTree.from_paths(paths)


class MedusaDrafter(Drafter):
    """Medusa heads on the target's last hidden state.

    Args:
        heads: hidden states [B, H] -> logits [B, num_heads, V] (`MedusaHeads`).
        tree: nodes, root included, of each step's best tree (`pagedtree.best_first_tree`). Or one fixed tree for
            `pagedtree.medusa_propose`, such as a `medusa_tree`.
    """

    needs_hidden = True
    is_capturable = True

    def __init__(self, heads: Callable[[Tensor], Tensor], tree: DraftTree | int) -> None:
        self.heads, self.tree, self.networks = heads, tree, (heads,)
        if isinstance(tree, DraftTree):
            self.max_nodes, self.max_depth = tree.num_nodes, tree.max_depth
            self.is_chain = tree.num_nodes == tree.max_depth + 1
            if tree.max_depth > (num_heads := getattr(heads, "num_heads", tree.max_depth)):
                raise refusal("tree", f"at most {num_heads} levels, one for each head", tree.max_depth)
        else:
            if tree < 2:
                raise refusal("tree", "at least 2 nodes (the root and a draft token)", tree)
            self.max_nodes, self.max_depth = tree, min(getattr(heads, "num_heads", tree - 1), tree - 1)
            self.is_chain = tree == 2
        self._depth = self.max_depth
        self._log_probs: Tensor | None = None  # joint ones, of the last proposal's nodes
        self._hidden: Tensor | None = None  # one row for each sequence's index; idle rows use the last one
        self._known: set[int] = set()  # the sequences that have a state
        # States of the newest pass until the next proposal: sequences, all rows, and the accepted paths.
        self._newest: tuple[list[int], Tensor, Commit] | None = None
        self._vocab_size: int | None = None  # the target's

    def check_target(self, model: PackedModel) -> None:
        if isinstance(self.heads, nn.Module):
            check_place(self.heads.parameters(), model)
        if isinstance(self.heads, MedusaHeads):
            self.heads.check_target(model.new_hidden(0).shape[1])

    def begin(self, page_size: int, sampling: Sampling) -> None:
        self._vocab_size, num_tokens = sampling.vocab_size, getattr(self.heads, "vocab_size", None)
        if None not in (num_tokens, self._vocab_size) and num_tokens != self._vocab_size:
            raise refusal("drafter", f"heads of the target's {self._vocab_size} tokens", num_tokens)
        self._hidden, self._known, self._newest = None, set(), None
        self._depth = self.max_depth

    def confidence(self) -> Tensor | None:
        return self._log_probs

    def propose(self, tokens: Tensor, lengths: Tensor) -> Draft:
        self._log_probs = None
        self._store_newest()
        fallback = next((sequence.index for sequence in self._selected if sequence.index in self._known), None)
        if fallback is None:
            return roots_only(tokens.shape[0], tokens.device)
        # A sequence without a state drafts from an arbitrary one at no cost.
        indices = [sequence.index if sequence.index in self._known else fallback for sequence in self._selected]
        return self._trees(torch.tensor(indices, dtype=torch.int64).to(tokens.device))

    def select_captured(self, sequences: list[GeneratedSequence], batch_size: int) -> None:
        self._store_newest()

    def propose_captured(self, tokens: Tensor, lengths: Tensor, active: Tensor, rows: Tensor) -> Draft:
        return self._trees(rows, active)

    def _trees(self, rows: Tensor, active: Tensor | None = None) -> Draft:
        assert self._hidden is not None
        logits = self.heads(self._hidden.index_select(0, rows))
        if self._vocab_size is not None and logits.shape[-1] > self._vocab_size:
            wanted = f"heads of the target's {self._vocab_size} tokens"
            raise refusal("drafter", wanted, f"logits of {logits.shape[-1]}")
        if isinstance(self.tree, DraftTree):
            return medusa_propose(logits, self.tree, active=active)
        draft, self._log_probs = best_trees(logits[:, : self._depth], self.tree)
        return draft

    def observe_captured(self, result: StepResult, rows: Tensor) -> None:
        assert result.hidden is not None
        self._store(rows, result.hidden, result.commit)

    def observe(self, result: StepResult) -> None:
        assert result.hidden is not None
        indices = [sequence.index for sequence in result.sequences]
        self._known.update(indices)
        # Storing every step's states took 2 % of a small model's time during long phases without drafts.
        if self._newest is not None and self._newest[0] != indices:
            self._store_newest()
        self._newest = indices, result.hidden, result.commit

    def _store_newest(self) -> None:
        if self._newest is not None:
            (indices, hidden, commit), self._newest = self._newest, None
            self._make_room(max(indices) + 1, hidden)
            self._store(torch.tensor(indices, dtype=torch.int64).to(hidden.device), hidden, commit)

    def _store(self, rows: Tensor, hidden: Tensor, commit: Commit) -> None:
        assert self._hidden is not None
        ends = commit.accept_rows.gather(1, commit.num_accepted[:, None].long())[:, 0]
        self._hidden.index_copy_(0, rows, hidden.index_select(0, ends.clamp(min=0)).to(self._hidden.dtype))

    def capture(self, model: PackedModel, sequences: list[GeneratedSequence], batch_size: int) -> None:
        self._make_room(len(sequences) + 1, model.new_hidden(0))

    def advance(self, sequences: list[GeneratedSequence]) -> None:
        self._known.update(sequence.index for sequence in sequences)

    def forget(self, sequence: GeneratedSequence) -> None:
        self._known.discard(sequence.index)

    def _make_room(self, num_rows: int, like: Tensor) -> None:
        if self._hidden is None:
            self._hidden = like.new_zeros((num_rows, like.shape[1]))
        elif self._hidden.shape[0] < num_rows:
            rows = self._hidden.new_zeros((num_rows - self._hidden.shape[0], self._hidden.shape[1]))
            self._hidden = torch.cat([self._hidden, rows])
