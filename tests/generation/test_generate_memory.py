"""Calls of `generate` leave no memory behind, whichever drafter serves them."""

from __future__ import annotations

import pytest
from memory_case import allocated, growth, resident

pytest.importorskip("transformers")

from generate_case import SAMPLING, prompts_of
from subject_case import SUBJECTS

from pagedtree.integrations.transformers import ModelDrafter, generate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CALLS = 300


@pytest.mark.parametrize("name", ["none", "ngram tree", "draft model", "drawn", "medusa", "EAGLE", "block", "combined"])
def test_generate_does_not_grow(name: str) -> None:
    """The strings of one step's verification had 144 bytes, what a call keeps of itself has kilobytes."""
    full, prompts = SUBJECTS["full"], prompts_of((5, 9))
    drawn = ModelDrafter(full.draft_model, law="swor", num_nodes=8, depth=3, width=2)
    drafter = drawn if name == "drawn" else full.drafter(name)

    def call() -> None:
        generate(full.model, prompts, drafter=drafter, max_new_tokens=8, params=SAMPLING, seeds=[3, 4])

    for _ in range(60):
        call()
    before = allocated()
    # Pages come into memory late, but what is lost in each call is lost in each part of the calls.
    assert min(growth(call, CALLS // 3, resident, warm_up=0) for _ in range(3)) < 500
    assert (allocated() - before) / CALLS < 100
