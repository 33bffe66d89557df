"""What the tests of growing trees and of proposers share. Tensors are made on the default device."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from pagedtree import Draft


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def best_tokens(logits: Tensor, k: int) -> list[int]:
    """Finite tokens by falling logit, then id."""
    values = logits.double().tolist()
    finite = [x for x, value in enumerate(values) if not math.isnan(value) and value > -math.inf]
    return sorted(finite, key=lambda x: (-values[x], x))[:k]


def packed_trees(draft: Draft) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents of each tree; checks offsets and padding on the way."""
    cu_nodes = draft.trees.cu_nodes.tolist()
    rows = draft.draft_tokens.shape[0]
    assert cu_nodes[0] == 0 and cu_nodes == sorted(cu_nodes) and cu_nodes[-1] <= rows
    assert draft.trees.parents.shape == (rows,)
    assert draft.draft_tokens[cu_nodes[-1] :].tolist() == [-1] * (rows - cu_nodes[-1])
    assert draft.trees.parents[cu_nodes[-1] :].tolist() == [-1] * (rows - cu_nodes[-1])
    tokens, parents = draft.draft_tokens.tolist(), draft.trees.parents.tolist()
    return [(tokens[a:b], parents[a:b]) for a, b in pairwise(cu_nodes)]
