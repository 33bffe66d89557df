"""A batch with every request option; hostile options."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from calls import mapped
from torch import Tensor

from pagedtree import (
    RequestOptions,
    SamplingParams,
    TreeBatch,
    build_trees,
    verify_block,
    verify_rejection,
    verify_traversal,
)
from pagedtree.testing import use_backend

VOCAB = 40
CHAINS = [[-1, 0, 1, 2], [-1], [-1, 0, 1, 2, 3], [], [-1, 0], [-1, 0, 1]]
WEIGHED = [
    *((verify_rejection, law) for law in ("iid", "swor", "onehot")),
    *((verify_block, law) for law in ("iid", "onehot")),
    *((verify_traversal, law) for law in ("iid", "swor")),
]


@dataclass
class Case:
    """A ragged batch with options and idle sequences."""

    logits: Tensor
    drafts: Tensor
    trees: TreeBatch
    seeds: Tensor
    positions: Tensor
    probs: Tensor
    grammar_mask: Tensor
    options: RequestOptions
    penalties: dict[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> dict[str, Tensor]:
        return {"seeds": self.seeds, "positions": self.positions}

    @property
    def params(self) -> SamplingParams:
        """Returns the penalties alone."""
        return SamplingParams(**self.penalties)


def batch_of(parents: list[list[int]], device: torch.device | str = "cpu", max_nodes: int = 8) -> TreeBatch:
    """Builds trees, also of no nodes."""
    sizes = torch.tensor([0, *map(len, parents)], dtype=torch.int32, device=device)
    flat = torch.tensor([node for tree in parents for node in tree], dtype=torch.int32, device=device)
    return build_trees(flat, sizes.cumsum(0, dtype=torch.int32), max_nodes=max_nodes, max_depth=max_nodes - 1)


@cache
def complete_case(seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    likely, batch = torch.randperm(VOCAB, generator=generator)[:5], len(CHAINS)

    def tokens(*shape: int) -> Tensor:
        """Draws likely tokens, so that drafts, counts, words, stop ids meet."""
        return likely[torch.randint(len(likely), shape, generator=generator)]

    with use_backend("cpu"):  # cases are built on the host
        trees = batch_of(CHAINS)
    rows = trees.parents.numel()
    logits = torch.randn(rows, VOCAB, generator=generator)
    logits[:, likely] += 3
    seeds, positions = torch.randint(5, 60, (2, batch), generator=generator)
    texts = [tokens(9 - b).tolist() for b in range(batch)]
    options = RequestOptions.from_lists(
        VOCAB, prompts=[text[:3] for text in texts], outputs=[text[3:] for text in texts],
        allowed=[[*range(b, VOCAB)] for b in range(batch)],
        bias=[{int(token): 1.5 - i for i, token in enumerate(likely[:b])} for b in range(batch)],
        bad_words=[[[*text[-2:], int(likely[0])], [int(likely[b % 5])]] for b, text in enumerate(texts)],
        stop_ids=tokens(batch, 2).tolist(), min_positions=(positions + 2).tolist(),
    )  # fmt: skip
    return Case(
        logits, tokens(rows), trees, seeds, positions,
        probs=(logits + torch.randn(logits.shape, generator=generator)).softmax(-1),
        grammar_mask=torch.rand(rows, VOCAB, generator=generator) < 0.7,
        options=replace(options, history_start=torch.arange(batch, dtype=torch.int32) % 3),
        penalties={
            "repetition_penalty": torch.tensor([1.3, 1.0, 0.7, float("nan"), -1.0, 2.5]),
            "presence_penalty": torch.tensor([0.5, 0.0, -0.3, float("nan"), 7.0, 1.1]),
            "frequency_penalty": 0.5,
        },
    )  # fmt: skip


def good_case(device: torch.device, seed: int = 3) -> Case:
    return mapped(complete_case(seed), lambda t: t.clone().to(device))


HOSTILE = [-(2**31), -5, -1, 0, 1, 2, 3, 5, 8, 31, 32, 39, 40, 41, 1000, 2**31 - 1]


def hostile_options(case: Case, generator: torch.Generator) -> RequestOptions:
    tensors = {}
    for name, t in case.options.tensors().items():
        assert t is not None
        if t.dtype == torch.float32:
            strange = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1.0, -2.0])
            tensors[name] = strange[torch.randint(0, 7, t.shape, generator=generator)].to(t.device)
            continue
        values = torch.tensor(HOSTILE if t.dtype == torch.int32 else [*HOSTILE, -(2**63), 2**63 - 1, 2**32 + 1])
        picked = values[torch.randint(0, len(values), t.shape, generator=generator)].to(t.dtype)
        keep = torch.rand(t.shape, generator=generator) < (0.6 if torch.rand((), generator=generator) < 0.5 else 0)
        tensors[name] = torch.where(keep.to(t.device), t, picked.to(t.device))
    return RequestOptions(**tensors)
