"""Ops that compare target and draft probabilities, against torch ops and FlashInfer."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from suite import Mismatch, Shape, Way, package, peer
from torch import Tensor
from verify_peers import (
    ACCEPTED,
    Outcome,
    Problem,
    Rule,
    Verification,
    best_tokens,
    check_outcome,
    children_of,
    op_of,
    torch_chain,
    torch_distribution,
    torch_walk,
)

import pagedtree
from pagedtree import Verdict
from pagedtree.reference import acceptance

TOP_P = {"temperature": 0.8, "top_p": 0.9}


@dataclass
class DrawnProblem(Problem):
    """Drafts of two kinds, of which a rule accepts one at ACCEPTED of the nodes.

    drawn: independently, at node n from row draft_rows[n] of draft_probs[i], a mixture of the target's distribution p
    and one of other tokens. Each of c children is accepted with a probability a, where 1 - (1 - a)^c = ACCEPTED.
    leading: the target's likeliest tokens, one per child, which hold ACCEPTED of p.
    """

    draft_probs: list[Tensor] = field(init=False)
    draft_rows: Tensor = field(init=False)

    def _make(self, generator: torch.Generator) -> None:
        self.leading: list[Tensor] = []
        self.num_children = torch.tensor([len(c) for c in children_of(self.tree)]).repeat(self.batch)
        super()._make(generator)
        nodes, parents = self.tree.num_nodes, torch.from_numpy(self.tree.parents).to(self.device).long()
        inner = torch.unique(parents[1:])
        self.draft_rows = torch.zeros(self.batch, nodes, dtype=torch.int64)
        self.draft_rows[:, inner] = torch.arange(self.batch * inner.numel()).view(self.batch, -1)
        rejected = (1 - ACCEPTED) ** (1 / self.num_children.view(self.batch, nodes)[:, inner].reshape(-1, 1))
        self.draft_probs, self.drawn = [], []
        for logits, unlikely in zip(self.logits, self.unlikely, strict=True):
            p = torch_distribution(logits.view(self.batch, nodes, -1)[:, inner].flatten(0, 1), TOP_P)
            q = rejected * p.roll(self.vocab // 2, dims=1) + (1 - rejected) * p
            self.draft_probs.append(q)
            rows = self.draft_rows[:, parents[1:]].flatten()
            self.drawn.append(unlikely.clone())
            tokens = torch.multinomial(q[rows], 1, generator=generator).view(self.batch, -1)
            self.drawn[-1].view(self.batch, nodes)[:, 1:] = tokens
        self.draft_rows = self.draft_rows.flatten()
        self.coins = torch.rand(self.rows, generator=generator)
        self.final_coins = torch.rand(self.batch, generator=generator)

    def _finish(self, logits: Tensor, hot: Tensor) -> None:
        """Raises leading tokens, one for each child, to ACCEPTED of top-p's mass."""
        ranks = torch.from_numpy(self.tree.child_ranks).to(self.device).long().repeat(self.batch).clamp(0, 39)
        self.leading.append(hot[self.parents.clamp(min=0), ranks])
        is_leading = torch.zeros_like(logits, dtype=torch.bool)
        is_leading.scatter_(1, hot, torch.arange(40) < self.num_children[:, None])
        scaled, mass = logits / TOP_P["temperature"], ACCEPTED * TOP_P["top_p"]
        now, rest = (scaled.masked_fill(mask, -torch.inf).logsumexp(1) for mask in (~is_leading, is_leading))
        raised = (math.log(mass / (1 - mass)) + rest - now) * TOP_P["temperature"]
        logits += torch.where(is_leading, raised[:, None], 0.0)

    def draft_for(self, rule: Rule) -> None:
        if rule.predicted is not None:
            super().draft_for(rule)
        else:
            self.drafts = self.leading if rule.variant == "onehot" else self.drawn


# pagedtree ------------------------------------------------------------------------------------------------------------


def by_ratio(op: Callable[..., Verdict], law: str) -> Callable[..., Verdict]:
    """injected: uses the comparison's random numbers."""

    def run(problem: DrawnProblem, i: int, injected: bool = False) -> Verdict:
        given: dict = {"coins": problem.coins, "final_coins": problem.final_coins} if injected else {}
        if law != "onehot":
            given |= {"draft_probs": problem.draft_probs[i], "draft_rows": problem.draft_rows}
        given |= {"draft_law": law, "seeds": problem.seeds, "positions": problem.positions}
        return op(problem.logits[i], problem.drafts[i], problem.trees, problem.sampling, **given)

    return run


def typical(problem: DrawnProblem, i: int, injected: bool = False) -> Verdict:
    return pagedtree.verify_typical(problem.logits[i], problem.drafts[i], problem.trees, problem.sampling)


# The chain of torch ops -----------------------------------------------------------------------------------------------


def first_above(distribution: Tensor, coin: Tensor) -> int:
    return int((distribution.double().cumsum(0) > coin * distribution.double().sum()).nonzero()[0])


def excess(p: Tensor, q: Tensor) -> tuple[Tensor, float]:
    """Returns max(p - q, 0), normalised unless zero, and its sum."""
    rest = (p - q).clamp_(min=0)
    total = float(rest.sum())
    return rest / (total or 1.0), total


def distributions(problem: DrawnProblem, i: int, rows: list[int] | slice) -> Tensor:
    assert problem.params is not None
    return torch_distribution(problem.logits[i][rows], problem.params)


def torch_judged(problem: DrawnProblem, i: int, judge: Callable[..., tuple[int | None, Tensor]]) -> Outcome:
    """judge(p, node, children, drafts, row of the root) returns the accepted child, or None and the residual of p."""

    def last_token(p: Tensor, b: int, node: int, children: list[int], drafts: list[int]) -> tuple[int | None, int]:
        child, rest = judge(p, node, children, drafts, b * problem.tree.num_nodes)
        return child, first_above(rest, problem.final_coins[b]) if child is None else -1

    return torch_walk(problem, i, lambda rows: distributions(problem, i, rows), last_token)


def torch_in_turn(problem: DrawnProblem, i: int) -> Outcome:
    def judge(p: Tensor, node: int, children: list[int], drafts: list[int], root: int) -> tuple[int | None, Tensor]:
        for child in children:
            q, x = problem.draft_probs[i][problem.draft_rows[root + node]], drafts[child]
            if problem.coins[root + child] * q[x] < p[x]:
                return child, p
            p, _ = excess(p, q)
        return None, p

    return torch_judged(problem, i, judge)


def torch_exclusive(problem: DrawnProblem, i: int) -> Outcome:
    def judge(p: Tensor, node: int, children: list[int], drafts: list[int], root: int) -> tuple[int | None, Tensor]:
        tried = torch.zeros_like(p, dtype=torch.bool)
        for child in children:
            tried[drafts[child]] = True
            if p[drafts[child]] > 0 and p[tried].sum() > problem.coins[root + node]:
                return child, p
        return None, p.masked_fill(tried, 0)

    return torch_judged(problem, i, judge)


def torch_block(problem: DrawnProblem, i: int) -> Outcome:
    target, n = distributions(problem, i, slice(None)), problem.tree.num_nodes
    paths, tokens = [], []
    for b in range(problem.batch):
        drafts = problem.drafts[i][b * n : (b + 1) * n].tolist()
        weight, accepted, left = 1.0, 0, target[b * n]
        for node in range(n):
            p = target[b * n + node]
            q = problem.draft_probs[i][problem.draft_rows[b * n + node]] if node + 1 < n else p.new_zeros(1)
            rest, z = excess(weight * p, q)
            h = acceptance(z, weight) if node + 1 < n else weight
            if node == 0 or problem.coins[b * n + node] < h:
                accepted, left = node, rest
            if node + 1 < n:
                x = drafts[node + 1]
                weight = min(1.0, weight * float(p[x]) / float(q[x]))
        paths.append([*range(accepted + 1)])
        tokens.append([*drafts[1 : accepted + 1], first_above(left, problem.final_coins[b])])
    return paths, tokens


def torch_traversal(problem: DrawnProblem, i: int) -> Outcome:
    target, n, children = distributions(problem, i, slice(None)), problem.tree.num_nodes, children_of(problem.tree)
    paths, tokens = [], []
    for b in range(problem.batch):
        drafts = problem.drafts[i][b * n : (b + 1) * n].tolist()

        def verify(node: int, weight: float, b: int = b, drafts: list[int] = drafts) -> tuple[list[int], Tensor] | None:
            row = b * n + node
            p = target[row]
            for child in children[node]:
                q, x = problem.draft_probs[i][problem.draft_rows[row]], drafts[child]
                found = verify(child, min(1.0, weight * float(p[x]) / float(q[x])))
                if found is not None:
                    return [node, *found[0]], found[1]
                p, z = excess(weight * p, q)
                weight = acceptance(z, weight) if node else 1.0
            return ([node], p) if node == 0 or problem.coins[row] < weight else None

        found = verify(0, 1.0)
        assert found is not None
        paths.append(found[0])
        tokens.append([*(drafts[node] for node in found[0][1:]), first_above(found[1], problem.final_coins[b])])
    return paths, tokens


def torch_typical(problem: DrawnProblem, i: int) -> Outcome:
    n, children = problem.tree.num_nodes, children_of(problem.tree)
    drafts = problem.drafts[i].tolist()
    accepted: list[dict[int, list[int]]] = [{0: [0]} for _ in range(problem.batch)]
    level = [(b, 0) for b in range(problem.batch)]
    while level := [(b, node) for b, node in level if children[node]]:
        found = distributions(problem, i, [b * n + node for b, node in level])
        bounds = (0.3 * (found * found.clamp(min=1e-30).log()).sum(1).exp()).clamp(max=0.09)
        reached = []
        for (b, node), distribution, bound in zip(level, found, bounds, strict=True):
            for child in children[node]:
                if distribution[drafts[b * n + child]] > bound:
                    accepted[b][child] = [*accepted[b][node], child]
                    reached.append((b, child))
        level = reached
    paths = [max((of[node] for node in sorted(of)), key=len) for of in accepted]
    best = distributions(problem, i, [b * n + path[-1] for b, path in enumerate(paths)]).argmax(1).tolist()
    return paths, [[*(drafts[b * n + node] for node in path[1:]), best[b]] for b, path in enumerate(paths)]


# FlashInfer: chains ---------------------------------------------------------------------------------------------------


@peer("FlashInfer", when=package("flashinfer", "cuda"))
def flashinfer_chain(verification: Verification) -> Way:
    """Verification follows FlashInfer's softmax and filters."""
    problem, n = verification.problem, verification.problem.tree.num_nodes
    if n != problem.tree.max_depth + 1 or verification.rule.variant != "iid":
        raise ValueError("chains whose drafts were drawn only")
    sampling = importlib.import_module("flashinfer").sampling

    def distribution(logits: Tensor) -> Tensor:
        params = problem.params or {}
        probs = sampling.softmax(logits, temperature=params.get("temperature", 1.0))
        if params.get("top_k", 0):
            probs = sampling.top_k_renorm_probs(probs, params["top_k"])
        return sampling.top_p_renorm_probs(probs, params["top_p"]) if params.get("top_p", 1.0) < 1 else probs

    def run(copy: int) -> Tensor:
        target = distribution(problem.logits[copy]).view(problem.batch, n, -1)
        draft = problem.draft_probs[copy].view(problem.batch, n - 1, -1)
        drafts = problem.drafts[copy].view(problem.batch, n)[:, 1:].int()
        return sampling.chain_speculative_sampling(draft, drafts, target)[0]

    def check() -> None:
        with problem.sure():
            verdict, tokens = by_ratio(pagedtree.verify_rejection, "iid")(problem, 0), run(0)
        if not torch.equal(verdict.tokens[:, : tokens.shape[1]], tokens.long()):
            raise Mismatch("FlashInfer's tokens differ from pagedtree's")

    return Way(run, check=check)


# Checks ---------------------------------------------------------------------------------------------------------------


def checked(run: Callable[..., Verdict], peer: Callable[..., Outcome]) -> Callable[[Problem], None]:
    """Equal coins have equal outcomes."""
    return lambda problem: check_outcome(run(problem, 0, injected=True), peer(problem, 0))


def rule(op: Callable[..., Verdict], law: str, peer: Callable[..., Outcome], **others: Any) -> Rule:
    run = typical if op is pagedtree.verify_typical else by_ratio(op, law)
    return Rule(op.__name__, law, TOP_P, run, peer, checked(run, peer), **others)


RULES = [
    rule(pagedtree.verify_rejection, "iid", torch_in_turn),
    rule(pagedtree.verify_rejection, "onehot", torch_exclusive),
    rule(pagedtree.verify_traversal, "iid", torch_traversal),
    rule(pagedtree.verify_typical, "top-p 0.9", torch_typical, predicted=best_tokens),
    rule(pagedtree.verify_block, "iid", torch_block, visits=False),
]
CHAINS = ("chain 5", "chain 64", "chain 256")


def unless_chain(shape: Shape, device: torch.device) -> str | None:
    return None if shape["tree"].startswith("chain") else "it verifies chains"


OPS = [
    op_of("verify_rejection", RULES, DrawnProblem, headline=({"tree": "chain 32"},), peers=(flashinfer_chain,)),
    op_of("verify_traversal", RULES, DrawnProblem, chain=torch_chain),
    op_of("verify_typical", RULES, DrawnProblem),
    op_of("verify_block", RULES, DrawnProblem, "chain 32", CHAINS, chain=torch_chain, unsupported=unless_chain),
]
