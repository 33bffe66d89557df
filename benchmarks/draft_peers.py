"""Ops that make trees, against torch ops and transformers' prompt lookup."""

from __future__ import annotations

from typing import Any

import torch
from named_trees import nodes_of, tree_named
from suite import Op, Problem, Way, ours, package, peer, torch_ops
from torch import Tensor

import pagedtree

PADDED = 1 << 20  # no problem here has fewer bytes


class Build(Problem):
    def make(self) -> None:
        self.tree = tree_named(self.shape["tree"])
        n, batch = self.tree.num_nodes, self.shape["batch"]
        self.parents = torch.from_numpy(self.tree.parents).repeat(batch).to(self.device)
        self.cu_nodes = torch.arange(batch + 1, dtype=torch.int32, device=self.device) * n
        # Reads parents; writes depths, two links and mask words.
        self.bytes = batch * n * 4 * (4 + -(-n // 32))

    def op(self, copy: int) -> tuple[Tensor, Tensor]:
        built = pagedtree.build_trees(
            self.parents, self.cu_nodes, max_nodes=self.tree.num_nodes, max_depth=self.tree.max_depth
        )
        return built.depths, built.mask

    def torch_ops(self, copy: int) -> tuple[Tensor, Tensor]:
        """Pointer jumping finds the ancestors."""
        n, batch = self.tree.num_nodes, self.shape["batch"]
        parents = self.parents.view(batch, n).long()
        seen = torch.eye(n + 1, dtype=torch.bool, device=self.device).expand(batch, -1, -1).clone()
        jump = torch.cat([parents.where(parents >= 0, n), parents.new_full((batch, 1), n)], dim=1)
        reach = 1
        while reach <= self.tree.max_depth:
            seen |= seen.gather(1, jump[:, :, None].expand_as(seen))
            jump = jump.gather(1, jump)
            reach *= 2
        ancestors = seen[:, :n, :n]
        words = torch.nn.functional.pad(ancestors, (0, -n % 32)).view(batch, n, -1, 32)
        packed = (words.long() << torch.arange(32, device=self.device)).sum(-1).to(torch.int32)
        return (ancestors.sum(-1) - 1).int().flatten(), packed.flatten(0, 1)


class Expand(Problem):
    """EAGLE-2 level: `width` children of each of `width` nodes, whose best `width` continue."""

    def make(self) -> None:
        generator = self.generator()
        batch, width, vocab = (self.shape[key] for key in ("batch", "width", "vocab"))
        self.copies = 4
        logits = torch.randn(self.copies, batch * width, vocab, generator=generator, device=self.device)
        # Distinct best tokens in any dtype, as torch's choice among equals is undefined.
        rows = (self.copies, batch * width, 40)
        hot = torch.randint(0, vocab, rows, generator=generator, device=self.device)
        values = 14 - torch.arange(40, device=self.device) * 0.25
        logits.scatter_(2, hot, values.expand(rows))
        self.logits = logits.to(getattr(torch, self.shape["dtype"]))
        state = pagedtree.start_draft(torch.arange(batch, device=self.device), max_kv_nodes=1 + 2 * width)
        first = torch.randn(batch, vocab, generator=generator, device=self.device)
        self.state = pagedtree.expand_tree(state, first, num_children=width, num_frontier=width)
        self.bytes = self.logits[0].numel() * self.logits.element_size()

    def op(self, copy: int) -> tuple[Tensor, Tensor]:
        width = self.shape["width"]
        grown = pagedtree.expand_tree(self.state, self.logits[copy], num_children=width, num_frontier=width)
        return grown.tokens[:, -width * width :], grown.frontier

    def torch_ops(self, copy: int) -> tuple[Tensor, Tensor]:
        batch, width = self.shape["batch"], self.shape["width"]
        best = self.logits[copy].float().log_softmax(-1).topk(width)
        so_far = self.state.scores.gather(1, self.state.frontier.long())
        scores = (so_far[:, :, None] + best.values.view(batch, width, width)).flatten(1)
        frontier = scores.topk(width).indices + self.state.num_candidates
        return best.indices.view(batch, -1), frontier


class Lookup(Problem):
    """The last tokens occur once before."""

    def make(self) -> None:
        batch, length, draft = (self.shape[key] for key in ("batch", "length", "draft_tokens"))
        generator = torch.Generator().manual_seed(0)
        text = torch.stack([torch.randperm(1 << 20, generator=generator)[:length] for _ in range(batch)])
        self.ngram = 3
        text[:, -self.ngram :] = text[:, length // 2 : length // 2 + self.ngram]
        self.text = text.to(self.device)
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device=self.device)
        self.bytes = 8 * self.text.numel()
        self.max_nodes = draft + 1

    def op(self, copy: int) -> Tensor:
        bounds = {"max_nodes": self.max_nodes, "max_depth": self.max_nodes - 1, "max_branches": 1}
        drafts = pagedtree.ngram_propose(self.text, self.lengths, max_ngram=self.ngram, **bounds)
        return drafts.draft_tokens.view(self.shape["batch"], -1)[:, 1:]

    def torch_ops(self, copy: int) -> Tensor:
        windows = self.text.unfold(1, self.ngram, 1)[:, :-1]
        found = (windows == self.text[:, None, -self.ngram :]).all(-1)
        place = torch.arange(1, found.shape[1] + 1, device=self.device)
        begin = (found * place).argmax(1) + self.ngram
        return self.text.gather(1, begin[:, None] + torch.arange(self.max_nodes - 1, device=self.device))


@peer("transformers", when=package("transformers"), synchronises=True)
def prompt_lookup(p: Lookup) -> Way:
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    generator = PromptLookupCandidateGenerator(
        num_output_tokens=p.max_nodes - 1, max_matching_ngram_size=p.ngram, max_length=1 << 30
    )

    def run(copy: int) -> Tensor:
        text = p.text
        return torch.stack([generator.get_candidates(row[None])[0][0, text.shape[1] :] for row in text])

    return Way(run)


class BestFirst(Problem):
    """Levels of a block drafter: log-probabilities in descending order."""

    def make(self) -> None:
        batch, levels, width = (self.shape[key] for key in ("batch", "levels", "candidates"))
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(batch, levels, 32000, generator=generator) * 3
        best = logits.log_softmax(-1).topk(width)
        self.log_probs, self.tokens = best.values.to(self.device), best.indices.to(self.device)
        self.roots = torch.arange(batch, device=self.device)
        nodes = batch * self.shape["nodes"]
        # Reads candidates; writes token, sum, parent, depth, two links and mask words.
        self.bytes = 12 * self.tokens.numel() + nodes * 4 * (7 + -(-self.shape["nodes"] // 32))

    def op(self, copy: int) -> Any:
        return pagedtree.best_first_tree(
            self.log_probs, self.tokens, self.roots, self.shape["nodes"], return_log_probs=True
        )


class Select(Problem):
    """Keeps the best quarter of equal trees, by random survival."""

    def make(self) -> None:
        tree, batch = tree_named(self.shape["tree"]), self.shape["batch"]
        rows = batch * tree.num_nodes
        self.trees = pagedtree.TreeBatch.from_trees([tree] * batch, device=self.device)
        self.survival = torch.rand(rows, generator=torch.Generator().manual_seed(0)).to(self.device)
        self.budget = max(batch, rows // 4)
        # Reads parents, depths and survivals; writes parents, depths, links, rows and mask words.
        self.bytes = 12 * rows + self.budget * 4 * (5 + -(-tree.num_nodes // 32))

    def op(self, copy: int) -> Any:
        return pagedtree.select_nodes(self.trees, self.survival, self.budget)


OPS = [
    Op(
        name="build_trees",
        base={"batch": 8, "tree": "Medusa 64"},
        axes={
            "batch": [1, 2, 4, 16, 32, 64],
            "tree": ["chain 1", "chain 8", "EAGLE-2 60", "Sequoia 128", "binary 255", "binary 1024"],
        },
        quick={"batch": 2},
        problem=Build,
        memory=lambda shape: PADDED + 64 * shape["batch"] * nodes_of(shape["tree"]) ** 2,
    ),
    Op(
        name="expand_tree",
        base={"batch": 8, "width": 10, "vocab": 128256, "dtype": "float32"},
        axes={"batch": [1, 2, 4, 16], "width": [1, 4], "vocab": [32000, 65536, 262144], "dtype": ["bfloat16"]},
        quick={"batch": 2, "vocab": 32000},
        problem=Expand,
        memory=lambda shape: PADDED + 36 * shape["batch"] * shape["width"] * shape["vocab"],
    ),
    Op(
        name="ngram_propose",
        base={"batch": 8, "length": 4096, "draft_tokens": 8},
        axes={"batch": [1, 2, 4, 16, 32, 64], "length": [512, 2048, 8192, 32768, 131072], "draft_tokens": [4, 16, 63]},
        quick={"batch": 2, "length": 1024},
        problem=Lookup,
        peers=[ours, torch_ops, prompt_lookup],
        memory=lambda shape: PADDED + 100 * shape["batch"] * shape["length"],
    ),
    Op(
        name="best_first_tree",
        base={"batch": 8, "levels": 8, "candidates": 64, "nodes": 64},
        axes={
            "batch": [1, 2, 4, 16, 32, 64],
            "levels": [4, 15],
            "candidates": [8, 256, 1024],
            "nodes": [16, 256, 1024],
        },
        quick={"batch": 2},
        problem=BestFirst,
        peers=[ours],
        memory=lambda shape: PADDED + shape["batch"] * (400_000 * shape["levels"] + 5000 * shape["nodes"]),
    ),
    Op(
        name="select_nodes",
        base={"batch": 64, "tree": "Medusa 64"},
        axes={
            "batch": [1, 8, 16, 32, 256, 1024],
            "tree": ["chain 8", "EAGLE-2 60", "Sequoia 128", "binary 255", "binary 1024"],
        },
        quick={"batch": 2},
        problem=Select,
        peers=[ours],
        memory=lambda shape: PADDED + 300 * shape["batch"] * nodes_of(shape["tree"]),
    ),
]
