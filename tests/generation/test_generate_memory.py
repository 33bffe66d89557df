"""Calls of `generate` leave no memory behind, whichever drafter serves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_case import allocated, growth, resident

pytest.importorskip("transformers")

from block_case import block_model
from generate_case import SAMPLING, prompts_of, tiny, tiny_eagle

from pagedtree.integrations.transformers import (
    BlockDrafter,
    CombinedDrafter,
    EagleDrafter,
    MedusaDrafter,
    MedusaHeads,
    ModelDrafter,
    NgramDrafter,
    generate,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CALLS = 300


def medusa(model: Any) -> MedusaDrafter:
    heads = MedusaHeads(128, 3, model.lm_head)
    torch.nn.init.normal_(heads.weight, std=0.05, generator=torch.Generator().manual_seed(3))
    return MedusaDrafter(heads, 9)


def draft_model(**options: Any) -> ModelDrafter:
    return ModelDrafter(tiny(1, num_hidden_layers=1), num_nodes=8, depth=3, width=2, **options)


DRAFTERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: None,
    "n-gram": lambda model: NgramDrafter(8),
    "draft model": lambda model: draft_model(),
    "draft model that draws": lambda model: draft_model(law="swor"),
    "Medusa": medusa,
    "EAGLE": lambda model: EagleDrafter(tiny_eagle(model), num_nodes=8, depth=3, width=2),
    "block": lambda model: BlockDrafter(block_model(model), num_nodes=8, width=2),
    "combined": lambda model: CombinedDrafter(draft_model(), NgramDrafter(5, max_branches=1)),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_generate_does_not_grow(name: str) -> None:
    """The strings of one step's verification had 144 bytes, what a call keeps of itself has kilobytes."""
    model = tiny(0)
    drafter, prompts = DRAFTERS[name](model), prompts_of((5, 9))

    def call() -> None:
        generate(model, prompts, drafter=drafter, max_new_tokens=8, params=SAMPLING, seeds=[3, 4])

    for _ in range(60):
        call()
    before = allocated()
    # Pages come into memory late, but what is lost in each call is lost in each part of the calls.
    assert min(growth(call, CALLS // 3, resident, warm_up=0) for _ in range(3)) < 500
    assert (allocated() - before) / CALLS < 100
