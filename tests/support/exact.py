"""Exact distributions: rules in fractions, whole steps on tables as models, chi-square."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from pagedtree import (
    Draft,
    RequestOptions,
    SamplingParams,
    Verdict,
    expand_tree,
    reference,
    rerank_tree,
    start_draft,
    verify_block,
    verify_rejection,
    verify_sampled,
    verify_traversal,
)
from pagedtree.drafting import DraftState
from support.batches import batch_of, paths_of


def excess(observed: np.ndarray, distribution: np.ndarray) -> float:
    """Returns chi-square less its mean, in standard deviations; infinite for impossible counts."""
    if observed[distribution == 0].any():
        return math.inf
    expected = distribution * observed.sum()
    common = expected >= 10
    bins = [*zip(observed[common], expected[common], strict=True)]
    if (~common).any() and expected[~common].sum() >= 10:
        bins.append((observed[~common].sum(), expected[~common].sum()))
    degrees = max(len(bins) - 1, 1)
    return (sum((o - e) ** 2 / e for o, e in bins) - degrees) / math.sqrt(2 * degrees)


# Fair samplers exceed LIMIT once in some hundred thousand runs; seeds are fixed.
LIMIT = 6.0


# ---- rules on tiny models in exact fractions

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
        prefixes = paths_of(drafts, parents)
        return [self.p(x) for x in prefixes], [self.q(x) for x in prefixes]

    def logits(self, parents: Sequence[int], drafts: Sequence[int]) -> list[list[float]]:
        """Returns p's logits by node."""
        rows = (self.p(x) for x in paths_of(drafts, parents))
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

    @classmethod
    def of_pairs(cls, rule: Callable, law: str, tree: list[int], every: int) -> Questions:
        """Asks about the drafts of two pairs, one in `every` of large trees, and about trees with drafts left out."""
        questions = cls(3, tree)
        for seed in range(2):
            pair = ToyPair(3, seed)
            for k, (_, tokens) in enumerate(pair.drafts(tree, law)):
                if len(tree) < 4 or k % every == seed:
                    questions.ask_all(pair, law, tokens, rule)
            questions.ask_all(pair, law, [0] + [-1 if node % 2 else 1 for node in range(1, len(tree))], rule)
        assert len(questions.expected) > 30
        return questions

    def check(self, verdict: Verdict) -> None:
        for b, (path, tokens) in enumerate(self.expected):
            got = [n for n in verdict.accept_index[b].tolist() if n >= 0]
            assert (got, verdict.tokens[b, : len(tokens)].tolist()) == (path, tokens), self.coins[b]
            assert (verdict.tokens[b, len(tokens) :] == -1).all() and verdict.num_accepted[b] == len(path) - 1
        assert (verdict.status == 0).all()

    def answer(self, op: Callable, law: str, device: torch.device, dtype: torch.dtype) -> Verdict:
        given = {}
        if law != "onehot":
            given["draft_probs"] = torch.tensor(np.concatenate(self.probs), dtype=dtype, device=device)
        zeros = torch.zeros(len(self.tokens), dtype=torch.int64, device=device)
        return op(
            torch.tensor(np.concatenate(self.logits), dtype=torch.float32, device=device),
            torch.tensor(self.tokens, device=device).flatten(),
            batch_of([self.tree] * len(self.tokens), device),
            SamplingParams(),
            draft_law=law,
            seeds=zeros,
            positions=zeros,
            coins=torch.tensor(self.coins, dtype=torch.float32, device=device).flatten(),
            final_coins=torch.tensor(self.finals, dtype=torch.float32, device=device),
            **given,
        )


# ---- whole steps: `expand_tree` drafts from a table, a rule verifies

VOCAB, LENGTH = 3, 3

# Next-token distributions after each token, and last after the prompt. The first pair ignores the text, and its drafter
# prefers unlikely tokens.
FLAT = torch.tensor([[0.5, 0.3, 0.2]]).expand(VOCAB + 1, -1), torch.tensor([[0.2, 0.3, 0.5]]).expand(VOCAB + 1, -1)
_generator = torch.Generator().manual_seed(4)
MARKOV = tuple(torch.randn(VOCAB + 1, VOCAB, generator=_generator).mul(1.2).softmax(-1) for _ in range(2))
TABLES = {"flat": FLAT, "markov": MARKOV}

VERIFY = {"sampled": verify_sampled, **{name: op for name, (_, op) in RULES.items()}}


def grown(
    draft_table: Tensor,
    roots: Tensor,
    positions: Tensor,
    seeds: Tensor,
    law: str,
    branching: list[int],
    expand: Callable[..., DraftState],
) -> Draft:
    """Grows trees with `branching[level]` children per node."""
    state = start_draft(roots, max_kv_nodes=1 + sum(math.prod(branching[:i]) for i in range(1, len(branching))))
    sampling = {"params": SamplingParams(), "seeds": seeds, "positions": positions} if law != "topk" else {}
    for level, children in enumerate(branching):
        width = state.num_frontier * children if level < len(branching) - 1 else 0
        logits = draft_table[state.level_tokens].log()
        state = expand(state, logits, num_children=children, num_frontier=width, law=law, **sampling)
    return rerank_tree(state, state.num_candidates)


def verified(
    rule: str, law: str, target: Tensor, draft: Draft, seeds: Tensor, positions: Tensor, params: SamplingParams,
    said: RequestOptions | None,
) -> Verdict:  # fmt: skip
    logits = target[draft.draft_tokens.clamp(min=0)].log()
    options = {"seeds": seeds, "positions": positions, "options": said}
    if rule != "sampled":
        options["draft_law"] = "onehot" if law == "topk" else law
    return VERIFY[rule](logits, draft, params, **options)


def first_tokens(
    rule: str,
    law: str,
    branching: list[int],
    model: str,
    count: int,
    device: torch.device,
    expand: Callable[..., DraftState] = expand_tree,
    params: SamplingParams | None = None,
) -> tuple[Tensor, float]:
    """Returns tokens [count, LENGTH], and mean accepted drafts per step; penalties of `params` count tokens so far."""
    target, draft_table = (table.to(device) for table in TABLES[model])
    seeds = torch.arange(count, device=device) * 7 + 1
    tokens = torch.full((count, 2 * LENGTH + len(branching)), -1, device=device)
    lengths = torch.zeros(count, dtype=torch.int64, device=device)
    roots = torch.full((count,), VOCAB, device=device)
    accepted = []
    while bool((lengths < LENGTH).any()):
        # `verify_block` and `verify_traversal` need new draft seeds each step; "coupled" shares verification's.
        draft_seeds = seeds if law == "coupled" else seeds + 0x5851F42D4C957F2D * (lengths + 1)
        draft = grown(draft_table, roots, lengths, draft_seeds, law, branching, expand)
        said = None if params is None else options_of(tokens, lengths)
        verdict = verified(rule, law, target, draft, seeds, lengths, params or SamplingParams(), said)
        assert not verdict.status.any()
        steps = torch.arange(verdict.tokens.shape[1], device=device)
        emitted = steps <= verdict.num_accepted[:, None]
        accepted.append(float(verdict.num_accepted.float().mean()))
        places = (lengths[:, None] + steps).clamp(max=tokens.shape[1] - 1)
        rows = torch.arange(count, device=device)[:, None].expand_as(places)
        tokens[rows[emitted], places[emitted]] = verdict.tokens[emitted]
        # Finished sequences repeat their step, keeping the first LENGTH tokens.
        lengths = torch.where(lengths < LENGTH, lengths + verdict.num_accepted + 1, lengths)
        roots = tokens.gather(1, lengths[:, None] - 1)[:, 0]
    return tokens[:, :LENGTH].cpu(), float(np.mean(accepted))


def options_of(tokens: Tensor, lengths: Tensor) -> RequestOptions:
    """Counts the first `lengths` of each row's tokens."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    is_said = places < lengths[:, None]
    counts = torch.zeros(len(tokens), VOCAB, dtype=torch.int32, device=tokens.device)
    return RequestOptions(output_counts=counts.scatter_add_(1, tokens.clamp(min=0), is_said.int()))


def off_the_target(tokens: Tensor, model: str, params: SamplingParams | None = None) -> float:
    """Returns the tokens' chi-square less its mean, in standard deviations."""
    expected = np.ones([VOCAB] * LENGTH)
    for length in range(LENGTH):
        for prefix in np.ndindex(*[VOCAB] * length):
            row = TABLES[model][0][[prefix[-1] if prefix else VOCAB]].log()
            said = options_of(torch.tensor([[*prefix, -1]]), torch.tensor([length]))
            applied = reference.apply_options(row, params or SamplingParams(), said)[0]
            temperature = 1.0 if params is None else params.temperature
            p = reference.distribution(reference.clean_logits(applied), temperature)
            expected[prefix] *= p.reshape(VOCAB, *[1] * (LENGTH - length - 1))
    places = tokens @ VOCAB ** torch.arange(LENGTH - 1, -1, -1)
    return excess(np.bincount(places.numpy(), minlength=VOCAB**LENGTH), expected.flatten())
