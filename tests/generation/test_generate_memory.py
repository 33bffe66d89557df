"""Calls of `generate` leave no memory behind."""

from __future__ import annotations

import pytest
from support.memory import allocated, growth, resident

pytest.importorskip("transformers")

from support.drafters import SUBJECTS
from support.models import SAMPLING, prompts_of

from pagedtree.integrations.transformers import ModelDrafter, generate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CALLS = 300


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
