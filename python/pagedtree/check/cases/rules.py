"""verify_rejection, verify_block, verify_traversal, verify_typical."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedtree import SamplingParams, reference, verify_block, verify_rejection, verify_traversal, verify_typical
from pagedtree.check.case import Case, Place, Results
from pagedtree.check.cases.inputs import float32, normal, seeded, streams_of, uniform
from pagedtree.check.cases.verification import (
    SAMPLINGS,
    Problem,
    Sampling,
    Tree,
    engine,
    forest,
    limited,
    problem_of,
    sampling_of,
    tensors_of,
    verdict_by_loops,
    with_draft_vocabulary,
)

RULES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "verify_rejection": (verify_rejection, reference.rejection, ("iid", "swor", "onehot")),
    "verify_block": (verify_block, reference.block, ("onehot", "iid")),
    "verify_traversal": (verify_traversal, reference.traversal, ("iid", "swor")),
}
CHAINS = [[-1, 0, 1, 2, 3], [-1, 0, 1, 2], [-1, 0, 1], [-1], [-1, 0]]


def cases() -> Iterator[Case]:
    for op, (_, _, draft_laws) in RULES.items():
        chains = op == "verify_block"
        for draft_law in draft_laws:
            # Block and traversal also read rows off the path, and only they know which.
            for name, problem in _problems(chains, forbidden_row=4 if op == "verify_rejection" else -1).items():
                yield _rule(op, f"{draft_law}/{name}", problem, SAMPLINGS["plain"], draft_law)
            problem = _trees(chains, 40, dtype="fp32")
            for sampling in ("cool", "all filters"):
                yield _rule(op, f"{draft_law}/{sampling}", problem, SAMPLINGS[sampling], draft_law)
            yield _rule(op, f"{draft_law}/parameters per sequence", problem, tensors_of(problem.batch), draft_law)
            yield _rule(op, f"{draft_law}/its own coins", problem, SAMPLINGS["plain"], draft_law, own_coins=True)
            even = _even_problem(chains)
            yield _rule(op, f"{draft_law}/coins on their bounds", even, SAMPLINGS["plain"], draft_law, even=True)
            if draft_law != "onehot":
                for order in ("top_k_first", "joint"):
                    draft_params = {"temperature": 1.5, "top_k": 5, "top_p": 0.6, "min_p": 0.02, "filter_order": order}
                    name = f"{draft_law}/draft logits/{order}"
                    yield _rule(op, name, _trees(chains, 33), SAMPLINGS["cool"], draft_law, draft_params=draft_params)
            yield _rule(op, f"{draft_law}/V 5003", _trees(chains, 5003), SAMPLINGS["plain"], draft_law)
            for dtype, vocab in (("fp32", 1), ("fp16", 6), ("bf16", 1025), ("fp16", 40_000)):
                hostile = _trees(chains, vocab, dtype=dtype, hostile=True)
                name = f"{draft_law}/hostile rows/V {vocab}"
                yield _rule(op, name, hostile, SAMPLINGS["all filters"], draft_law, own_coins=True, loops=False)
            for i, dtype in enumerate(("fp32", "fp16", "bf16")):
                problem = _trees(chains, 40, dtype=dtype, masked=i > 0, forbidden_row=-1)
                name = f"{draft_law}/on chip/{dtype}"
                params = {"top_p": 0.9} if i == 1 and draft_law != "onehot" else None
                yield _rule(op, name, problem, SAMPLINGS["all filters"], draft_law, draft_params=params, on_chip=True)
            hostile = _trees(chains, 33_000, hostile=True)
            name = f"{draft_law}/on chip/hostile rows/V 33000"
            yield _rule(op, name, hostile, SAMPLINGS["top-p"], draft_law, own_coins=True, loops=False, on_chip=True)
    hostile, name = forest("", 60, 40, nodes=7, hostile=True), "swor/on chip/hostile rows, opened again"
    narrow = SAMPLINGS["narrow top-p"]
    yield _rule("verify_traversal", name, hostile, narrow, "swor", own_coins=True, loops=False, on_chip=True)
    for dtype in ("fp32", "fp16", "bf16"):
        yield _typical(f"on chip/{dtype}", _trees(False, 40, dtype=dtype), SAMPLINGS["all filters"], on_chip=True)
    for name, problem in _problems(False, forbidden_row=-1).items():
        for sampling in ("plain", "greedy", "all filters"):
            yield _typical(f"{name}/{sampling}", problem, SAMPLINGS[sampling])
    for epsilon, delta in ((0.5, 0.1), (0.01, 5.0), (0.0, 0.3), (1.0, 0.0)):
        yield _typical(f"epsilon {epsilon}, delta {delta}", _trees(False, 40), SAMPLINGS["cool"], epsilon, delta)
    yield _typical("drafts on the bound", _even_problem(False), SAMPLINGS["plain"], 0.25, 5.0)
    for vocab in (40, 40_000):
        hostile = forest("", 12, vocab, nodes=7, hostile=True)
        yield _typical(f"hostile rows/V {vocab}", hostile, SAMPLINGS["plain"], loops=False)


@lru_cache
def _trees(chains: bool, vocab: int, **options: Any) -> Problem:
    if chains:
        return problem_of("", CHAINS * 3, vocab, seed=3, **options)
    return forest("", 12, vocab, nodes=7, **options)


@lru_cache
def _problems(chains: bool, forbidden_row: int) -> dict[str, Problem]:
    masked = {"masked": True, "forbidden_row": forbidden_row}
    problems = {f"{dtype}/V 40": _trees(chains, 40, dtype=dtype) for dtype in ("fp32", "fp16", "bf16")} | {
        "one token": _trees(chains, 1),
        "grammar mask": _trees(chains, 33, **masked),
        "packed grammar mask": _trees(chains, 33, packed=True, **masked),
        "draft vocabulary": with_draft_vocabulary(_trees(chains, 33)),
        "tokens left": limited(_trees(chains, 33)),
        "no sequence": problem_of("", []),
        "padding rows, a tree of no nodes": problem_of("", [[-1], [], [-1, 0, 1]], padding=3),
        "chain of 1024": problem_of("", [list(range(-1, 1023))], 3),
    }
    if not chains:
        bad = [[-1, 0, 5, 1], [-1, 0, -1], [3, 0, 1], [-1, 0, 1, 2, 3]]
        problems["malformed"] = problem_of("", bad, max_nodes=4, max_depth=2)
        problems["200 children"] = problem_of("", [[-1] + [0] * 200], 17)
    return problems


def _even_problem(chains: bool) -> Problem:
    """Probabilities are powers of 2, which no sum or product rounds, and most drafts likely."""
    problem = problem_of("", CHAINS * 10, 8, "fp32") if chains else forest("", 60, 8, "fp32", nodes=7)
    rows = problem.logits.shape[0]
    return replace(problem, logits=_even(rows, 1).log(), drafts=(uniform(rows, seed=4) ** 3 * 8).long())


def _even(rows: int, seed: int) -> Tensor:
    """Returns [rows, 8], each row uniform over its first 1, 2, 4 or 8 tokens."""
    count = 2 ** torch.randint(4, (rows, 1), generator=seeded(seed), dtype=torch.int64)
    return (torch.arange(8, dtype=torch.int64) < count).float() / count


def _draft_probs(problem: Problem, seed: int) -> Tensor:
    """Returns [N, V]: near the target's distribution, with entries that do not count as probabilities."""
    logits = problem.logits.float().nan_to_num(0, 60, -60)
    probs = (logits + normal(*logits.shape, seed=seed)).softmax(-1)
    if problem.logits.shape[1] > 5 and problem.logits.dtype != torch.float32:
        probs[::4, 1], probs[1::4, 2], probs[2::4, 3], probs[3::4, 4] = 0.0, math.nan, -0.5, math.inf
    return probs


def _rule(
    op: str,
    name: str,
    problem: Problem,
    sampling: Sampling,
    draft_law: str,
    *,
    own_coins: bool = False,
    loops: bool = True,
    even: bool = False,
    draft_params: Sampling | None = None,
    on_chip: bool = False,
) -> Case:
    """own_coins: the op draws its coins from seeds and positions; else the coins are given.

    even: the problem is `_even_problem`, with drafts and coins that put many coins on their very bounds.
    """
    function, rule, _ = RULES[op]
    rows = problem.logits.shape[0]
    base_probs = _even(rows, 5) if even else _draft_probs(problem, 5)
    probs = base_probs if draft_params is None else base_probs.nan_to_num(0.1).clamp(min=1e-6).log()
    probs = probs.to(problem.logits.dtype)
    order = torch.randperm(rows, generator=seeded(6))  # row draft_rows[n] of draft_probs belongs to node n
    draft_rows = order.clone()
    if even:
        draft_rows[::9], draft_rows[4::9] = -1, 2**32  # no row, so a distribution without mass
    if draft_law == "swor" and not even:
        draft_rows = draft_rows.int()
    strided = torch.full((rows, probs.shape[1] + 5), math.nan, dtype=probs.dtype)[:, 2:-3].copy_(probs[order.argsort()])
    if on_chip:
        strided = strided.contiguous()
    streams = streams_of(problem.batch)
    if own_coins and draft_law == "swor":
        streams["positions"] = (streams["positions"] >> 32).int()
    given_coins = uniform(rows, seed=7)
    if even:
        given_coins = float32([0.0, 0.125, 0.25, 0.5])[(given_coins * 4).long()]
    coins = {"coins": given_coins, "final_coins": uniform(problem.batch, seed=8)}
    drafts = {} if draft_law == "onehot" else {"draft_probs": strided, "draft_rows": draft_rows}

    def run(place: Place) -> Results:
        arguments, options = problem.place(place)
        keywords = place.put({**streams, **drafts, **({} if own_coins else coins)})
        if draft_params is not None:
            keywords["draft_params"] = SamplingParams(**draft_params)
        params = SamplingParams(**place.put(sampling))
        with engine(place, on_chip):
            return function(*arguments, params, draft_law=draft_law, **keywords, **options)._asdict()

    def decide(b: int, tree: Tree) -> tuple[Sequence[int], list[int]]:
        op_coins = OwnCoins(op, draft_law, tree, int(streams["seeds"][b]), int(streams["positions"][b]))
        p: list[list[Any]] = [reference.distribution(row, **sampling_of(sampling, b)).tolist() for row in tree.rows]
        q: list[list[Any]] = [_draft_distribution(probs[tree.begin + i], draft_params) for i in range(len(p))]
        if even:
            q = [row if draft_rows[tree.begin + i] in order else [0.0] * 8 for i, row in enumerate(q)]
            p, q = ([[Fraction(mass) for mass in row] for row in rows] for rows in (p, q))

        def below(entry: int, bound: float) -> bool:
            return (op_coins.coin(entry) if own_coins else float(given_coins[tree.begin + entry])) < bound

        path, bonus = rule(tree.parents, tree.drafts, p, q, draft_law, below)
        final = op_coins.final(path[-1]) if own_coins else float(coins["final_coins"][b])
        return path, [*(tree.drafts[node] for node in path[1:]), first_above(bonus, final)]

    by_loops = (lambda: verdict_by_loops(problem, decide)) if loops else None
    return Case(f"{op}/{name}", (op,), run, by_loops, backends=("simt", "cuda") if on_chip else None)


class OwnCoins:
    """The coins of one tree: Philox of the seed, a position and an index."""

    COIN, FINAL = 1, 2  # uses

    def __init__(self, op: str, draft_law: str, tree: Tree, seed: int, position: int) -> None:
        self.by_node = op != "verify_rejection"
        self.draft_law, self.tree, self.seed, self.position = draft_law, tree, seed, position

    def coin(self, entry: int) -> float:
        tree = self.tree
        if self.by_node:
            return self._uniform(0, entry, self.COIN)
        if self.draft_law == "onehot":
            return self._uniform(tree.depths[entry], 0, self.COIN)
        rank = sum(parent == tree.parents[entry] for parent in tree.parents[:entry])
        return self._uniform(tree.depths[entry] - 1, rank, self.COIN)

    def final(self, node: int) -> float:
        return self._uniform(self.tree.depths[node], 0, self.FINAL)

    def _uniform(self, depth: int, index: int, use: int) -> float:
        high, low = (
            int(word) for word in reference.random_words(self.seed, self.position + depth, index + 1, use)[index, :2]
        )
        return ((high << 32 | low) >> 11) * 2.0**-53


def _draft_distribution(row: Tensor, params: Sampling | None) -> list[float]:
    if params is not None:
        return [*reference.distribution(reference.clean_logits(row), **params)]
    return [value if 0 < value < math.inf else 0.0 for value in row.double().tolist()]


def first_above(weights: Sequence[float], coin: float) -> int:
    """Returns the first token with cdf > coin."""
    cdf = np.cumsum(np.array(weights, dtype=np.float64))
    return int(np.searchsorted(cdf, coin * cdf[-1], side="right"))


def _typical(
    name: str, problem: Problem, sampling: Sampling, epsilon: float = 0.05, delta: float = 0.2, *, loops: bool = True,
    on_chip: bool = False,
) -> Case:  # fmt: skip
    def run(place: Place) -> Results:
        arguments, options = problem.place(place)
        params = SamplingParams(**place.put(sampling))
        with engine(place, on_chip):
            return verify_typical(*arguments, params, epsilon=epsilon, delta=delta, **options)._asdict()

    def decide(b: int, tree: Tree) -> tuple[list[int], list[int]]:
        p = np.array([reference.distribution(row, **sampling) for row in tree.rows])
        path = reference.typical(tree.parents, tree.drafts, p, epsilon, delta)
        return path, [*(tree.drafts[node] for node in path[1:]), int(p[path[-1]].argmax())]

    return Case(
        f"verify_typical/{name}", ("verify_typical",), run,
        (lambda: verdict_by_loops(problem, decide)) if loops else None, backends=("simt", "cuda") if on_chip else None,
    )  # fmt: skip
