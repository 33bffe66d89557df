"""`generate(rule=...)`: lossless rules follow the model's distribution, at temperature 0 its greedy text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.exact import LIMIT
from support.models import LENGTHS, SAMPLING, generated, prompts_of, tiny
from support.toy_texts import CASES, CORE, DRAFTERS, PROMPT, TOY, VOCAB, distribution_of_texts, toy_excess

from pagedtree import DraftTree, TreeBatch
from pagedtree.generation.rules import Sampling
from pagedtree.generation.tree_tuner import Plan, TreeTuner
from pagedtree.integrations.transformers import ModelDrafter, generate

OUTCOMES = pytest.mark.parametrize("outcomes", [1000, pytest.param(50_000, marks=pytest.mark.stats)])


@pytest.fixture(scope="module")
def toy():
    return tiny(0, **TOY)


@pytest.fixture(scope="module")
def toy_draft():
    return tiny(5, **TOY)


@pytest.fixture(scope="module")
def toy_distribution(toy):
    return distribution_of_texts(toy)


@pytest.mark.parametrize(
    ("rule", "drafter"), [pytest.param(*case, marks=[] if case in CORE else pytest.mark.slow) for case in CASES]
)
@OUTCOMES
def test_texts_follow_the_models_distribution(toy, toy_draft, toy_distribution, rule, drafter, outcomes):
    assert toy_excess(toy, toy_draft, toy_distribution, rule, drafter, outcomes) < LIMIT


# A budget of nodes: which of the drafted ones are verified -----------------------------------------------------------


@pytest.fixture
def budget(monkeypatch):
    """Verifies the likelier half of the nodes."""
    plan = TreeTuner.plan
    monkeypatch.setattr(TreeTuner, "plan", lambda self, *rest, **more: replace(plan(self, *rest, **more), depth=5))
    monkeypatch.setattr(Plan, "count", lambda self, worth: len(worth) // 2)


NARROWED = [("rejection", "swor tree"), ("traversal", "iid tree")]
NARROWED += [
    pytest.param(*case, marks=pytest.mark.slow) for case in (("rejection", "top-k tree"), ("block", "iid chain"))
]


@pytest.mark.parametrize(("rule", "drafter"), NARROWED)
@OUTCOMES
def test_a_budget_leaves_the_distribution_alone(budget, toy, toy_draft, toy_distribution, rule, drafter, outcomes):
    assert toy_excess(toy, toy_draft, toy_distribution, rule, drafter, outcomes, tree="auto") < LIMIT


def heedless(*probabilities: float):
    """Every next token has these probabilities."""
    model = tiny(0, **{**TOY, "vocab_size": len(probabilities)})
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(torch.tensor(probabilities).log()[:, None] / TOY["hidden_size"])
    return model


@pytest.mark.stats
@pytest.mark.parametrize(
    ("rule", "drafter", "num_pages"),
    [("rejection", "swor tree", 300), ("block", "iid chain", 35), ("traversal", "iid tree", 300)],
)
def test_evictions_leave_the_distribution_alone(toy, toy_draft, toy_distribution, rule, drafter, num_pages):
    """Evicted sequences resume with a token that was not drafted."""
    pages = {"page_size": 1, "num_pages": num_pages, "evictions": 100}
    assert toy_excess(toy, toy_draft, toy_distribution, rule, drafter, 10_000, **pages) < LIMIT


# Draft models whose vocabulary is padded further than the target's, or less ------------------------------------------

PADDED = {3: (0.5, 0.3, 0.2), 4 + 2: (0.1, 0.2, 0.1, 0.1, 0.3, 0.2)}
PADDED_DRAFTERS = {
    "coupled": {"num_nodes": 7, "depth": 3, "width": 2},
    "iid": {"num_nodes": 7, "branching": [3, 2]},
    "swor": {"num_nodes": 25, "branching": [5, 4]},  # more children than tokens: every token is drawn
}
PADDED_RULES = [
    ("sampled", "coupled"),
    *[(rule, law) for rule in ("rejection", "traversal") for law in ("iid", "swor")],
]


def padded_drafter(vocab_size: int, law: str) -> ModelDrafter:
    return ModelDrafter(heedless(*PADDED[vocab_size]), law=law, **PADDED_DRAFTERS[law])


@pytest.mark.parametrize(
    ("rule", "law", "vocab_size"),
    [  # one size for each rule and law in the core suite
        pytest.param(rule, law, vocab_size, marks=[] if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, (rule, law) in enumerate(PADDED_RULES)
        for j, vocab_size in enumerate(PADDED)
    ],
)
def test_draft_models_of_padded_vocabularies(toy, toy_distribution, rule, law, vocab_size):
    assert toy_excess(toy, None, toy_distribution, rule, padded_drafter(vocab_size, law), 1000) < LIMIT


def test_other_vocabularies_are_refused_before_the_first_pass(toy, monkeypatch):
    passes = []
    monkeypatch.setattr(type(toy), "forward", lambda *args, **kwargs: passes.append(args))
    drafter = ModelDrafter(tiny(0, **{**TOY, "vocab_size": VOCAB + 1025}))
    with pytest.raises(ValueError, match=r"drafter: expected .* vocabulary, 4 tokens up to 1024 of padding, got 1029"):
        generated(toy, drafter, [PROMPT], 2)
    assert not passes


@pytest.mark.stats
@pytest.mark.parametrize(("rule", "is_biased"), [("rejection", False), ("block", True)])
def test_joint_rules_need_fresh_noise_each_step(monkeypatch, toy, toy_draft, toy_distribution, rule, is_biased):
    """Noise of a position alone biases "block", as tokens after a rejected draft are drawn again."""
    monkeypatch.setattr(Sampling, "draft_seeds", lambda sampling, start: sampling.seeds)
    assert (toy_excess(toy, toy_draft, toy_distribution, rule, "iid chain", 150_000) > LIMIT) == is_biased


def test_typical_acceptance_is_lossy(toy, toy_draft, toy_distribution):
    assert toy_excess(toy, toy_draft, toy_distribution, "typical", "top-k tree", 500) > LIMIT
    assert "not lossless" in generate.__doc__


def test_custom_drafter_in_fixed_steps(toy, toy_distribution):
    """A foreign drafter returns tokens, trees and distributions, with padding; undeclared ones are refused."""

    class Uniform:
        max_nodes, draft_law = 3, "iid"

        def __init__(self):
            self.generator = torch.Generator().manual_seed(4)

        def propose(self, tokens, lengths):
            batch = lengths.shape[0]
            trees = TreeBatch.from_trees([DraftTree.full([2])] * batch, capacity=3 * batch + 5)
            drafts = torch.randint(VOCAB, (3 * batch + 5,), generator=self.generator)
            return drafts, trees, torch.full((3 * batch + 5, VOCAB), 1 / VOCAB)

    assert toy_excess(toy, None, toy_distribution, "traversal", Uniform(), 1500) < LIMIT
    Uniform.draft_law = "drawn"
    with pytest.raises(ValueError, match="drafter: expected a draft_law of onehot, iid, swor, coupled, got 'drawn'"):
        generated(toy, Uniform(), [PROMPT], 2)
    Uniform.draft_law, propose = "swor", Uniform.propose
    Uniform.propose = lambda self, tokens, lengths: (*propose(self, tokens, lengths)[:2], None)
    with pytest.raises(ValueError, match=r"draft_probs: expected a Tensor, the .* that the drafts were drawn from"):
        generated(toy, Uniform(), [PROMPT], 3, params=SAMPLING, rule="rejection")


# Any batch ------------------------------------------------------------------------------------------------------------

IN_ANY_BATCH = [("sampled", "coupled tree"), ("rejection", "swor tree"), ("traversal", "iid tree")]
FITTING = [
    *IN_ANY_BATCH,
    *[("rejection", "n-gram"), ("block", "top-k chain"), ("block", "iid chain"), ("traversal", "swor tree")],
]


@pytest.fixture(scope="module")
def draft_model():
    return tiny(1, num_hidden_layers=1)


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [  # each law once in the core suite; the other rules differ within the verify ops alone
        pytest.param(*case, marks=[] if case in IN_ANY_BATCH else pytest.mark.slow)
        for case in [*FITTING, ("typical", "top-k tree")]
    ],
)
def test_rules_in_any_batch(model, draft_model, rule, drafter):
    """Seeds reproduce the text in any batch, and with few pages in the same one."""
    prompts = prompts_of(LENGTHS)

    def texts(prompts, seeds, **options):
        subject, fixed = DRAFTERS[drafter](model, draft_model), {"params": SAMPLING, "n": 2, "page_size": 7}
        return generated(model, subject, prompts, 14, rule=rule, seeds=seeds, **fixed, **options)

    whole, _ = texts(prompts, range(8))
    alone = [texts([prompt], range(2 * b, 2 * b + 2))[0] for b, prompt in enumerate(prompts)]
    assert whole == [text for pair in alone for text in pair]
    few = {"num_pages": 14, "max_batch_tokens": 16}
    (evicted, stats), (again, _) = texts(prompts, range(8), **few), texts(prompts, range(8), **few)
    assert evicted == again and stats.evictions > 0
    assert [len(text) for text in evicted] == [len(text) for text in whole]
