"""Every drafter works under another default dtype of torch, as a copy, and leaves no memory behind."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.devices import default_dtype
from support.drafters import NAMES, SUBJECTS
from support.memory import allocated, growth, resident
from support.models import LENGTHS, SAMPLING, generated, prompts_of

from pagedtree.generation.drafters import CombinedDrafter, Drafter
from pagedtree.generation.tree_tuner import Plan
from pagedtree.integrations.transformers import ModelDrafter, generate

COUNT = 12
OURS = [name for name in NAMES["full"] if isinstance(SUBJECTS["full"].drafter(name), Drafter)]


def steps(subject, drafter, **options):
    """Returns drafts and confidence of each step."""
    records = []
    options["on_step"] = lambda result: records.append((result.draft_tokens.tolist(), drafter.confidence()))
    texts, _ = generated(subject.model, drafter, prompts_of(LENGTHS)[:2], COUNT, **options)
    assert texts == [text[: length + COUNT] for text, length in zip(subject.texts, LENGTHS[:2], strict=False)]
    return records


@pytest.mark.parametrize("name", OURS)
def test_under_another_default_dtype(name, monkeypatch):
    subject = SUBJECTS["full"]
    expected = steps(subject, subject.drafter(name), tree=None)
    drafter = subject.drafter(name)
    with default_dtype(torch.bfloat16):
        found = steps(subject, drafter, tree=None)
        monkeypatch.setattr(Plan, "count", lambda plan, worth: len(worth) // 2)
        steps(subject, drafter, tree="auto")
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, a), (_, b) in zip(found, expected, strict=True):
        assert a is b or torch.equal(a, b)


@pytest.mark.parametrize("name", OURS)
def test_copies(name):
    """An unused drafter's copy drafts as a new one, a used one's as its original."""
    subject = SUBJECTS["full"]
    drafter, copies = subject.drafter(name), [subject.drafter(name)]
    for _ in range(2):
        copies += [copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))]
        steps(subject, drafter, tree="auto")
        drafted = [[tokens for tokens, _ in steps(subject, other, tree=None)] for other in copies]
        assert all(draft == drafted[0] for draft in drafted)
        copies = []


class Foreign:
    """Has the members of a `Drafter`."""

    def __init__(self, drafter):
        self._drafter = drafter

    def __getattr__(self, name):
        return getattr(self._drafter, name)


@pytest.mark.parametrize("name", ["EAGLE", "draft model"])
def test_objects_of_other_classes(name):
    """A drafter of a foreign class keeps its state and its tuner's costs."""
    subject = SUBJECTS["full"]
    foreign = Foreign(subject.drafter(name))
    found, expected = (steps(subject, drafter, tree=None) for drafter in (foreign, subject.drafter(name)))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    steps(subject, foreign, tree="auto")
    assert vars(foreign)["tuner"].tuner.costs
    steps(subject, CombinedDrafter(foreign, costs=(0.0, 0.0)), tree=None)
    with pytest.raises(TypeError, match="drafter: expected an object with propose"):
        generate(subject.model, prompts_of(LENGTHS), drafter=object(), max_new_tokens=2)


# ---- memory

CALLS = 300


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "ngram tree", "draft model", "drawn", "medusa", "EAGLE", "block", "combined"])
def test_generate_does_not_grow(name: str) -> None:
    """The bounds find leaks of 144 bytes a step or kilobytes a call."""
    full, prompts = SUBJECTS["full"], prompts_of((5, 9))
    drawn = ModelDrafter(full.draft_model, law="swor", num_nodes=8, depth=3, width=2)
    drafter = drawn if name == "drawn" else full.drafter(name)

    def call() -> None:
        generate(full.model, prompts, drafter=drafter, max_new_tokens=8, params=SAMPLING, seeds=[3, 4])

    for _ in range(60):
        call()
    before = allocated()
    # Pages become resident late, but a leak of each call shows in each third.
    assert min(growth(call, CALLS // 3, resident, warm_up=0) for _ in range(3)) < 500
    assert (allocated() - before) / CALLS < 100
