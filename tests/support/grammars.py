"""Grammars without an engine, random drafts, and masks by a plain run per path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagedtree import DraftTree, TreeBatch
from pagedtree.grammars import DepthFirstMatcher, allow_only
from support.attention import random_tree

EOS = 0
_WORDS = ['{"', '":', '": ', '", "', '"}', "true", "null", "ab", "abc", "name", "12", "345", '"name"', "], [", "}}"]
_BYTES = b'{}[]:,". -0123456789abcdeflmnrstu'
VOCAB: list[bytes] = [b"<eos>", *(bytes([byte]) for byte in _BYTES), *(word.encode() for word in _WORDS)]


class Rules(Protocol):
    """A grammar engine's own answer: `after(text)`."""

    def __call__(self, text: Sequence[int]) -> set[int] | None:
        """Returns the next tokens; none after the end; None for invalid text."""


def bits(row: Tensor | np.ndarray) -> set[int]:
    words = np.ascontiguousarray(np.asarray(row), dtype=np.int32)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def path_of(tree: DraftTree, node: int) -> list[int]:
    """Returns the nodes from below the root to `node`."""
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path


def expected_rows(
    after: Rules, text: Sequence[int], tree: DraftTree, tokens: Sequence[int], stop: Sequence[int], vocab: int, own: int
) -> list[set[int]]:
    """Returns rows' allowed tokens; own: the grammar's vocabulary, vocab: the logits'."""
    every, rows = set(range(min(vocab, own))), []
    for node in range(tree.num_nodes):
        path = [tokens[i] for i in path_of(tree, node)]
        inside = all(0 <= token < min(vocab, own) for token in path)
        # Nothing follows a grammar's end, not even a stop token.
        begun = all(after([*text, *path[:i]]) for i in range(len(path))) if inside else False
        allowed = after([*text, *path]) if begun else None
        rows.append(every if allowed is None else allowed & every or set(stop) & every)
    return rows


def random_drafts(rng: np.random.Generator, after: Rules, text: Sequence[int], tree: DraftTree) -> list[int]:
    """Draws mostly allowed tokens, else any, invalid ones included."""
    tokens = [-1] * tree.num_nodes
    for node in range(1, tree.num_nodes):
        allowed = after([*text, *(tokens[i] for i in path_of(tree, node)[:-1])])
        if allowed and rng.random() < 0.75:
            tokens[node] = int(rng.choice(sorted(allowed)))
        else:
            tokens[node] = int(rng.choice([*range(len(VOCAB)), 64, 99, -1, 10**6, -(2**31)]))
    return tokens


def random_text(rng: np.random.Generator, after: Rules, length: int) -> list[int]:
    """Draws valid unfinished text."""
    text: list[int] = []
    while len(text) < length:
        choices = sorted((after(text) or set()) - {EOS})
        if not choices:
            break
        text.append(int(rng.choice(choices)))
    return text


def random_shapes(rng: np.random.Generator, count: int, most: int = 12) -> list[DraftTree]:
    return [random_tree(rng, int(rng.integers(1, most + 1))) for _ in range(count)]


def drafts_of(
    trees: Sequence[DraftTree], tokens: Sequence[Sequence[int]], padding: int = 0, device: torch.device | str = "cpu"
) -> tuple[Tensor, TreeBatch]:
    flat = [token for part in tokens for token in part] + [3] * padding
    batch = TreeBatch.from_trees(trees, capacity=len(flat), device=device)
    return torch.tensor(flat, dtype=torch.int64, device=device), batch


class Parity(DepthFirstMatcher):
    """A toy grammar over 40 tokens: parities alternate from odd; 0 ends two, four or six tokens; only 1 follows 39."""

    vocab_size, stop_token_ids = 40, (EOS,)

    def __init__(self, text: Sequence[int] = (), on_fill: Callable[[], object] = lambda: None) -> None:
        self.text, self.on_fill, self.fills = list(text), on_fill, 0

    def allowed(self) -> set[int]:
        if self.is_terminated():
            return set()
        if self.text[-1:] == [39]:
            return {1}
        tokens = set(range(2 if len(self.text) % 2 else 1, 40, 2)) if len(self.text) < 6 else set()
        return tokens | ({EOS} if self.text and len(self.text) % 2 == 0 else set())

    def accept(self, token: int) -> bool:
        assert 0 <= token < self.vocab_size, "a token of another vocabulary"
        if token not in self.allowed():
            return False
        self.text.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.text)
        del self.text[-count:]

    def is_terminated(self) -> bool:
        return self.text[-1:] == [EOS]

    def fill_row(self, row: np.ndarray) -> None:
        assert not self.is_terminated()
        self.fills += 1
        self.on_fill()
        allow_only(row, sorted(self.allowed()))

    @classmethod
    def after(cls, text: Sequence[int]) -> set[int] | None:
        matcher = cls()
        inside = all(0 <= token < cls.vocab_size for token in text)
        return matcher.allowed() if inside and all(map(matcher.accept, text)) else None


STOP = 127


class Brackets(DepthFirstMatcher):
    """Brackets in a bracket, up to three deep: 0..9 open, 10..84 are letters, 85..99 close."""

    vocab_size = 128  # VOCAB of support/models.py

    def __init__(self, needs_stop=True):
        self.text, self.stop_token_ids, self.needs_stop = [], [STOP], needs_stop

    def allowed(self):
        depth = sum(token < 10 for token in self.text) - sum(85 <= token < 100 for token in self.text)
        if self.is_terminated():
            return set()
        if self.text and depth == 0:
            return {STOP}
        return {*range(10 * (depth < 3)), *(range(10, 100) if depth else ())}

    def fill_row(self, row):
        row.fill(0)
        for token in self.allowed():
            row.view("uint32")[token // 32] |= 1 << token % 32

    def accept(self, token):
        if token not in self.allowed():
            return False
        self.text.append(token)
        return True

    def rollback(self, count):
        del self.text[len(self.text) - count :]

    def is_terminated(self):
        if self.needs_stop:
            return STOP in self.text
        opened = sum(token < 10 for token in self.text)
        return opened > 0 and opened == sum(85 <= token < 100 for token in self.text)
