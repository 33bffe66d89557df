"""`generate(rule=...)`: the text follows the model's law under every lossless rule, whatever drafts, pages and batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from generate_case import LENGTHS, NEW_TOKENS, SAMPLING, greedy, lists, prompts_of, tiny
from test_statistics import LIMIT, excess

from pagedtree import DraftTree, SamplingParams, reference
from pagedtree.integrations.transformers import MedusaDrafter, MedusaHeads, ModelDrafter, NgramDrafter, generate
from pagedtree.integrations.transformers.rules import Sampling

pytestmark = pytest.mark.usefixtures("one_thread")

# A model whose texts can all be listed --------------------------------------------------------------------------------

VOCAB = 4
PROMPT = [1, 3, 0, 1, 3, 2, 1]
COUNT = 4  # tokens: the first is read off the prompt, the others take at least one tree of drafts and often two
TOY = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
       "num_key_value_heads": 1}  # fmt: skip
TOY_PARAMS = {"temperature": 1.3, "top_p": 0.98}


@pytest.fixture(scope="module")
def toy():
    return tiny(0, **TOY)


@pytest.fixture(scope="module")
def toy_draft():
    return tiny(5, **TOY)


@pytest.fixture(scope="module")
def toy_law(toy):
    """The probability of each of the VOCAB ** COUNT continuations."""
    law = np.ones(1)
    for length in range(COUNT):
        prefixes = torch.tensor([[*PROMPT, *tail] for tail in itertools.product(range(VOCAB), repeat=length)])
        with torch.no_grad():
            rows = toy(prefixes).logits[:, -1]
        law = np.stack([p * reference.law(row, **TOY_PARAMS) for p, row in zip(law, rows.numpy(), strict=True)]).ravel()
    return law


def toy_heads(toy):
    heads = MedusaHeads(64, 2, toy.lm_head)
    torch.nn.init.normal_(heads.weight, std=0.1, generator=torch.Generator().manual_seed(3))
    return heads


DRAFTERS = {
    "none": lambda toy, draft: None,
    "n-gram": lambda toy, draft: NgramDrafter(4, max_branches=1),
    "Medusa": lambda toy, draft: MedusaDrafter(toy_heads(toy), DraftTree.full([2, 1])),
    "top-k chain": lambda toy, draft: ModelDrafter(draft, num_nodes=3, depth=2, width=1),
    "top-k tree": lambda toy, draft: ModelDrafter(draft, num_nodes=6, depth=2, width=2),
    "iid chain": lambda toy, draft: ModelDrafter(draft, law="iid", num_nodes=4, depth=3, width=1),
    "iid tree": lambda toy, draft: ModelDrafter(draft, law="iid", num_nodes=7, branching=[3, 2]),
    "swor tree": lambda toy, draft: ModelDrafter(draft, law="swor", num_nodes=9, branching=[3, 2]),
    "coupled tree": lambda toy, draft: ModelDrafter(draft, law="coupled", num_nodes=7, depth=3, width=2),
}
CASES = [
    *[("sampled", name) for name in ("iid tree", "coupled tree")],  # test_generate has the others
    *[("rejection", name) for name in DRAFTERS if name != "coupled tree"],
    *[("block", name) for name in ("none", "n-gram", "top-k chain", "iid chain")],
    *[("traversal", name) for name in ("iid chain", "iid tree", "swor tree")],
]


def toy_excess(toy, toy_draft, toy_law, rule, drafter, outcomes, **options) -> float:
    """How far a sample of texts is off their law: chi-square less its mean, in standard deviations."""
    seen = np.zeros(VOCAB**COUNT)
    drafter = DRAFTERS[drafter](toy, toy_draft) if isinstance(drafter, str) else drafter
    for first in range(0, outcomes, 500):
        sequences, _ = generate(
            toy, [PROMPT], drafter=drafter, max_new_tokens=COUNT, params=SamplingParams(**TOY_PARAMS), rule=rule,
            n=500, seeds=range(first, first + 500), **options,
        )  # fmt: skip
        texts = torch.stack(sequences)[:, len(PROMPT) :]
        seen += np.bincount((texts * VOCAB ** torch.arange(COUNT - 1, -1, -1)).sum(1), minlength=seen.size)
    return excess(seen, toy_law)


@pytest.mark.parametrize(("rule", "drafter"), CASES)
def test_texts_follow_the_models_law(toy, toy_draft, toy_law, rule, drafter):
    assert toy_excess(toy, toy_draft, toy_law, rule, drafter, 2500) < LIMIT


@pytest.mark.stats
@pytest.mark.parametrize(("rule", "drafter"), CASES)
def test_texts_follow_the_models_law_closely(toy, toy_draft, toy_law, rule, drafter):
    assert toy_excess(toy, toy_draft, toy_law, rule, drafter, 100_000) < LIMIT
