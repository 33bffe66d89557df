"""Verification that weighs the target's law against the drafts': ours, the chain of torch ops, vLLM's sampler."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from suite import Mismatch, package
from torch import Tensor
from verify_peers import Problem, Rule, Verification, children_of, flashinfer_law, op_of, torch_law

import pagedtree
from pagedtree import Verdict
from pagedtree.reference import acceptance

Outcome = tuple[list[list[int]], list[list[int]]]  # of each tree: the path, its tokens


@dataclass
class DrawnProblem(Problem):
    """Drafts drawn, independently, from laws near the target's: row draft_rows[n] of draft_probs[i] at node n."""

    draft_probs: list[Tensor] = field(init=False)
    draft_rows: Tensor = field(init=False)

    def _make(self, generator: torch.Generator) -> None:
        super()._make(generator)
        nodes, parents = self.tree.num_nodes, torch.from_numpy(self.tree.parents).to(self.device).long()
        inner = torch.unique(parents[1:])
        self.draft_rows = torch.zeros(self.batch, nodes, dtype=torch.int64)
        self.draft_rows[:, inner] = torch.arange(self.batch * inner.numel()).view(self.batch, -1)
        self.draft_probs = []
        for logits, drafts in zip(self.logits, self.drafts, strict=True):
            mine = logits.view(self.batch, nodes, -1)[:, inner].flatten(0, 1).float()
            q = mine.add_(torch.randn(mine.shape, generator=generator)).div_(0.8).softmax(-1)
            self.draft_probs.append(q)
            rows = self.draft_rows[:, parents[1:]].flatten()
            drawn = torch.multinomial(q[rows], 1, generator=generator).view(self.batch, -1)
            drafts.view(self.batch, nodes)[:, 1:] = drawn
        self.draft_rows = self.draft_rows.flatten()
        self.coins = torch.rand(self.rows, generator=generator)
        self.final_coins = torch.rand(self.batch, generator=generator)


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


def first_above(law: Tensor, coin: Tensor) -> int:
    return int((law.double().cumsum(0) > coin * law.double().sum()).nonzero()[0])


def excess(p: Tensor, q: Tensor) -> tuple[Tensor, float]:
    """max(p - q, 0), normalised where it is not zero, and its sum."""
    rest = (p - q).clamp_(min=0)
    total = float(rest.sum())
    return rest / (total or 1.0), total


def torch_walks(problem: DrawnProblem, i: int, judge: Callable[..., tuple[int | None, Tensor]]) -> Outcome:
    """judge(p, node, children, drafts, row of the root) gives the accepted child, or None and what is left of p."""
    assert problem.params is not None
    target = torch_law(problem.logits[i], problem.params)
    n, children = problem.tree.num_nodes, children_of(problem.tree)
    paths, tokens = [], []
    for b in range(problem.batch):
        drafts, path = problem.drafts[i][b * n : (b + 1) * n].tolist(), [0]
        while True:
            child, rest = judge(target[b * n + path[-1]], path[-1], children[path[-1]], drafts, b * n)
            if child is None:
                break
            path.append(child)
        paths.append(path)
        tokens.append([*(drafts[node] for node in path[1:]), first_above(rest, problem.final_coins[b])])
    return paths, tokens


def torch_in_turn(problem: DrawnProblem, i: int) -> Outcome:
    def judge(p: Tensor, node: int, children: list[int], drafts: list[int], root: int) -> tuple[int | None, Tensor]:
        for child in children:
            q, x = problem.draft_probs[i][problem.draft_rows[root + node]], drafts[child]
            if problem.coins[root + child] * q[x] < p[x]:
                return child, p
            p, _ = excess(p, q)
        return None, p

    return torch_walks(problem, i, judge)


def torch_exclusive(problem: DrawnProblem, i: int) -> Outcome:
    def judge(p: Tensor, node: int, children: list[int], drafts: list[int], root: int) -> tuple[int | None, Tensor]:
        tried = torch.zeros_like(p, dtype=torch.bool)
        for child in children:
            tried[drafts[child]] = True
            if p[drafts[child]] > 0 and p[tried].sum() > problem.coins[root + node]:
                return child, p
        return None, p.masked_fill(tried, 0)

    return torch_walks(problem, i, judge)


def torch_block(problem: DrawnProblem, i: int) -> Outcome:
    assert problem.params is not None
    target, n = torch_law(problem.logits[i], problem.params), problem.tree.num_nodes
    paths, tokens = [], []
    for b in range(problem.batch):
        drafts = problem.drafts[i][b * n : (b + 1) * n].tolist()
        weight, accepted, left = 1.0, 0, target[b * n]
        for node in range(n):
            p = target[b * n + node]
            q = problem.draft_probs[i][problem.draft_rows[b * n + node]] if node + 1 < n else torch.zeros(1)
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
    assert problem.params is not None
    target = torch_law(problem.logits[i], problem.params)
    n, children = problem.tree.num_nodes, children_of(problem.tree)
    paths, tokens = [], []
    for b in range(problem.batch):
        drafts = problem.drafts[i][b * n : (b + 1) * n].tolist()

        def verify(node: int, weight: float, b: int = b, drafts: list[int] = drafts) -> tuple[list[int], Tensor] | None:
            p, row = target[b * n + node], b * n + node
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
    assert problem.params is not None
    target, n = torch_law(problem.logits[i], problem.params), problem.tree.num_nodes
    bounds = (0.3 * (target * target.clamp(min=1e-30).log()).sum(1).exp()).clamp(max=0.09).tolist()
    parents, best, paths, tokens = problem.tree.parents.tolist(), target.argmax(1), [], []
    for b in range(problem.batch):
        drafts, accepted = problem.drafts[i][b * n : (b + 1) * n].tolist(), {0: [0]}
        for node in range(1, n):
            row = b * n + parents[node]
            if parents[node] in accepted and target[row, drafts[node]] > bounds[row]:
                accepted[node] = [*accepted[parents[node]], node]
        path = max(accepted.values(), key=len)
        paths.append(path)
        tokens.append([*(drafts[node] for node in path[1:]), int(best[b * n + path[-1]])])
    return paths, tokens


# vLLM and FlashInfer: chains ------------------------------------------------------------------------------------------


def repeated(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    x = x.repeat_interleave(counts, output_size=num_tokens)
    return x.masked_fill(x == replace_from, replace_to)


def refuse_unless_drawn_chain(verification: Verification) -> None:
    tree = verification.problem.tree
    if tree.num_nodes != tree.max_depth + 1 or verification.rule.law != "iid":
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
        # Its laws have a row for each draft token.
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
        target = flashinfer_law(problem.logits[copy], problem.params or {}).view(problem.batch, n, -1)
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
    """Of a law of one token there is one outcome, whatever the coins."""
    params = problem.params
    problem.params = {**(params or {}), "temperature": 1e-3}
    try:
        verdict, theirs = by_ratio(pagedtree.verify_rejection, "iid")(problem, 0), tokens()
    finally:
        problem.params = params
    if not torch.equal(verdict.tokens[:, : theirs.shape[1]], theirs.long()):
        raise Mismatch(f"{whose} tokens differ from pagedtree's")


TOP_P = {"temperature": 0.8, "top_p": 0.9}


def rule(op: Callable[..., Verdict], law: str, peer: Callable[..., Outcome]) -> Rule:
    run = typical if op is pagedtree.verify_typical else by_ratio(op, law)
    return Rule(op.__name__, law, TOP_P, run, peer, checked(run, peer))


RULES = [
    rule(pagedtree.verify_rejection, "iid", torch_in_turn),
    rule(pagedtree.verify_rejection, "onehot", torch_exclusive),
    rule(pagedtree.verify_traversal, "iid", torch_traversal),
    rule(pagedtree.verify_typical, "top-p 0.9", torch_typical),
    rule(pagedtree.verify_block, "iid", torch_block),
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
