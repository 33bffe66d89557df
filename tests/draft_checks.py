"""What the tests of growing trees and of proposers share. Tensors are made on the default device."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from step_case import int32
from torch import Tensor

from pagedtree import Draft, DraftState, expand_tree, start_draft


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


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


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The tokens from the root to each node of a tree, without the root's."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def mask_sets(mask: Tensor) -> list[set[int]]:
    """The set bits of each mask row."""
    return [
        {32 * w + bit for w, word in enumerate(row) for bit in range(32) if (word >> bit) & 1} for row in mask.tolist()
    ]


class ToyModel:
    """Logits of a node are a fixed function of its path's tokens: whoever sees the wrong path sees other logits."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def logits(self, path: list[int]) -> Tensor:
        seed = hash(tuple(path)) % (1 << 31)
        return torch.randn(self.vocab, generator=seeded(seed)) * 2

    def grow(
        self, roots: list[int], levels: list[tuple[int, int]], active: Tensor | None = None, **sampled
    ) -> tuple[DraftState, list[list[int]]]:
        """Grows trees as an engine does; its "KV cache" holds tokens, found through the mask rows only."""
        cache: list[list[int]] = [[] for _ in roots]
        state = start_draft(torch.tensor(roots), max_kv_nodes=1024, active=active)
        for num_children, num_frontier in levels:
            tokens, masks = state.level_tokens.tolist(), mask_sets(state.level_mask)
            assert state.cu_seqlens_q.tolist() == [i * state.num_frontier for i in range(len(roots) + 1)]
            positions = state.level_positions(int32([100 * b for b in range(len(roots))])).tolist()
            logits = torch.full((len(tokens), self.vocab), math.nan)
            for b in range(len(roots)):
                rows = range(b * state.num_frontier, (b + 1) * state.num_frontier)
                cache[b] += [tokens[row] for row in rows]
                assert state.level_tree_lens[b] == len(cache[b])
                for row in rows:
                    if not state.level_present[row]:
                        continue
                    path = [cache[b][kv] for kv in sorted(masks[row])]
                    assert positions[row] == 100 * b + len(path) - 1
                    assert path[-1] == tokens[row]
                    logits[row] = self.logits(path)
            state = expand_tree(state, logits, num_children=num_children, num_frontier=num_frontier, **sampled)
        return state, cache
