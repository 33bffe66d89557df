"""Interface to grammar engines: a draft tree on the host in, mask rows out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

__all__ = ["Array", "DepthFirstMatcher", "GrammarMatcher", "TokenTree", "allow_only", "linked_tree"]

Array = np.ndarray[Any, Any]


class TokenTree(NamedTuple):
    """One draft tree on the host, int64 numpy arrays [n]: local indices, -1 = none. Node 0 is the root.

    Attributes:
        tokens: the nodes' tokens, within the vocabulary; -1 at the root and at unreachable nodes.
        parents: -1 at the root and at unreachable nodes.
        first_child, next_sibling: the links; they reach each reachable node exactly once.
    """

    tokens: Array
    parents: Array
    first_child: Array
    next_sibling: Array


@runtime_checkable
class GrammarMatcher(Protocol):
    """The interface of a grammar engine to `GrammarMasks`: one sequence's grammar state after its output so far.

    `pagedtree.integrations.xgrammar` and `.llguidance` implement it. For another engine derive from
    `DepthFirstMatcher`, or implement these six if it walks trees itself. One thread at a time calls a matcher. Matchers
    that release the GIL run in parallel.
    """

    @property
    def vocab_size(self) -> int:
        """V of the grammar's own tokenizer."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The tokens that end the text."""

    def fill_tree(self, tree: TokenTree, mask: Array) -> None:
        """Writes the rows of one tree, and restores the matcher's state.

        mask: int32 [n, ceil(vocab_size / 32)], contiguous, all bits set. Row n gets the tokens that may follow the path
        from below the root to node n; the matcher has consumed the root's token. Where the grammar has ended no bit
        stays. Rows of forbidden drafts and unreachable nodes, and rows below them or below the grammar's end, stay
        unchanged.
        """

    def accept(self, token: int) -> bool:
        """Consumes a token. Returns False, with the state unchanged, if the grammar forbids it."""

    def rollback(self, count: int) -> None:
        """Undoes the last `count` accepted tokens."""

    def is_terminated(self) -> bool:
        """Returns whether the text is complete and no token may follow."""


class DepthFirstMatcher(ABC):
    """A `GrammarMatcher` for engines that handle only chains: visits a tree by accepting and rolling back.

    Subclasses implement all of `GrammarMatcher` but `fill_tree`, and `fill_row`.
    """

    vocab_size: int
    stop_token_ids: Sequence[int]

    @abstractmethod
    def accept(self, token: int) -> bool: ...

    @abstractmethod
    def rollback(self, count: int) -> None: ...

    @abstractmethod
    def is_terminated(self) -> bool: ...

    @abstractmethod
    def fill_row(self, row: Array) -> None:
        """Writes the possible next tokens into int32 [ceil(vocab_size / 32)]; not called once terminated."""

    def fill_tree(self, tree: TokenTree, mask: Array) -> None:
        """Fills as `GrammarMatcher.fill_tree`. Rolls back every accepted token, also after an error."""
        tokens, parents, first_child, next_sibling = (array.tolist() for array in tree)
        # ~node stands for leaving a node, after its descendants.
        stack, steps = [0], 0
        try:
            while stack:
                node = stack.pop()
                if node < 0:
                    self.rollback(1)
                    steps -= 1
                    continue
                if node > 0:
                    token = tokens[node]
                    if not _allows(mask[parents[node]], token) or not self.accept(token):
                        continue
                    steps += 1
                    stack.append(~node)
                if self.is_terminated():
                    mask[node] = 0
                    continue
                self.fill_row(mask[node])
                child = first_child[node]
                while child >= 0:
                    stack.append(child)
                    child = next_sibling[child]
        finally:
            if steps:
                self.rollback(steps)


def linked_tree(tokens: Array, parents: Array, bounds: tuple[int, int], vocab: int) -> TokenTree:
    """Returns the tree, linked as by `build_trees`. Nodes whose token is outside the vocabulary are unreachable.

    Malformed links are safe.
    """
    count, (max_nodes, max_depth) = len(tokens), bounds
    depths, reachable = [0] + [-1] * (count - 1), [-1] * count
    first_child, next_sibling, last_child = [-1] * count, [-1] * count, [-1] * count
    ids: list[int] = tokens.tolist()
    links: list[int] = parents.tolist()
    for node in range(1, min(count, max_nodes)):
        parent = links[node]
        if not 0 <= parent < node or not 0 <= depths[parent] < max_depth or not 0 <= ids[node] < vocab:
            continue
        depths[node], reachable[node] = depths[parent] + 1, parent
        if last_child[parent] < 0:
            first_child[parent] = node
        else:
            next_sibling[last_child[parent]] = node
        last_child[parent] = node
    ids = [token if parent >= 0 else -1 for token, parent in zip(ids, reachable, strict=True)]
    return TokenTree(*(np.array(values, np.int64) for values in (ids, reachable, first_child, next_sibling)))


def allow_only(row: Array, tokens: Iterable[int]) -> None:
    """Sets the bits of `tokens` in int32 [ceil(V / 32)] and clears all others. Ids outside the row are ignored."""
    row.fill(0)
    words = row.view(np.uint32)
    for token in tokens:
        if 0 <= token < 32 * row.shape[0]:
            words[token // 32] |= np.uint32(1 << token % 32)


def _allows(row: Array, token: int) -> bool:
    return 0 <= token < 32 * row.shape[0] and bool(int(row[token // 32]) >> token % 32 & 1)
