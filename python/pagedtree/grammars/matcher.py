"""What `pagedtree.grammars` needs of a grammar engine, and what it gives to one: a tree on the host, rows to fill."""

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
        tokens: the nodes' tokens, within the vocabulary; -1 at the root and at nodes that cannot be reached.
        parents: -1 at the root and at nodes that cannot be reached.
        first_child, next_sibling: the links; they lead to each node that can be reached, and to it once.
    """

    tokens: Array
    parents: Array
    first_child: Array
    next_sibling: Array


@runtime_checkable
class GrammarMatcher(Protocol):
    """What `GrammarMasks` needs of a grammar engine: the state of one sequence's grammar behind its output so far.

    `pagedtree.integrations.xgrammar` and `.llguidance` have one for their engine. For another engine derive from
    `DepthFirstMatcher`, or write these six where the engine walks trees itself. One thread calls a matcher at a time.
    What does its work without Python's global lock is filled while Python does other things, and in parallel.
    """

    @property
    def vocab_size(self) -> int:
        """V of the grammar's own tokenizer."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The tokens that end the text."""

    def fill_tree(self, tree: TokenTree, mask: Array) -> None:
        """Writes the rows of one tree, and leaves the matcher in the state it came in.

        mask: int32 [n, ceil(vocab_size / 32)], contiguous, all bits set. Row n gets the tokens that may follow the path
            from below the root to node n; the matcher has consumed the root's token. Where the grammar has ended no bit
            stays. Rows below a draft that the grammar forbids, the draft's own included, below its end, and of nodes
            that cannot be reached stay as they are.
        """

    def accept(self, token: int) -> bool:
        """Consumes a token. Returns False where the grammar forbids it, and then stays in the state it was in."""

    def rollback(self, count: int) -> None:
        """Takes back the last `count` tokens accepted."""

    def is_terminated(self) -> bool:
        """Tells whether the text is complete and no token may follow."""


class DepthFirstMatcher(ABC):
    """A `GrammarMatcher` for engines that know chains alone: visits a tree by accepting and taking back.

    A subclass has `vocab_size`, `stop_token_ids`, `accept`, `rollback` and `is_terminated` as `GrammarMatcher`
    describes them, and `fill_row`.
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
        """Writes the tokens that may come next into int32 [ceil(vocab_size / 32)]; not called once terminated."""

    def fill_tree(self, tree: TokenTree, mask: Array) -> None:
        """As `GrammarMatcher.fill_tree`. Also after an error every token that was accepted is taken back."""
        tokens, parents, first_child, next_sibling = (array.tolist() for array in tree)
        # ~node stands for leaving a node, behind all that is below it.
        stack, taken = [0], 0
        try:
            while stack:
                node = stack.pop()
                if node < 0:
                    self.rollback(1)
                    taken -= 1
                    continue
                if node > 0:
                    token = tokens[node]
                    if not _allows(mask[parents[node]], token) or not self.accept(token):
                        continue
                    taken += 1
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
            if taken:
                self.rollback(taken)


def linked_tree(tokens: Array, parents: Array, bounds: tuple[int, int], vocab: int) -> TokenTree:
    """Returns the tree, linked as `build_trees` does it. A node that drafts no token of the vocabulary cannot be
    reached.

    Not by the op: links that do not belong together lead nobody astray, and this is one tree on the host, whichever
    backend the ops use.
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
    """Sets the bits of `tokens` in int32 [ceil(V / 32)] and no others. Ids outside the row are ignored."""
    row.fill(0)
    words = row.view(np.uint32)
    for token in tokens:
        if 0 <= token < 32 * row.shape[0]:
            words[token // 32] |= np.uint32(1 << token % 32)


def _allows(row: Array, token: int) -> bool:
    return 0 <= token < 32 * row.shape[0] and bool(int(row[token // 32]) >> token % 32 & 1)
