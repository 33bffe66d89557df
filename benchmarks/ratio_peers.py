"""The ops that weigh the target against the drafts, beside the chain of torch ops and vLLM's sampler."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from suite import Mismatch, package
from torch import Tensor
from verify_peers import (
    ACCEPTED,
    Outcome,
    Problem,
    Rule,
    Verification,
    best_tokens,
    children_of,
    flashinfer_distribution,
    op_of,
    torch_distribution,
    values_at,
)

import pagedtree
from pagedtree import Verdict
from pagedtree.reference import acceptance

TOP_P = {"temperature": 0.8, "top_p": 0.9}


@dataclass
class DrawnProblem(Problem):
    """Drafts of two kinds, of which a rule accepts one at ACCEPTED of the nodes.

    drawn: independently, from row draft_rows[n] of draft_probs[i] at node n: the target's distribution p, mixed with
    one of other tokens. Each of c children is accepted with a probability a, whatever happened before, where 1 - (1 -
    a)^c = ACCEPTED. leading: the target's likeliest tokens, that many of which hold ACCEPTED of p.
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
        """Gives the leading tokens, one for each child, ACCEPTED of what top-p keeps."""
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
    """Random numbers are drawn, as in use; `injected` for the comparison."""

    def run(problem: DrawnProblem, i: int, injected: bool = False) -> Verdict:
        given: dict = {"coins": problem.coins, "final_coins": problem.final_coins} if injected else {}
        if law != "onehot":
            given |= {"draft_probs": problem.draft_probs[i], "draft_rows": problem.draft_rows}
        return op(
            problem.logits[i], problem.drafts[i], problem.trees, problem.sampling,
            draft_law=law, seeds=problem.seeds, positions=problem.positions, **given,
        )  # fmt: skip

    return run


def typical(problem: DrawnProblem, i: int, injected: bool = False) -> Verdict:
    return pagedtree.verify_typical(problem.logits[i], problem.drafts[i], problem.trees, problem.sampling)


# The chain of torch ops -----------------------------------------------------------------------------------------------


def first_above(distribution: Tensor, coin: Tensor) -> int:
    return int((distribution.double().cumsum(0) > coin * distribution.double().sum()).nonzero()[0])


def excess(p: Tensor, q: Tensor) -> tuple[Tensor, float]:
    """max(p - q, 0), normalised where it is not zero, and its sum."""
    rest = (p - q).clamp_(min=0)
    total = float(rest.sum())
    return rest / (total or 1.0), total


def distributions_at(problem: DrawnProblem, i: int, visited_only: bool) -> Callable[[list[int]], Tensor]:
    params = problem.params
    assert params is not None
    return values_at(problem, i, lambda logits: torch_distribution(logits, params), visited_only)


def torch_walks(
    problem: DrawnProblem, i: int, judge: Callable[..., tuple[int | None, Tensor]], visited_only: bool
) -> Outcome:
    """judge(p, node, children, drafts, row of the root) gives the accepted child, or None and what is left of p."""
    n, children, target = problem.tree.num_nodes, children_of(problem.tree), distributions_at(problem, i, visited_only)
    drafts = problem.drafts[i].view(-1, n).tolist()
    paths: list[list[int]] = [[0] for _ in range(problem.batch)]
    last = [0] * problem.batch
    walking = list(range(problem.batch))
    while walking:
        distributions = target([b * n + paths[b][-1] for b in walking])
        going, walking = walking, []
        for b, p in zip(going, distributions, strict=True):
            child, rest = judge(p, paths[b][-1], children[paths[b][-1]], drafts[b], b * n)
            if child is not None:
                paths[b].append(child)
                walking.append(b)
            else:
                last[b] = first_above(rest, problem.final_coins[b])
    return paths, [[*(drafts[b][node] for node in path[1:]), last[b]] for b, path in enumerate(paths)]


def torch_in_turn(problem: DrawnProblem, i: int, visited_only: bool = False) -> Outcome:
    def judge(p: Tensor, node: int, children: list[int], drafts: list[int], root: int) -> tuple[int | None, Tensor]:
        for child in children:
            q, x = problem.draft_probs[i][problem.draft_rows[root + node]], drafts[child]
            if problem.coins[root + child] * q[x] < p[x]:
                return child, p
            p, _ = excess(p, q)
        return None, p

    return torch_walks(problem, i, judge, visited_only)


def torch_exclusive(problem: DrawnProblem, i: int, visited_only: bool = False) -> Outcome:
    def judge(p: Tensor, node: int, children: list[int], drafts: list[int], root: int) -> tuple[int | None, Tensor]:
        tried = torch.zeros_like(p, dtype=torch.bool)
        for child in children:
            tried[drafts[child]] = True
            if p[drafts[child]] > 0 and p[tried].sum() > problem.coins[root + node]:
                return child, p
        return None, p.masked_fill(tried, 0)

    return torch_walks(problem, i, judge, visited_only)


def torch_block(problem: DrawnProblem, i: int) -> Outcome:
    assert problem.params is not None
    target, n = torch_distribution(problem.logits[i], problem.params), problem.tree.num_nodes
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


def torch_traversal(problem: DrawnProblem, i: int, visited_only: bool = False) -> Outcome:
    target, n, children = distributions_at(problem, i, visited_only), problem.tree.num_nodes, children_of(problem.tree)
    paths, tokens = [], []
    for b in range(problem.batch):
        drafts = problem.drafts[i][b * n : (b + 1) * n].tolist()

        def verify(node: int, weight: float, b: int = b, drafts: list[int] = drafts) -> tuple[list[int], Tensor] | None:
            row = b * n + node
            p = target([row])[0]
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


def torch_typical(problem: DrawnProblem, i: int, visited_only: bool = False) -> Outcome:
    """Level by level, from the accepted nodes that have children."""
    target, n, children = distributions_at(problem, i, visited_only), problem.tree.num_nodes, children_of(problem.tree)
    drafts = problem.drafts[i].tolist()
    accepted: list[dict[int, list[int]]] = [{0: [0]} for _ in range(problem.batch)]
    level = [(b, 0) for b in range(problem.batch)]
    while level := [(b, node) for b, node in level if children[node]]:
        distributions = target([b * n + node for b, node in level])
        bounds = (0.3 * (distributions * distributions.clamp(min=1e-30).log()).sum(1).exp()).clamp(max=0.09)
        reached = []
        for (b, node), distribution, bound in zip(level, distributions, bounds, strict=True):
            for child in children[node]:
                if distribution[drafts[b * n + child]] > bound:
                    accepted[b][child] = [*accepted[b][node], child]
                    reached.append((b, child))
        level = reached
    paths = [max((of[node] for node in sorted(of)), key=len) for of in accepted]
    best = target([b * n + path[-1] for b, path in enumerate(paths)]).argmax(1).tolist()
    return paths, [[*(drafts[b * n + node] for node in path[1:]), best[b]] for b, path in enumerate(paths)]


# vLLM and FlashInfer: chains ------------------------------------------------------------------------------------------


def repeated(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    x = x.repeat_interleave(counts, output_size=num_tokens)
    return x.masked_fill(x == replace_from, replace_to)


def refuse_unless_drawn_chain(verification: Verification) -> None:
    tree = verification.problem.tree
    if tree.num_nodes != tree.max_depth + 1 or verification.rule.variant != "iid":
        raise ValueError("chains whose drafts were drawn only")


class VllmRejection:
    """vLLM's rejection sampler: chains, token by token.

    vLLM 0.32.0's kernel that spreads the sampling parameters over the tokens leaves floats uninitialised on a CPU; a
    torch op stands in for it.
    """

    name = "vLLM"
    absent = staticmethod(package("vllm", "cpu"))

    def __init__(self, verification: Verification) -> None:
        from vllm.platforms import current_platform
        from vllm.v1.sample import rejection_sampler
        from vllm.v1.sample.sampler import Sampler

        self.problem, self.rule = verification.problem, verification.rule
        refuse_unless_drawn_chain(verification)
        current_platform.register_triton_kernel_overrides()
        rejection_sampler.expand_batch_to_tokens = repeated
        self.sampler = rejection_sampler.RejectionSampler(Sampler())
        self.prepare(verification.rule.params or {})

    def prepare(self, params: dict[str, float]) -> None:
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

        problem = self.problem
        batch, n = problem.batch, problem.tree.num_nodes
        nodes = torch.arange(batch * n).view(batch, n)
        rows = {"target_logits_indices": nodes[:, :-1].flatten(), "bonus_logits_indices": nodes[:, -1]}
        chains = [drafts.view(batch, n)[:, 1:].int().tolist() for drafts in problem.drafts]
        dummies = (SpecDecodeMetadata.make_dummy(chain, torch.device("cpu")) for chain in chains)
        self.metadata = [replace(dummy, **rows) for dummy in dummies]
        nothing = torch.zeros(0)
        self.sampling = SamplingMetadata(
            temperature=torch.full((batch,), params["temperature"]), all_greedy=False, all_random=True,
            top_p=torch.full((batch,), params["top_p"]), top_k=None, generators={}, max_num_logprobs=None,
            no_penalties=True, prompt_token_ids=None, frequency_penalties=nothing, presence_penalties=nothing,
            repetition_penalties=nothing, output_token_ids=[[] for _ in range(batch)], allowed_token_ids_mask=None,
            bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
        )  # fmt: skip

    def run(self, copy: int) -> Tensor:
        problem = self.problem
        # Its distributions have a row for each draft token.
        output = self.sampler(self.metadata[copy], problem.draft_probs[copy], problem.logits[copy], self.sampling)
        return output.sampled_token_ids

    def check(self) -> None:
        try:
            check_sure_tokens(self.problem, self.tokens, "vLLM's")
        finally:
            self.prepare(self.rule.params or {})

    def tokens(self) -> Tensor:
        self.prepare(self.problem.params or {})
        return self.run(0)


class FlashInferChain:
    """FlashInfer's verification of chains, from probabilities, which its softmax and filters make first."""

    name = "FlashInfer"
    absent = staticmethod(package("flashinfer", "cuda"))

    def __init__(self, verification: Verification) -> None:
        self.problem = verification.problem
        refuse_unless_drawn_chain(verification)
        self.verify = importlib.import_module("flashinfer").sampling.chain_speculative_sampling

    def run(self, copy: int) -> Tensor:
        problem, n = self.problem, self.problem.tree.num_nodes
        target = flashinfer_distribution(problem.logits[copy], problem.params or {}).view(problem.batch, n, -1)
        draft = problem.draft_probs[copy].view(problem.batch, n - 1, -1)
        return self.verify(draft, problem.drafts[copy].view(problem.batch, n)[:, 1:].int(), target)[0]

    def check(self) -> None:
        check_sure_tokens(self.problem, lambda: self.run(0), "FlashInfer's")


# Checks ---------------------------------------------------------------------------------------------------------------


def checked(run: Callable[..., Verdict], peer: Callable[..., Outcome]) -> Callable[[Problem], None]:
    """The same coins lead both the same way."""

    def check(problem: Problem) -> None:
        verdict = run(problem, 0, injected=True)
        for b, (path, tokens) in enumerate(zip(*peer(problem, 0), strict=True)):
            ours = verdict.accept_index[b, : len(path)].tolist(), verdict.tokens[b, : len(path)].tolist()
            if ours != (path, tokens) or int(verdict.num_accepted[b]) != len(path) - 1:
                raise Mismatch(f"tree {b}: the torch chain gives {path}, {tokens}; pagedtree {ours}")

    return check


def check_sure_tokens(problem: DrawnProblem, tokens: Callable[[], Tensor], whose: str) -> None:
    """A distribution of one token has one outcome, whatever the coins."""
    params = problem.params
    problem.params = {**(params or {}), "temperature": 1e-3}
    try:
        verdict, theirs = by_ratio(pagedtree.verify_rejection, "iid")(problem, 0), tokens()
    finally:
        problem.params = params
    if not torch.equal(verdict.tokens[:, : theirs.shape[1]], theirs.long()):
        raise Mismatch(f"{whose} tokens differ from pagedtree's")


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
OPS = [
    op_of(
        "verify_rejection",
        RULES,
        DrawnProblem,
        headline=({"tree": "chain 32"},),
        peers=(VllmRejection, FlashInferChain),
    ),
    op_of("verify_traversal", RULES, DrawnProblem),
    op_of("verify_typical", RULES, DrawnProblem),
    op_of(
        "verify_block",
        RULES,
        DrawnProblem,
        "chain 32",
        ("chain 5", "chain 64", "chain 256"),
        unsupported=lambda shape, device: None if shape["tree"].startswith("chain") else "it verifies chains",
    ),
]
