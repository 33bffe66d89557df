"""Tiny models in exact fractions, to enumerate rules that compare target with draft."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from verify_case import batch_of

from pagedtree import SamplingParams, Verdict, reference, verify_block, verify_rejection, verify_traversal

CHAIN, PAIR, TREE, STAIR = [-1, 0, 1], [-1, 0, 0], [-1, 0, 0, 1, 1], [-1, 0, 1, 0, 3]
RULES = {
    "rejection": (reference.rejection, verify_rejection),
    "block": (reference.block, verify_block),
    "traversal": (reference.traversal, verify_traversal),
}
LOSSLESS = [
    *[("rejection", law, tree) for law in ("iid", "swor", "onehot") for tree in (CHAIN, PAIR, TREE, STAIR)],
    *[("block", law, CHAIN) for law in ("iid", "onehot")],
    *[("traversal", law, tree) for law in ("iid", "swor") for tree in (CHAIN, PAIR, TREE, STAIR)],
]
Path = tuple[int, ...]
Distribution = list[Fraction]
Rule = Callable[..., tuple[list[int], list]]


class ToyPair:
    """A target and a drafter over `vocab` tokens that depend on the prefix; some tokens have no mass."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.seed = vocab, seed

    def _weights(self, prefix: Path, kind: int, total: int | None) -> Distribution:
        generator = np.random.default_rng([self.seed, kind, len(prefix), *(x + 1 for x in prefix)])
        if total is None:
            weights = generator.integers(0, 6, self.vocab)
            weights[generator.integers(self.vocab)] += 1
            return [Fraction(int(w), int(weights.sum())) for w in weights]
        cuts = np.sort(generator.integers(0, total + 1, self.vocab - 1))
        return [Fraction(int(b - a), total) for a, b in itertools.pairwise([0, *cuts, total])]

    def p(self, prefix: Path) -> Distribution:
        return self._weights(prefix, 0, None)

    def q(self, prefix: Path) -> Distribution:
        """Returns multiples of 1/16, exact in every dtype."""
        return self._weights(prefix, 1, 16)

    def distributions(
        self, parents: Sequence[int], drafts: Sequence[int]
    ) -> tuple[list[Distribution], list[Distribution]]:
        """Returns p and q at each node."""
        prefixes = prefixes_of(parents, drafts)
        return [self.p(x) for x in prefixes], [self.q(x) for x in prefixes]

    def logits(self, parents: Sequence[int], drafts: Sequence[int]) -> list[list[float]]:
        """Returns p's logits by node."""
        rows = (self.p(x) for x in prefixes_of(parents, drafts))
        return [[math.log(x) if x else -math.inf for x in row] for row in rows]

    def drafts(self, parents: Sequence[int], law: str) -> Iterator[tuple[Fraction, list[int]]]:
        """Yields (probability, tokens) of every draft; under "onehot" each has probability 1."""

        def grow(node: int, chance: Fraction, tokens: list[int]) -> Iterator[tuple[Fraction, list[int]]]:
            if node == len(parents):
                yield chance, tokens
                return
            parent = parents[node]
            path: list[int] = []
            at = parent
            while at > 0:
                path.insert(0, tokens[at])
                at = parents[at]
            q = self.q(tuple(path))
            if law == "swor":
                tried = [tokens[i] for i in range(1, node) if parents[i] == parent]
                q = reference.normalised(reference.without(q, *tried))
            for x in range(self.vocab):
                if law == "onehot" or q[x] > 0:
                    yield from grow(node + 1, chance if law == "onehot" else chance * q[x], [*tokens, x])
            if law == "swor" and not any(q):  # exhausted
                yield from grow(node + 1, chance, [*tokens, -1])

        yield from grow(1, Fraction(1), [0])

    def joint(self, length: int) -> dict[Path, Fraction]:
        return self.completed((), Fraction(1), length)

    def completed(self, prefix: Path, chance: Fraction, length: int) -> dict[Path, Fraction]:
        found = {prefix: chance}
        for _ in range(length - len(prefix)):
            found = {(*x, t): c * m for x, c in found.items() for t, m in enumerate(self.p(x)) if m}
        return found

    def error(self, rule: Rule, parents: Sequence[int], law: str, drawn: str | None = None) -> Fraction:
        """Returns total variation between a rule's output and the target, one token deeper than the tree."""
        depth = max(sum(1 for _ in ancestors(parents, node)) for node in range(len(parents)))
        target = self.joint(depth + 1)
        emitted: dict[Path, Fraction] = defaultdict(Fraction)
        worst = Fraction(0)
        for chance, tokens in self.drafts(parents, drawn or law):
            p, q = self.distributions(parents, tokens)
            for weight, _, (path, bonus) in reference.branches(
                lambda below, tokens=tokens, p=p, q=q: rule(parents, tokens, p, q, law, below)
            ):
                prefix = tuple(tokens[node] for node in path[1:])
                for x, mass in enumerate(bonus):
                    if mass and weight:
                        for full, c in self.completed((*prefix, x), chance * weight * mass, depth + 1).items():
                            emitted[full] += c
            if (drawn or law) == "onehot":
                worst = max(worst, variation(emitted, target))
                emitted.clear()
        return max(worst, variation(emitted, target)) if emitted else worst


def prefixes_of(parents: Sequence[int], drafts: Sequence[int]) -> list[Path]:
    """Returns each node's tokens below the root."""
    prefixes: list[Path] = [()]
    for node, parent in enumerate(parents[1:], 1):
        prefixes.append((*prefixes[parent], drafts[node]))
    return prefixes


def variation(a: dict[Path, Fraction], b: dict[Path, Fraction]) -> Fraction:
    return sum((abs(a.get(x, Fraction(0)) - b.get(x, Fraction(0))) for x in {*a, *b}), Fraction(0)) / 2


def ancestors(parents: Sequence[int], node: int) -> Iterator[int]:
    while node > 0:
        node = parents[node]
        yield node


MARGIN = 1e-4  # of a coin to its bounds, which ops compute in floats


class Questions:
    """Trees with coins, and expected verdicts."""

    def __init__(self, vocab: int, tree: list[int]) -> None:
        self.vocab, self.tree = vocab, tree
        self.logits: list[np.ndarray] = []
        self.probs: list[np.ndarray] = []
        self.tokens: list[list[int]] = []
        self.coins: list[list[float]] = []
        self.finals: list[float] = []
        self.expected: list[tuple[list[int], list[int]]] = []

    def ask_all(self, pair: ToyPair, law: str, tokens: list[int], rule: Callable) -> None:
        """Adds coins at both ends of each interval of the rule's decision, and each token's share."""
        p, q = pair.distributions(self.tree, tokens)
        logits = np.array(pair.logits(self.tree, tokens))
        probs = np.array([[float(x) for x in row] for row in q])
        generator = np.random.default_rng(len(self.tokens))
        for _, intervals, (path, bonus) in reference.branches(lambda below: rule(self.tree, tokens, p, q, law, below)):
            if any(high - low < 3 * MARGIN for low, high in intervals.values()):
                continue
            shares = np.cumsum([0.0, *map(float, bonus)])
            for x, mass in enumerate(bonus):
                if mass < 3 * MARGIN:
                    continue
                for side in (0, 1):
                    coins = generator.random(len(self.tree)).tolist()
                    for entry, (low, high) in intervals.items():
                        coins[entry] = float(high) - MARGIN if side else float(low) + MARGIN * (low > 0)
                    self.logits.append(logits)
                    self.probs.append(probs)
                    self.tokens.append(tokens)
                    self.coins.append(coins)
                    self.finals.append(shares[x + 1] - MARGIN if side else shares[x] + MARGIN * (shares[x] > 0))
                    self.expected.append((path, [*(tokens[node] for node in path[1:]), x]))

    def answer(
        self, op: Callable, law: str, device: torch.device, dtype: torch.dtype,
        params: SamplingParams | None = None, **given: Any,
    ) -> Verdict:  # fmt: skip
        if law != "onehot":
            given["draft_probs"] = torch.tensor(np.concatenate(self.probs), dtype=dtype, device=device)
        zeros = torch.zeros(len(self.tokens), dtype=torch.int64, device=device)
        return op(
            torch.tensor(np.concatenate(self.logits), dtype=torch.float32, device=device),
            torch.tensor(self.tokens, device=device).flatten(),
            batch_of([self.tree] * len(self.tokens), device),
            params or SamplingParams(),
            draft_law=law,
            seeds=zeros,
            positions=zeros,
            coins=torch.tensor(self.coins, dtype=torch.float32, device=device).flatten(),
            final_coins=torch.tensor(self.finals, dtype=torch.float32, device=device),
            **given,
        )
