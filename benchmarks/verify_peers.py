"""Verification of draft trees and sampling, against the chain of torch ops of engines without a kernel.

The chain is temperature, softmax, top-k and top-p with renormalisation and a draw, for the rows of the walk, level by
level over all trees, or for all rows if a rule reads them. At each level of a path a draft has the target's token with
probability ACCEPTED, about a good draft model's.

A point's floor is the time to read a rule's necessary rows once: logits of the accepted path, with distributions of
drawn drafts; or logits of all nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sampling_peers
import torch
from named_trees import nodes_of, tree_named
from suite import Mismatch, Op, Peer, Shape, Way, ours, peer
from torch import Tensor

import pagedtree
from pagedtree import DraftTree, SamplingParams, TreeBatch, Verdict

L3_BYTES = 64 << 20
ACCEPTED = 0.7


@dataclass(frozen=True)
class Rule:
    """`run` verifies copy i of a problem, `torch_ops` does so by the chain, and `check` compares them.

    variant: the sampling, or the law of drafts.
    params: keyword arguments of SamplingParams; None = greedy.
    predicted: the target's token at each node of copy i, for drafts to agree with; None: any drafts.
    visits: some rows need not be read.
    """

    op: str
    variant: str
    params: dict[str, Any] | None
    run: Callable[..., object]
    torch_ops: Callable[..., object]
    check: Callable[..., None]
    predicted: Callable[[Problem, int], Tensor] | None = None
    visits: bool = True


class Verification:
    """Several rules share a problem."""

    def __init__(self, rule: Rule, problem: Problem) -> None:
        self.rule, self.problem = rule, problem
        problem.params = rule.params
        problem.draft_for(rule)
        self.copies, self.device = problem.copies, problem.device
        self.bytes, self.flops = problem.logit_bytes, 0
        verdict = self.op(0)
        self.notes: dict[str, Any] = {"drafts": problem.rows - problem.batch, "accepted": None}
        if isinstance(verdict, Verdict):
            self.notes |= acceptance_of(verdict, problem.tree)
            if rule.visits:
                self.bytes = problem.logit_bytes * self.notes["visited_rows"] // problem.rows
                if rule.variant == "iid":
                    self.bytes += 4 * problem.vocab * self.notes["judged_rows"]

    def op(self, copy: int) -> object:
        return self.rule.run(self.problem, copy)


def acceptance_of(verdict: Verdict, tree: DraftTree) -> dict[str, Any]:
    """Returns accepted drafts in all, per sequence and per visited node with children, and the count of these nodes."""
    accepted = int(verdict.num_accepted.sum())
    visited = verdict.accept_index[verdict.accept_index >= 0].cpu()
    judged = int((torch.from_numpy(tree.first_child)[visited.long()] >= 0).sum())
    return {
        "visited_rows": visited.numel(),
        "judged_rows": judged,
        "accepted": accepted,
        "accepted_length": round(accepted / verdict.num_accepted.numel(), 2),
        "accepted_a_level": round(accepted / judged, 2) if judged else None,
    }


def torch_way(verification: Verification) -> Way:
    rule, problem = verification.rule, verification.problem
    return Way(lambda copy: rule.torch_ops(problem, copy), check=lambda: rule.check(problem))


CHAIN = {"only_headline": True, "synchronises": True}  # seconds per call, as its walk is on the host
torch_visited, torch_chain = (peer(name, **CHAIN)(torch_way) for name in ("torch, visited rows", "torch chain"))


@dataclass
class Problem:
    """`copies` sets of logits [B * nodes, V] for B equal trees.

    `draft_for` makes drafts[i]: ACCEPTED of the nodes with children have one with the token of the rule's target,
    mostly one of the first. Other drafts are unlikely.
    """

    batch: int
    tree: DraftTree
    vocab: int
    dtype: torch.dtype
    copies: int
    device: torch.device
    params: dict[str, Any] | None = None
    trees: TreeBatch = field(init=False)
    logits: list[Tensor] = field(init=False)
    drafts: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        with torch.device(self.device):
            self._make(torch.Generator(self.device).manual_seed(0))

    def _make(self, generator: torch.Generator) -> None:
        self.trees = TreeBatch.from_trees([self.tree] * self.batch, device=self.device)
        rows = self.batch * self.tree.num_nodes
        parents = torch.from_numpy(self.tree.parents).to(self.device).long().repeat(self.batch)
        parents += torch.arange(self.batch).repeat_interleave(self.tree.num_nodes) * self.tree.num_nodes
        self.parents = parents
        self.agrees = agreeing_children([self.tree] * self.batch).to(self.device)
        self.logits, self.drafts, self.unlikely = [], [], []
        for _ in range(self.copies):
            # Peaked like a language model: a few tokens hold most of the mass.
            logits = torch.randn(rows, self.vocab, generator=generator)
            hot = torch.randint(0, self.vocab, (rows, 40), generator=generator)
            logits.scatter_(1, hot, 14 - torch.arange(40) * 0.25 + torch.zeros(rows, 40))
            self._finish(logits, hot)
            self.unlikely.append(hot[:, 7])  # hot at the node, not at its parent
            self.logits.append(logits.to(self.dtype))
        self.drafts = list(self.unlikely)
        self.seeds = torch.arange(self.batch)
        self.positions = torch.zeros(self.batch, dtype=torch.int64)

    def _finish(self, logits: Tensor, hot: Tensor) -> None:
        """May change a copy's logits [N, V]; hot: int64 [N, 40], each row's likeliest tokens in order."""

    def draft_for(self, rule: Rule) -> None:
        if rule.predicted is not None:
            self.drafts = [
                torch.where(self.agrees, rule.predicted(self, i)[self.parents.clamp(min=0)], unlikely)
                for i, unlikely in enumerate(self.unlikely)
            ]

    @property
    def rows(self) -> int:
        return self.batch * self.tree.num_nodes

    @property
    def logit_bytes(self) -> int:
        return self.logits[0].numel() * self.logits[0].element_size()

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**(self.params or {"temperature": 0.0}))

    @contextmanager
    def sure(self) -> Iterator[None]:
        """Sets distributions of one token, independent of coins."""
        params, self.params = self.params, {**(self.params or {}), "temperature": 1e-3}
        try:
            yield
        finally:
            self.params = params


def agreeing_children(trees: list[DraftTree]) -> Tensor:
    """Returns bool [N]: with probability ACCEPTED one child of a node, earlier siblings twice as often as the next."""
    generator, agrees = torch.Generator("cpu").manual_seed(1), []
    for tree in trees:
        mine = [False] * tree.num_nodes
        for children in filter(None, children_of(tree)):
            coin, rank = torch.rand(2, generator=generator, device="cpu").tolist()
            if coin < ACCEPTED:
                mine[children[min(int(-math.log2(1 - rank)), len(children) - 1)]] = True
        agrees += mine
    return torch.tensor(agrees, device="cpu")


# pagedtree ------------------------------------------------------------------------------------------------------------


def greedy(problem: Problem, i: int) -> Verdict:
    return pagedtree.verify_greedy(problem.logits[i], problem.drafts[i], problem.trees)


def sampled(problem: Problem, i: int) -> Verdict:
    streams = {"seeds": problem.seeds, "positions": problem.positions}
    return pagedtree.verify_sampled(problem.logits[i], problem.drafts[i], problem.trees, problem.sampling, **streams)


def sample_rows(problem: Problem, i: int) -> Tensor:
    """An engine without drafts samples every row."""
    rows = torch.arange(problem.rows, device=problem.device)
    return pagedtree.sample(problem.logits[i], problem.sampling, seeds=rows, positions=rows)


def best_tokens(problem: Problem, i: int) -> Tensor:
    return problem.logits[i].argmax(1)


def seeded_tokens(problem: Problem, i: int) -> Tensor:
    """Returns `verify_sampled`'s tokens."""
    nodes = problem.tree.num_nodes
    depths = torch.from_numpy(problem.tree.depths).to(problem.device).long().repeat(problem.batch)
    seeds, starts = (each.repeat_interleave(nodes) for each in (problem.seeds, problem.positions))
    return pagedtree.sample(problem.logits[i], problem.sampling, seeds=seeds, positions=starts + depths)


# The chain of torch ops -----------------------------------------------------------------------------------------------


def torch_distribution(logits: Tensor, params: dict[str, Any]) -> Tensor:
    """[N, V] after temperature, top-k and top-p."""
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


Outcome = tuple[list[list[int]], list[list[int]]]  # for each tree: the path, its tokens
# (a node's value, the tree, the node, its children, the drafts) -> the accepted child, or None and the last token
Judge = Callable[[Any, int, int, list[int], list[int]], tuple[int | None, int]]


def torch_walk(problem: Problem, i: int, values: Callable[[list[int]], Iterable[Any]], judge: Judge) -> Outcome:
    """Walks level by level on the host."""
    n, children = problem.tree.num_nodes, children_of(problem.tree)
    drafts = problem.drafts[i].view(-1, n).tolist()
    paths: list[list[int]] = [[0] for _ in range(problem.batch)]
    last = [0] * problem.batch
    walking = list(range(problem.batch))
    while walking:
        found = values([b * n + paths[b][-1] for b in walking])
        going, walking = walking, []
        for b, value in zip(going, found, strict=True):
            child, token = judge(value, b, paths[b][-1], children[paths[b][-1]], drafts[b])
            if child is not None:
                paths[b].append(child)
                walking.append(b)
            else:
                last[b] = token
    return paths, [[*(drafts[b][node] for node in path[1:]), last[b]] for b, path in enumerate(paths)]


def torch_predicted(problem: Problem, i: int, predict: Callable[[Tensor], Tensor]) -> Outcome:

    def judge(token: int, b: int, node: int, children: list[int], drafts: list[int]) -> tuple[int | None, int]:
        return next((child for child in children if drafts[child] == token), None), token

    return torch_walk(problem, i, lambda rows: predict(problem.logits[i][rows]).tolist(), judge)


def torch_greedy(problem: Problem, i: int) -> Outcome:
    return torch_predicted(problem, i, lambda logits: logits.argmax(1))


def torch_sampled(problem: Problem, i: int) -> Outcome:
    params = problem.params
    assert params is not None
    return torch_predicted(problem, i, lambda logits: drawn(logits, params))


def drawn(logits: Tensor, params: dict[str, Any]) -> Tensor:
    return torch.multinomial(torch_distribution(logits, params), 1)[:, 0]


def torch_sample(problem: Problem, i: int) -> Tensor:
    return best_tokens(problem, i) if problem.params is None else drawn(problem.logits[i], problem.params)


# Checks ---------------------------------------------------------------------------------------------------------------


def check_outcome(verdict: Verdict, outcome: Outcome) -> None:
    for b, (path, tokens) in enumerate(zip(*outcome, strict=True)):
        ours = verdict.accept_index[b, : len(path)].tolist(), verdict.tokens[b, : len(path)].tolist()
        if ours != (path, tokens) or int(verdict.num_accepted[b]) != len(path) - 1:
            raise Mismatch(f"tree {b}: the torch chain gives {path}, {tokens}; pagedtree {ours}")


def check_greedy(problem: Problem) -> None:
    check_outcome(greedy(problem, 0), torch_greedy(problem, 0))


def check_sampled(problem: Problem) -> None:
    """Distributions of one token have one outcome; others are compared by frequency."""
    with problem.sure():
        check_outcome(sampled(problem, 0), torch_sampled(problem, 0))
    check_distribution(problem)


def check_best(problem: Problem) -> None:
    if not torch.equal(sample_rows(problem, 0), best_tokens(problem, 0)):
        raise Mismatch("greedy sampling differs from torch's argmax")


def own_draws(problem: Problem) -> Callable[[Tensor, int], Tensor]:
    def draw(logits: Tensor, row: int) -> Tensor:
        positions = torch.arange(logits.shape[0], device=problem.device)
        return pagedtree.sample(logits, problem.sampling, seeds=torch.full_like(positions, row), positions=positions)

    return draw


def check_distribution(
    problem: Problem, draw: Callable[[Tensor, int], Tensor] | None = None, whose: str = "our"
) -> None:
    """Compares one row's draws with the torch chain's distribution.

    draw(logits, row): a token for each row of logits; default ours.
    """
    assert problem.params is not None
    draw = draw or own_draws(problem)
    draws = 4000
    for row in range(2):
        logits = problem.logits[0][row]
        distribution = torch_distribution(logits[None], problem.params)[0].double()
        tokens = draw(logits.expand(draws, -1), row).long()
        # The boundary of top-p may fall either way within 1e-4.
        if int((distribution[tokens] == 0).sum()) > draws * 1e-3:
            raise Mismatch(f"row {row}: {whose} draws have tokens that the torch chain drops")
        seen = torch.bincount(tokens, minlength=problem.vocab).double()
        common = distribution * draws >= 5
        expected = torch.cat([distribution[common], (1 - distribution[common].sum()).clamp(min=1e-12)[None]]) * draws
        observed = torch.cat([seen[common], (draws - seen[common].sum())[None]])
        statistic = float(((observed - expected) ** 2 / expected.clamp(min=1)).sum())
        bins = int(common.sum())
        if statistic > bins + 10 * (2 * bins) ** 0.5:
            raise Mismatch(
                f"row {row}: {whose} draws do not follow the torch chain's distribution (chi-square {statistic:.0f})"
            )


# The ops --------------------------------------------------------------------------------------------------------------


SAMPLINGS = {
    "temperature 0.8": {"temperature": 0.8},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}
RULES = [
    Rule("verify_greedy", "greedy", None, greedy, torch_greedy, check_greedy, best_tokens),
    *(
        Rule("verify_sampled", variant, params, sampled, torch_sampled, check_sampled, seeded_tokens)
        for variant, params in SAMPLINGS.items()
    ),
    *(
        Rule("sample", variant, params, sample_rows, torch_sample, check_distribution, visits=False)
        for variant, params in SAMPLINGS.items()
    ),
    Rule("sample", "greedy", None, sample_rows, torch_sample, check_best, visits=False),
]


@lru_cache(maxsize=1)
def shared_problem(kind: type[Problem], batch: int, tree: str, vocab: int, dtype: str, device: torch.device) -> Problem:
    element = getattr(torch, dtype)
    size = batch * nodes_of(tree) * vocab * element.itemsize
    copies = 1 if size >= 4 * L3_BYTES else -(-L3_BYTES // size) + 1
    return kind(batch, tree_named(tree), vocab, element, min(copies, 8), device)


def problem_maker(op: str, rules: list[Rule], kind: type[Problem]) -> Callable[[Shape, torch.device], Verification]:
    by_variant = {rule.variant: rule for rule in rules if rule.op == op}

    def make(shape: Shape, device: torch.device) -> Verification:
        names = ("batch", "tree", "vocab", "dtype")
        return Verification(
            by_variant[shape["variant"]], shared_problem(kind, *(shape[name] for name in names), device)
        )

    make.inputs = kind  # type: ignore[attr-defined]
    return make


def memory_of(shape: Shape) -> int:
    """Counts fp32 logits, their copies, draft distributions, and the chain's tensors."""
    return 36 * shape["batch"] * nodes_of(shape["tree"]) * shape["vocab"]


def op_of(
    name: str,
    rules: list[Rule],
    kind: type[Problem] = Problem,
    tree: str = "binary 32",
    trees: tuple[str, ...] = ("binary 5", "EAGLE-2 60", "Medusa 64", "Sequoia 128", "binary 256"),
    headline: tuple[Shape, ...] = (),
    chain: Peer = torch_visited,
    peers: tuple[Peer, ...] = (),
    unsupported: Callable[[Shape, torch.device], str | None] = lambda shape, device: None,
) -> Op:
    variants = [rule.variant for rule in rules if rule.op == name]
    variant = "top-p 0.9" if "top-p 0.9" in variants else variants[0]
    return Op(
        name=name,
        base={"batch": 8, "tree": tree, "vocab": 128256, "dtype": "bfloat16", "variant": variant, "threads": 0},
        axes={
            "batch": [1, 64],
            "tree": trees,
            "vocab": [32000, 65536, 262144],
            "dtype": ["float16", "float32"],
            "threads": [1],
        },
        headline=[
            *({"variant": other} for other in variants if other != variant),
            {"batch": 1, "tree": trees[0]},
            *headline,
        ],
        quick={"batch": 2, "vocab": 32000},
        problem=problem_maker(name, rules, kind),
        peers=[ours, chain, *peers],
        memory=memory_of,
        unsupported=unsupported,
    )


OPS = [
    op_of("verify_greedy", RULES),
    op_of("verify_sampled", RULES),
    op_of("sample", RULES, chain=torch_chain, peers=tuple(sampling_peers.PEERS)),
]
