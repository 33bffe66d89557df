"""Trees by name and number of nodes: "chain 8", "Medusa 64", "prefill 512"."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pagedtree import DraftTree, choose_tree


def binary(num_nodes: int) -> DraftTree:
    """Balanced; full if num_nodes is a power of two less one."""
    return DraftTree([-1] + [(i - 1) // 2 for i in range(1, num_nodes)])


def likeliest(num_nodes: int, acceptance: np.ndarray) -> DraftTree:
    return choose_tree(acceptance, lambda size: 1.0, max_nodes=num_nodes, max_depth=num_nodes)


# Acceptance by rank as in the papers' plots: mostly the first choice, the others ever less often.
RANKS = 0.6 * 0.35 ** np.arange(10)
SHAPES: dict[str, Callable[[int], DraftTree]] = {
    "chain": lambda num_nodes: DraftTree.chain(num_nodes - 1),
    "binary": binary,
    # EAGLE-2 (Li et al., EMNLP 2024) grows up to six levels of at most ten children and keeps the best nodes.
    "EAGLE-2": lambda num_nodes: likeliest(num_nodes, np.tile(RANKS, (6, 1))),
    # Medusa (Cai et al., ICML 2024): one head per level, each less sure than the one before.
    "Medusa": lambda num_nodes: likeliest(num_nodes, RANKS * np.array([1.0, 0.8, 0.65, 0.5])[:, None]),
    # Sequoia (Chen et al., NeurIPS 2024): no bound on the depth.
    "Sequoia": lambda num_nodes: likeliest(num_nodes, RANKS),
    # A prompt's chunk.
    "prefill": lambda num_nodes: DraftTree.chain(num_nodes - 1),
}


def tree_named(text: str) -> DraftTree:
    kind, _, size = text.rpartition(" ")
    if kind not in SHAPES or not size.isdigit() or int(size) < 1:
        raise SystemExit(f"tree: expected one of {', '.join(SHAPES)} and a number of nodes, got {text!r}")
    return SHAPES[kind](int(size))


def nodes_of(text: str) -> int:
    return tree_named(text).num_nodes


def longest_path(tree: DraftTree) -> list[int]:
    path = [int(tree.depths.argmax())]
    while path[0]:
        path.insert(0, int(tree.parents[path[0]]))
    return path
