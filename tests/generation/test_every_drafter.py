"""Every drafter works under another default dtype of torch, and as a copy."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")

from support.devices import default_dtype
from support.drafters import NAMES, SUBJECTS
from support.models import LENGTHS, NEW_TOKENS, lists, prompts_of

from pagedtree.generation.drafters import CombinedDrafter, Drafter
from pagedtree.generation.tree_tuner import Plan
from pagedtree.integrations.transformers import generate

pytestmark = pytest.mark.usefixtures("one_thread")

OURS = [name for name in NAMES["full"] if isinstance(SUBJECTS["full"].drafter(name), Drafter)]


def steps(subject, drafter, **options):
    """Returns drafts and confidence of each step."""
    records = []
    options["on_step"] = lambda result: records.append((result.draft_tokens.tolist(), drafter.confidence()))
    sequences, _ = generate(subject.model, prompts_of(LENGTHS), drafter=drafter, max_new_tokens=NEW_TOKENS, **options)
    assert lists(sequences) == subject.texts
    return records


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OURS)
def test_under_another_default_dtype(name, dtype, monkeypatch):
    subject = SUBJECTS["full"]
    expected = steps(subject, subject.drafter(name), tree=None)
    drafter = subject.drafter(name)
    with default_dtype(dtype):
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
