"""Batches of trees to verify, with request options, with caches to compact; hostile options; drafts taken apart."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from calls import mapped
from torch import Tensor

from pagedtree import (
    Draft,
    PreparedCompaction,
    RequestOptions,
    SamplingParams,
    TreeBatch,
    Verdict,
    build_trees,
    verify_block,
    verify_rejection,
    verify_traversal,
)
from pagedtree.testing import use_backend
from support import int32, offsets_of


def batch_of(
    parents: list[list[int]],
    device: torch.device | str | None = None,
    *,
    max_nodes: int | None = None,
    max_depth: int | None = None,
) -> TreeBatch:
    """Builds trees, also malformed ones or of no nodes, by default within tight bounds."""
    flat = int32([node for tree in parents for node in tree], device)
    nodes = max_nodes or max([1, *map(len, parents)])
    depth = nodes - 1 if max_depth is None else max_depth
    return build_trees(flat, offsets_of(map(len, parents), device), max_nodes=nodes, max_depth=depth)


@dataclass
class Case:
    """A batch to verify."""

    logits: Tensor
    drafts: Tensor
    trees: TreeBatch
    seeds: Tensor
    positions: Tensor

    @property
    def streams(self) -> dict[str, Tensor]:
        return {"seeds": self.seeds, "positions": self.positions}


def tied_case(
    vocab: int, dtype: torch.dtype, seed: int, parents: list[list[int]] | None = None, device: str = "cpu"
) -> Case:
    """Builds rows with ties, NaN, infinities; drafts are often likeliest."""
    generator = torch.Generator().manual_seed(seed)
    parents = parents or [[-1, 0, 0, 1, 1, 2, 3], [-1], [-1, 0, 1, 2], [-1, 0, 0, 0, 2, 2]]
    trees = batch_of(parents, device)
    rows = trees.parents.shape[0]
    logits = (torch.randn(rows, vocab, generator=generator) * 3).round(decimals=1)
    logits[1, ::3] = float("nan")
    logits[2, vocab // 2] = float("inf")
    logits[3, 1::2] = -float("inf")
    logits[4] = float("-inf")
    logits[5] = 0.5
    logits[6, vocab // 3 :] = 7.0
    logits = logits.to(dtype)
    best = logits.float().nan_to_num(-1e9).topk(min(3, vocab), dim=1).indices
    firsts = trees.cu_nodes[:-1].tolist()
    parent_rows = torch.cat([torch.tensor(p).clamp(min=0) + b for p, b in zip(parents, firsts, strict=True)])
    choice = torch.randint(0, best.shape[1], (rows,), generator=generator)
    drafts = best[parent_rows, choice]
    drafts[torch.rand(rows, generator=generator) < 0.15] = -1
    words = torch.randint(-(2**62), 2**62, (2, len(parents)), generator=generator)
    logits, drafts, seeds, positions = (t.to(device) for t in (logits, drafts, *words))
    return Case(logits, drafts, trees, seeds, positions)


# ---- verdicts

MALFORMED, BAD_ROW = 1, 2


def streams(batch: int, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**62), 2**62, (2, batch), generator=generator).to(device)
    return {"seeds": words[0], "positions": words[1]}


def check_verdict(verdict: Verdict, b: int, path: list[int], tokens: list[int], status: int = 0) -> None:
    width = verdict.tokens.shape[1]
    padding = [-1] * (width - len(path))
    assert verdict.accept_index[b].tolist() == path + padding
    assert verdict.tokens[b].tolist() == tokens + padding
    assert verdict.num_accepted[b] == len(path) - 1
    assert verdict.status[b] == status


def check_bounds(verdict: Verdict, max_nodes: int, max_depth: int, vocab: int) -> None:
    """Asserts that paths descend within a tree with valid tokens."""
    for accepted, count, tokens in zip(
        verdict.accept_index.tolist(), verdict.num_accepted, verdict.tokens.tolist(), strict=True
    ):
        path = [node for node in accepted if node >= 0]
        assert path == sorted(set(path)) and len(path) <= max_depth + 1
        assert all(node < max_nodes for node in path)
        assert count == max(len(path) - 1, 0)
        assert all(0 <= token < vocab for token in tokens[: len(path)]) and set(tokens[len(path) :]) <= {-1}


# ---- drafts


def packed_trees(draft: Draft) -> list[tuple[list[int], list[int]]]:
    """Returns trees' tokens and parents; checks offsets and padding."""
    cu_nodes = draft.trees.cu_nodes.tolist()
    rows = draft.draft_tokens.shape[0]
    assert cu_nodes[0] == 0 and cu_nodes == sorted(cu_nodes) and cu_nodes[-1] <= rows
    assert draft.trees.parents.shape == (rows,)
    assert draft.draft_tokens[cu_nodes[-1] :].tolist() == [-1] * (rows - cu_nodes[-1])
    assert draft.trees.parents[cu_nodes[-1] :].tolist() == [-1] * (rows - cu_nodes[-1])
    tokens, parents = draft.draft_tokens.tolist(), draft.trees.parents.tolist()
    return [(tokens[a:b], parents[a:b]) for a, b in pairwise(cu_nodes)]


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """Returns the tokens below the root down to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def random_words(count: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))


# ---- request options

VOCAB = 40
CHAINS = [[-1, 0, 1, 2], [-1], [-1, 0, 1, 2, 3], [], [-1, 0], [-1, 0, 1]]
WEIGHED = [
    *((verify_rejection, law) for law in ("iid", "swor", "onehot")),
    *((verify_block, law) for law in ("iid", "onehot")),
    *((verify_traversal, law) for law in ("iid", "swor")),
]


@dataclass
class OptionCase(Case):
    """A ragged batch with options and idle sequences."""

    probs: Tensor
    grammar_mask: Tensor
    options: RequestOptions
    penalties: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> SamplingParams:
        """Returns the penalties alone."""
        return SamplingParams(**self.penalties)


@cache
def complete_case(seed: int) -> OptionCase:
    generator = torch.Generator().manual_seed(seed)
    likely, batch = torch.randperm(VOCAB, generator=generator)[:5], len(CHAINS)

    def tokens(*shape: int) -> Tensor:
        """Draws likely tokens, so that drafts, counts, words, stop ids meet."""
        return likely[torch.randint(len(likely), shape, generator=generator)]

    with use_backend("cpu"):  # cases are built on the host
        trees = batch_of(CHAINS, "cpu", max_nodes=8)
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
    return OptionCase(
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


def good_case(device: torch.device, seed: int = 3) -> OptionCase:
    return mapped(complete_case(seed), lambda t: t.clone().to(device))


HOSTILE = [-(2**31), -5, -1, 0, 1, 2, 3, 5, 8, 31, 32, 39, 40, 41, 1000, 2**31 - 1]


def hostile_options(case: OptionCase, generator: torch.Generator) -> RequestOptions:
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


# ---- caches

FP8 = torch.float8_e4m3fn


def payload(shape: tuple[int, ...], dtype: torch.dtype, layer: int, device: torch.device) -> Tensor:
    """Returns bytes that identify slot, layer, head and dimension; NaN patterns too."""
    count = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    if count == 0:
        return torch.empty(shape, dtype=dtype, device=device)
    mixed = (np.arange(count, dtype=np.uint64) + np.uint64(layer << 40)) * np.uint64(0x9E3779B97F4A7C15)
    return torch.from_numpy((mixed >> np.uint64(53)).astype(np.uint8)).view(dtype).view(shape).to(device)


def bytes_of(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def prepared_compact(caches: list[Tensor], *moves: Tensor, **named: Tensor) -> Tensor:
    """Runs `PreparedCompaction`, which prepares nothing in grad mode."""
    with torch.inference_mode():
        return PreparedCompaction(caches)(*moves, **named)


def compact_arguments(device: torch.device) -> dict:
    return {
        "caches": [payload((4, 2, 3), torch.float32, i, device) for i in range(2)],
        "page_table": int32([[0, 1], [2, 3]], device),
        "start": int32([0, 0], device),
        "accept_index": int32([[0, 2, 3], [0, 1, 2]], device),
        "num_accepted": int32([2, 2], device),
    }
