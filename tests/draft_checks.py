from __future__ import annotations

from itertools import pairwise

import torch

from pagedtree import Draft


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


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
