"""One verification step, and the ways to do it: ours, and the chain of torch ops that engines use without a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import pagedtree
from pagedtree import DraftTree, SamplingParams, TreeBatch, Verdict


@dataclass(frozen=True)
class Rule:
    """What is measured: `run` verifies copy i of a problem; `peers` are other ways to the same law.

    params: keyword arguments of SamplingParams; None = greedy.
    problem: what is verified, over chains or over balanced trees.
    peers: name -> function(problem, i); `check` compares what it gives with ours, once, before anything is timed.
    """

    name: str
    params: dict[str, Any] | None
    run: Callable[..., object]
    peers: dict[str, Callable[..., object]]
    check: Callable[..., None]
    problem: type[Problem]
    is_chain: bool = False


@dataclass
class Problem:
    """`copies` sets of logits [B * nodes, V] for B trees of the same shape; half of the drafts follow the target."""

    batch: int
    tree: DraftTree
    vocab: int
    dtype: torch.dtype
    copies: int
    params: dict[str, Any] | None
    trees: TreeBatch = field(init=False)
    logits: list[Tensor] = field(init=False)
    drafts: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.trees = TreeBatch.from_trees([self.tree] * self.batch)
        rows = self.batch * self.tree.num_nodes
        parents = torch.from_numpy(self.tree.parents).long().repeat(self.batch)
        parents += torch.arange(self.batch).repeat_interleave(self.tree.num_nodes) * self.tree.num_nodes
        self.logits, self.drafts = [], []
        for _ in range(self.copies):
            # Peaked as a language model's: a few tokens hold most of the mass.
            logits = torch.randn(rows, self.vocab, generator=generator)
            hot = torch.randint(0, self.vocab, (rows, 40), generator=generator)
            logits.scatter_(1, hot, 14 - torch.arange(40) * 0.25 + torch.zeros(rows, 40))
            best = logits.argmax(1)
            follow = torch.rand(rows, generator=generator) < 0.5
            self.drafts.append(torch.where(follow, best[parents.clamp(min=0)], hot[:, 7]))
            self.logits.append(logits.to(self.dtype))
        self.seeds = torch.arange(self.batch)
        self.positions = torch.zeros(self.batch, dtype=torch.int64)

    @property
    def rows(self) -> int:
        return self.batch * self.tree.num_nodes

    @property
    def logit_bytes(self) -> int:
        return self.logits[0].numel() * self.logits[0].element_size()

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**(self.params or {"temperature": 0.0}))


# pagedtree ------------------------------------------------------------------------------------------------------------


def greedy(problem: Problem, i: int) -> Verdict:
    return pagedtree.verify_greedy(problem.logits[i], problem.drafts[i], problem.trees)


def sampled(problem: Problem, i: int) -> Verdict:
    return pagedtree.verify_sampled(
        problem.logits[i], problem.drafts[i], problem.trees, problem.sampling,
        seeds=problem.seeds, positions=problem.positions,
    )  # fmt: skip


def sample_rows(problem: Problem, i: int) -> Tensor:
    """Every row, as an engine without drafts would at this many sequences."""
    rows = torch.arange(problem.rows)
    return pagedtree.sample(problem.logits[i], problem.sampling, seeds=rows, positions=rows)


# The chain of torch ops -----------------------------------------------------------------------------------------------


def torch_law(logits: Tensor, params: dict[str, Any]) -> Tensor:
    """Probabilities [N, V] after temperature, top-k and top-p, renormalised."""
    logits = logits.float() / params.get("temperature", 1.0)
    top_k, top_p = params.get("top_k", 0), params.get("top_p", 1.0)
    if top_k:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probs = logits.softmax(1)
    if top_p < 1:
        ordered, ids = probs.sort(dim=1, descending=True, stable=True)
        ordered[ordered.cumsum(1) - ordered >= top_p] = 0
        probs = torch.zeros_like(probs).scatter_(1, ids, ordered)
        probs /= probs.sum(1, keepdim=True)
    return probs


def children_of(tree: DraftTree) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
    for node, parent in enumerate(tree.parents.tolist()):
        if parent >= 0:
            children[parent].append(node)
    return children


def torch_walk(problem: Problem, i: int, targets: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """The accepted path and its tokens, a tree at a time, on the host."""
    n, children = problem.tree.num_nodes, children_of(problem.tree)
    targets_of, drafts_of = targets.view(-1, n).tolist(), problem.drafts[i].view(-1, n).tolist()
    paths, tokens = [], []
    for target, drafts in zip(targets_of, drafts_of, strict=True):
        path = [0]
        while True:
            found = next((child for child in children[path[-1]] if drafts[child] == target[path[-1]]), None)
            if found is None:
                break
            path.append(found)
        paths.append(path)
        tokens.append([target[node] for node in path])
    return paths, tokens


def torch_greedy(problem: Problem, i: int) -> tuple[list[list[int]], list[list[int]]]:
    return torch_walk(problem, i, problem.logits[i].argmax(1))


def torch_sampled(problem: Problem, i: int) -> tuple[list[list[int]], list[list[int]]]:
    return torch_walk(problem, i, torch_sample(problem, i))


def torch_sample(problem: Problem, i: int) -> Tensor:
    assert problem.params is not None
    return torch.multinomial(torch_law(problem.logits[i], problem.params), 1)[:, 0]


# Checks ---------------------------------------------------------------------------------------------------------------


def check_greedy(problem: Problem) -> None:
    verdict = greedy(problem, 0)
    for b, (path, tokens) in enumerate(zip(*torch_greedy(problem, 0), strict=True)):
        if verdict.accept_index[b, : len(path)].tolist() != path or verdict.tokens[b, : len(path)].tolist() != tokens:
            raise SystemExit(f"greedy: sequence {b} differs from the torch chain's")


def check_law(problem: Problem) -> None:
    """Draws of one row are what the torch chain's law allows, as often as it says."""
    assert problem.params is not None
    draws = 4000
    for row in range(2):
        logits = problem.logits[0][row]
        law = torch_law(logits[None], problem.params)[0].double()
        at = {"seeds": torch.full((draws,), row), "positions": torch.arange(draws)}
        tokens = pagedtree.sample(logits.expand(draws, -1), problem.sampling, **at)
        if int((law[tokens] == 0).sum()) > draws * 1e-3:  # the boundary of top-p may fall either way within 1e-4
            raise SystemExit(f"row {row}: tokens come up that the torch chain drops")
        seen = torch.bincount(tokens, minlength=problem.vocab).double()
        common = law * draws >= 5
        expected = torch.cat([law[common], (1 - law[common].sum()).clamp(min=1e-12)[None]]) * draws
        observed = torch.cat([seen[common], (draws - seen[common].sum())[None]])
        statistic = float(((observed - expected) ** 2 / expected.clamp(min=1)).sum())
        bins = int(common.sum())
        if statistic > bins + 10 * (2 * bins) ** 0.5:
            raise SystemExit(f"row {row}: draws do not follow the torch chain's law (chi-square {statistic:.0f})")


CHAIN = "torch chain"
LAWS = {
    "temperature 0.8": {"temperature": 0.8},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}
SAMPLED, SAMPLE = {CHAIN: torch_sampled}, {CHAIN: torch_sample}
RULES = [
    Rule("verify_greedy", None, greedy, {CHAIN: torch_greedy}, check_greedy, Problem),
    *(Rule(f"verify_sampled, {law}", p, sampled, SAMPLED, check_law, Problem) for law, p in LAWS.items()),
    *(Rule(f"sample, {law}", p, sample_rows, SAMPLE, check_law, Problem) for law, p in LAWS.items()),
]
