"""verify_rejection, verify_block, verify_traversal, verify_typical."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedtree import (
    SamplingParams,
    reference,
    verify_block,
    verify_rejection,
    verify_traversal,
    verify_typical,
)
from pagedtree.check.case import Case, Place, Results
from pagedtree.check.cases.inputs import seeded, words64
from pagedtree.check.cases.verification import (
    LAWS,
    Law,
    Problem,
    Tree,
    forest,
    law_of,
    problem_of,
    tensors_of,
    verdict_by_loops,
    verdict_results,
)

RULES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "verify_rejection": (verify_rejection, reference.rejection, ("iid", "swor", "onehot")),
    "verify_block": (verify_block, reference.block, ("iid", "onehot")),
    "verify_traversal": (verify_traversal, reference.traversal, ("iid", "swor")),
}
CHAINS = [[-1, 0, 1, 2, 3], [-1, 0, 1, 2], [-1, 0, 1], [-1], [-1, 0]]


def cases() -> Iterator[Case]:
    for op, (_, _, draft_laws) in RULES.items():
        chains = op == "verify_block"
        for draft_law in draft_laws:
            # Block and traversal also read rows off the path: which ones, only they know.
            for name, problem in _problems(chains, forbidden_row=4 if op == "verify_rejection" else -1):
                yield _rule(op, f"{draft_law}/{name}", problem, LAWS["plain"], draft_law)
            problem = _trees(chains, 40, dtype="fp32")
            for law in ("cool", "all filters"):
                yield _rule(op, f"{draft_law}/{law}", problem, LAWS[law], draft_law)
            yield _rule(op, f"{draft_law}/parameters a sequence", problem, tensors_of(problem.batch), draft_law)
            for dtype, vocab in (("fp32", 1), ("fp16", 6), ("bf16", 1025), ("fp16", 40_001)):
                hostile = _trees(chains, vocab, dtype=dtype, hostile=True)
                yield _rule(
                    op, f"{draft_law}/hostile rows/V {vocab}", hostile, LAWS["all filters"], draft_law, loops=False
                )
            if draft_law != "onehot":
                yield _rule(op, f"{draft_law}/draft logits", _trees(chains, 33), LAWS["cool"], draft_law, loops=False,
                            draft_params=LAWS["top-p"])  # fmt: skip
    for name, problem in _problems(False, forbidden_row=-1):
        for law in ("plain", "greedy", "all filters"):
            yield _typical(f"{name}/{law}", problem, LAWS[law])
    yield _typical("hostile rows", forest("", 12, hostile=True), LAWS["plain"], loops=False)


def _trees(chains: bool, vocab: int, **options: Any) -> Problem:
    if chains:
        return problem_of("", CHAINS * 3, vocab, seed=3, **options)
    return forest("", 12, vocab, nodes=7, **options)


def _problems(chains: bool, forbidden_row: int) -> Iterator[tuple[str, Problem]]:
    for dtype in ("fp32", "fp16", "bf16"):
        yield f"{dtype}/V 40", _trees(chains, 40, dtype=dtype)
    yield "one token", _trees(chains, 1)
    masked = {"masked": True, "forbidden_row": forbidden_row}
    yield "grammar mask", _trees(chains, 33, **masked)
    yield "packed grammar mask", _trees(chains, 33, packed=True, **masked)
    yield "no sequence", problem_of("", [])
    yield "padding rows, a tree of no nodes", problem_of("", [[-1], [], [-1, 0, 1]], padding=3)
    if not chains:
        bad = [[-1, 0, 5, 1], [-1, 0, -1], [3, 0, 1], [-1, 0, 1, 2, 3]]
        yield "malformed", problem_of("", bad, max_nodes=4, max_depth=2)
        yield "200 children", problem_of("", [[-1] + [0] * 200], 17)
    yield "chain of 1000", problem_of("", [list(range(-1, 999))], 3)


def _draft_probs(problem: Problem, seed: int) -> Tensor:
    """[N, V]: near the target's law, with entries that do not count as probabilities."""
    logits = problem.logits.float().nan_to_num(0, 60, -60)
    near = (logits + torch.randn(logits.shape, generator=seeded(seed))).softmax(-1)
    if problem.logits.shape[1] > 5 and problem.logits.dtype != torch.float32:
        near[::4, 1], near[1::4, 2], near[2::4, 3] = 0.0, math.nan, -0.5
    return near


def _rule(
    op: str, name: str, problem: Problem, law: Law, draft_law: str, *, loops: bool = True,
    draft_params: Law | None = None,
) -> Case:  # fmt: skip
    """With loops the coins are given, so that every decision is known; without them they are the op's own."""
    function, rule, _ = RULES[op]
    rows = problem.logits.shape[0]
    near = _draft_probs(problem, 5)
    probs = near if draft_params is None else near.nan_to_num(0.1).clamp(min=1e-6).log()
    probs = probs.to(problem.logits.dtype)
    order = torch.randperm(rows, generator=seeded(6))  # row draft_rows[n] of draft_probs belongs to node n
    streams = {"seeds": words64(problem.batch), "positions": words64(problem.batch, 1) >> 2}
    coins = {
        "coins": torch.rand(rows, generator=seeded(7)),
        "final_coins": torch.rand(problem.batch, generator=seeded(8)),
    }
    drafts = {} if draft_law == "onehot" else {"draft_probs": probs[order.argsort()], "draft_rows": order}

    def run(place: Place) -> Results:
        arguments, options = problem.place(place)
        given = place.put({**streams, **drafts, **(coins if loops else {})})
        if draft_params is not None:
            given["draft_params"] = SamplingParams(**draft_params)
        params = SamplingParams(**place.put(law))
        return verdict_results(function(*arguments, params, draft_law=draft_law, **given, **options))

    def decide(b: int, tree: Tree) -> tuple[Sequence[int], list[int]]:
        p = [reference.law(row, **law_of(law, b)).tolist() for row in tree.rows]
        q = [_probabilities(probs[tree.begin + i]) for i in range(len(p))]
        path, bonus = rule(
            tree.parents, tree.drafts, p, q, draft_law, lambda entry, bound: coins["coins"][tree.begin + entry] < bound
        )
        final = first_above(bonus, float(coins["final_coins"][b]))
        return path, [*(tree.drafts[node] for node in path[1:]), final]

    return Case(f"{op}/{name}", (op,), run, (lambda: verdict_by_loops(problem, decide)) if loops else None)


def _probabilities(row: Tensor) -> list[float]:
    values: list[float] = row.double().tolist()
    return [value if 0 < value < math.inf else 0.0 for value in values]


def first_above(weights: Sequence[float], coin: float) -> int:
    """The first token with cdf > coin."""
    cdf = np.cumsum(np.array(weights, dtype=np.float64))
    return int(np.searchsorted(cdf, coin * cdf[-1], side="right"))


def _typical(name: str, problem: Problem, law: Law, *, loops: bool = True) -> Case:
    epsilon, delta = 0.05, 0.2

    def run(place: Place) -> Results:
        arguments, options = problem.place(place)
        params = SamplingParams(**place.put(law))
        return verdict_results(verify_typical(*arguments, params, epsilon=epsilon, delta=delta, **options))

    def decide(b: int, tree: Tree) -> tuple[list[int], list[int]]:
        p = np.array([reference.law(row, **law) for row in tree.rows])
        path = reference.typical(tree.parents, tree.drafts, p, epsilon, delta)
        return path, [*(tree.drafts[node] for node in path[1:]), int(p[path[-1]].argmax())]

    return Case(
        f"verify_typical/{name}", ("verify_typical",), run,
        (lambda: verdict_by_loops(problem, decide)) if loops else None,
    )  # fmt: skip
