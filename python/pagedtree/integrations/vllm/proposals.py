"""Draft trees on the host in vLLM's form: tokens and parents."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedtree import Draft, TreeBatch, build_trees


class Proposal(NamedTuple):
    """A tree of n draft tokens under the last token of a request's text: parents int32 [n + 1] and log_probs fp32
    [n + 1] or None, as in `TreeDrafter.draft`."""

    tokens: list[int]
    parents: np.ndarray
    log_probs: np.ndarray | None = None


NO_GUESS = Proposal([], np.full(1, -1, dtype=np.int32))


def padded(known: Sequence[np.ndarray | list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns texts as the arguments of `Drafter.propose`."""
    lengths = [len(tokens) for tokens in known]
    history = np.zeros((len(known), max(lengths, default=0)), dtype=np.int64)
    for row, tokens in zip(history, known, strict=True):
        row[: len(tokens)] = tokens
    return torch.from_numpy(history).to(device), torch.tensor(lengths, dtype=torch.int32).to(device)


def host_trees(parents: Sequence[np.ndarray], device: torch.device | str = "cpu") -> TreeBatch:
    """Returns the trees of these parents, at least one of them, each with the root's."""
    sizes = [len(tree) for tree in parents]
    offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32).to(device)
    nodes = torch.from_numpy(np.concatenate(parents).astype(np.int32)).to(device)
    return build_trees(nodes, offsets, max_nodes=max(sizes), max_depth=max(sizes) - 1)


def host_proposals(draft: Draft, log_probs: Tensor | None = None) -> list[Proposal]:
    """Splits a batch's trees into proposals. log_probs: fp32 [N], of its nodes."""
    offsets = draft.trees.cu_nodes.tolist()
    tensors = draft.draft_tokens, draft.trees.parents, draft.trees.depths, log_probs
    nodes = [tensor.cpu().numpy() for tensor in tensors if tensor is not None]
    return [present_nodes(*(array[begin:end] for array in nodes)) for begin, end in itertools.pairwise(offsets)]


def cut_at(most_depth: int, proposal: Proposal) -> Proposal:
    tokens, parents, log_probs = proposal
    depths = np.zeros(len(parents), dtype=np.int64)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    if depths.max() <= most_depth:
        return proposal
    return present_nodes(np.where(depths <= most_depth, [-1, *tokens], -1), parents, depths, log_probs)


def present_nodes(
    tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray, log_probs: np.ndarray | None = None
) -> Proposal:
    """Drops nodes without a token, and their descendants."""
    if len(tokens) == 0:
        return NO_GUESS
    if tokens[1:].min(initial=0) >= 0 and depths[1:].min(initial=1) > 0:
        return Proposal(tokens[1:].tolist(), parents, log_probs)
    new_index = np.full(len(tokens), -1, dtype=np.int32)
    nodes = [0]
    new_index[0] = 0
    for node in range(1, len(tokens)):
        if tokens[node] >= 0 and depths[node] > 0 and new_index[parents[node]] >= 0:
            new_index[node] = len(nodes)
            nodes.append(node)
    return Proposal(
        tokens[nodes[1:]].tolist(),
        np.array([-1, *(new_index[parents[node]] for node in nodes[1:])], dtype=np.int32),
        None if log_probs is None else log_probs[nodes],
    )
