"""Drafters of any quality, and the subjects of `generate` with each of them."""

from __future__ import annotations

from functools import cached_property
from itertools import product

import pytest
import torch

from pagedtree import DraftTree, TreeBatch, build_trees
from pagedtree.generation.drafters import (
    BlockDrafter,
    CombinedDrafter,
    EagleDrafter,
    MedusaDrafter,
    NgramDrafter,
    ParallelEagleDrafter,
    SuffixDrafter,
    medusa_tree,
)
from pagedtree.integrations.transformers import ModelDrafter, MtpDrafter
from support.heads import DFLASH2, block_model, parallel_head, random_head
from support.models import (
    IS_5,
    LENGTHS,
    VOCAB,
    greedy,
    prompts_of,
    sampled,
    tiny,
    tiny_eagle,
    tiny_heads,
    tiny_hybrid,
    tiny_latent,
)


class Oracle:
    """Knows the texts: a node's last child is right with probability `hit`."""

    tree = DraftTree.full([2, 2, 1])

    def __init__(self, texts, hit):
        self.texts, self.hit = texts, hit
        self.generator = torch.Generator().manual_seed(1)

    def propose(self, tokens, lengths):
        draft_tokens = []
        for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
            text = max(self.texts, key=lambda text: common_prefix(text, row[:length]))
            guess = torch.randint(VOCAB, (self.tree.num_nodes,), generator=self.generator).tolist()
            node = 0
            for token in text[length : length + self.tree.max_depth]:
                node = max(i for i in range(self.tree.num_nodes) if self.tree.parents[i] == node)
                if torch.rand((), generator=self.generator) < self.hit:
                    guess[node] = token
            draft_tokens += guess
        trees = TreeBatch.from_trees([self.tree] * lengths.shape[0])
        return torch.tensor(draft_tokens, dtype=torch.int32), trees, None


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Hostile:
    """Drafts malformed trees of varying shape, with invalid tokens but valid roots."""

    max_nodes = 8

    def __init__(self):
        self.generator = torch.Generator().manual_seed(2)

    def propose(self, tokens, lengths):
        sizes = torch.randint(1, self.max_nodes + 1, lengths.shape, generator=self.generator)
        parents = torch.cat([torch.randint(-2, 6, (size,), generator=self.generator) for size in sizes.tolist()])
        cu_nodes = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        parents[cu_nodes[:-1]] = -1
        trees = build_trees(parents.int(), cu_nodes.int(), max_nodes=self.max_nodes, max_depth=3)
        return torch.randint(-5, 2 * VOCAB, parents.shape, generator=self.generator), trees, None


# Three outcomes per prompt; the first is in `Subject.seeded_texts`.
SEEDS = [0, 100, 101, 1, 102, 103, 2, 104, 105, 3, 106, 107]


class Subject:
    """A model and its cached results."""

    def __init__(self, make):
        self.make = make

    @cached_property
    def model(self):
        return self.make()

    @cached_property
    def texts(self):
        return [greedy(self.model, prompt) for prompt in prompts_of(LENGTHS)]

    @cached_property
    def seeded_texts(self):
        return [sampled(self.model, prompt, seed) for seed, prompt in enumerate(prompts_of(LENGTHS))]

    @cached_property
    def outcomes(self):
        """Returns texts of SEEDS."""
        texts = [sampled(self.model, prompt, SEEDS[3 * i : 3 * i + 3]) for i, prompt in enumerate(prompts_of(LENGTHS))]
        return [text for of_prompt in texts for text in of_prompt]

    @cached_property
    def heads(self):
        return tiny_heads(self.model)

    @cached_property
    def block(self):
        return block_model(self.model)

    @cached_property
    def mtp_head(self):
        return random_head(self.model).to(self.model.lm_head.weight)

    @cached_property
    def dflash2(self):
        return block_model(self.model, DFLASH2)

    @cached_property
    def parallel_head(self):
        return parallel_head(self.model)

    @cached_property
    def draft_model(self):
        return tiny(1, num_hidden_layers=1).to(self.model.lm_head.weight)

    def drafter(self, name):
        return DRAFTERS[name](self)


DRAFTERS = {
    "none": lambda s: None,
    "ngram chain": lambda s: NgramDrafter(6, max_branches=1),
    "ngram tree": lambda s: NgramDrafter(12, remember=4),
    "suffix": lambda s: SuffixDrafter(200, num_nodes=12),
    "medusa": lambda s: MedusaDrafter(s.heads, medusa_tree(3, 10)),
    "medusa best first": lambda s: MedusaDrafter(s.heads, 10),
    "EAGLE": lambda s: EagleDrafter(tiny_eagle(s.model), num_nodes=10, depth=3, width=3),
    "draft model": lambda s: ModelDrafter(s.draft_model, num_nodes=12, depth=3, width=3),
    "draft chain": lambda s: ModelDrafter(s.draft_model, num_nodes=5, depth=4, width=1, max_batch_tokens=8),
    "latent draft model": lambda s: ModelDrafter(
        tiny_latent("glm4_moe_lite", num_hidden_layers=2), num_nodes=12, depth=3, width=3
    ),
    "block": lambda s: BlockDrafter(s.block, num_nodes=12, width=4),
    "DFlash 2": lambda s: BlockDrafter(s.dflash2, num_nodes=12, width=4),
    "P-EAGLE": lambda s: ParallelEagleDrafter(s.parallel_head, num_nodes=10, depth=3, width=3),
    "MTP": lambda s: MtpDrafter(s.mtp_head, num_nodes=9, depth=3, width=3),
    "block chain": lambda s: BlockDrafter(s.block, num_nodes=4, width=1),
    "combined": lambda s: CombinedDrafter(
        ModelDrafter(s.draft_model, num_nodes=9, depth=3, width=2),
        NgramDrafter(6, max_branches=2),
        min_match=2,
        costs=(0.0, 0.0),  # draft models are as large as the target
    ),
    "itself": lambda s: ModelDrafter(s.model, num_nodes=12, depth=4, width=2),
    "oracle": lambda s: Oracle([*s.texts, *s.seeded_texts], hit=0.8),
    "never right": lambda s: Oracle([*s.texts, *s.seeded_texts], hit=0.0),
    "hostile": lambda s: Hostile(),
}
SUBJECTS = {"full": Subject(lambda seed=0: tiny(seed)), "hybrid": Subject(tiny_hybrid), "latent": Subject(tiny_latent)}
# Recurrent models cannot draft for themselves.
USUAL = ["none", "ngram chain", "ngram tree", "MTP", "draft model", "oracle", "hostile"]
NAMES = {
    "full": [name for name in DRAFTERS if name != "latent draft model"],
    "hybrid": [*USUAL, "medusa best first", "EAGLE"],
    "latent": [*USUAL, "latent draft model"],
}
# Chains and other shapes of drafters in the list.
VARIANTS = {"ngram chain", "medusa", "draft chain", "block chain", "never right"}
DISTINCT = {kind: [name for name in names if name not in VARIANTS] for kind, names in NAMES.items()}
SLOW = {("latent", name) for name in ("ngram chain", "hostile", "deepseek_v2, unscaled", "deepseek_v3, yarn")}


def kinds(*names):
    return [pytest.param(kind, id=kind, marks=_marks(kind)) for kind in names]


def cases(names, others=None):
    """Parametrises by kind with its names, times `others[kind]`."""
    return [
        pytest.param(kind, *values, id="-".join(map(str, (kind, *values))), marks=_marks(kind, values[0]))
        for kind in names
        for values in product(names[kind], *([] if others is None else [others[kind]]))
    ]


def _marks(kind, name=None):
    slow = [pytest.mark.slow] if (kind, name) in SLOW else []
    is_missing = kind != "full" and not IS_5
    return [pytest.mark.skipif(is_missing, reason="transformers 4.57 writes these models otherwise"), *slow]
