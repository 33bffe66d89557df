"""A model with enumerable texts, its drafters, and its texts' distance from their distribution."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from pagedtree import DraftTree, SamplingParams, reference
from pagedtree.generation.drafters import CombinedDrafter, MedusaDrafter, NgramDrafter
from pagedtree.integrations.transformers import ModelDrafter
from support.exact import excess
from support.models import generated, tiny, tiny_heads

VOCAB = 4
PROMPT = [1, 3, 0, 1, 3, 2, 1]
COUNT = 4  # tokens: the prompt's pass emits one, the others take one or two trees
TOY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
TOY_PARAMS = {"temperature": 1.3, "top_p": 0.98}


def distribution_of_texts(model):
    """Returns probabilities of the VOCAB ** COUNT continuations."""
    distribution = np.ones(1)
    for length in range(COUNT):
        prefixes = torch.tensor([[*PROMPT, *tail] for tail in itertools.product(range(VOCAB), repeat=length)])
        with torch.no_grad():
            rows = model(prefixes).logits[:, -1]
        distribution = np.stack(
            [p * reference.distribution(row, **TOY_PARAMS) for p, row in zip(distribution, rows.numpy(), strict=True)]
        ).ravel()
    return distribution


class InTurn(CombinedDrafter):
    """Alternates both drafters' trees."""

    def _choose(self):
        return [sequence.index % 2 for sequence in self._selected]


def two_drawn(draft):
    """Builds drafters of two models, each wrong about the other's probabilities."""
    return (
        ModelDrafter(draft, law="iid", num_nodes=7, branching=[3, 2]),
        ModelDrafter(tiny(6, **TOY), law="iid", num_nodes=5, branching=[2, 1]),
    )


DRAFTERS = {
    "none": lambda toy, draft: None,
    "n-gram": lambda toy, draft: NgramDrafter(4, max_branches=1),
    "Medusa": lambda toy, draft: MedusaDrafter(tiny_heads(toy, 2, 0.1), DraftTree.full([2, 1])),
    "top-k chain": lambda toy, draft: ModelDrafter(draft, num_nodes=3, depth=2, width=1),
    "top-k tree": lambda toy, draft: ModelDrafter(draft, num_nodes=6, depth=2, width=2),
    "iid chain": lambda toy, draft: ModelDrafter(draft, law="iid", num_nodes=4, depth=3, width=1),
    "iid tree": lambda toy, draft: ModelDrafter(draft, law="iid", num_nodes=7, branching=[3, 2]),
    "swor tree": lambda toy, draft: ModelDrafter(draft, law="swor", num_nodes=9, branching=[3, 2]),
    "coupled tree": lambda toy, draft: ModelDrafter(draft, law="coupled", num_nodes=7, depth=3, width=2),
    "iid chains": lambda toy, draft: ModelDrafter(draft, law="iid", num_nodes=13, depth=3, width=4),
    "swor chains": lambda toy, draft: ModelDrafter(draft, law="swor", num_nodes=13, depth=3, width=4),
    "swor deep tree": lambda toy, draft: ModelDrafter(draft, law="swor", num_nodes=22, branching=[3, 2, 2]),
    "two iid trees": lambda toy, draft: InTurn(*two_drawn(draft)),
    "combined": lambda toy, draft: CombinedDrafter(*two_drawn(draft), costs=(0.0, 0.0)),
}
CASES = [
    *[("sampled", name) for name in ("iid tree", "coupled tree")],  # others: test_generate
    *[("rejection", name) for name in DRAFTERS if name != "coupled tree"],
    *[("block", name) for name in ("none", "n-gram", "top-k chain", "iid chain")],
    *[("traversal", name) for name in ("iid chain", "iid tree", "swor tree", "two iid trees")],
]
# The core suite has each drafter, and each rule with drawn and other drafts.
CORE = [("sampled", "coupled tree"), ("block", "n-gram"), ("block", "iid chain"), ("traversal", "swor tree")]
CORE += [
    ("rejection", name)
    for name in ("none", "Medusa", "top-k tree", "iid tree", "swor tree", "two iid trees", "combined")
]


def toy_excess(toy, toy_draft, toy_distribution, rule, drafter, outcomes, evictions=0, **pages) -> float:
    """Returns chi-square of sampled texts less its mean, in standard deviations."""
    counts, evicted = np.zeros(VOCAB**COUNT), 0
    drafter = DRAFTERS[drafter](toy, toy_draft) if isinstance(drafter, str) else drafter
    for first in range(0, outcomes, 500):
        options = {"params": SamplingParams(**TOY_PARAMS), "n": 500, "seeds": range(first, first + 500), **pages}
        found, stats = generated(toy, drafter, [PROMPT], COUNT, rule=rule, **options)
        texts = torch.tensor(found)[:, len(PROMPT) :]
        counts += np.bincount((texts * VOCAB ** torch.arange(COUNT - 1, -1, -1)).sum(1), minlength=counts.size)
        evicted += stats.evictions
    assert evicted >= evictions
    return excess(counts, toy_distribution)
