"""transformers models on pagedtree: the attention implementation "pagedtree" (registered by importing this package),
and `generate` over a paged cache with draft trees.

    from pagedtree.integrations.transformers import NgramDrafter, generate

    sequences, stats = generate(model, input_ids, drafter=NgramDrafter(), max_new_tokens=128)

Needs transformers 4.57 or newer (the extra `pagedtree[transformers]`).
"""

from pagedtree.integrations.transformers.attention import register
from pagedtree.integrations.transformers.drafters import (
    Drafter,
    MedusaDrafter,
    NgramDrafter,
    NoDrafter,
    StepResult,
)
from pagedtree.integrations.transformers.generate import generate
from pagedtree.integrations.transformers.medusa import MedusaHeads, medusa_tree
from pagedtree.integrations.transformers.model_drafter import ModelDrafter
from pagedtree.integrations.transformers.paged_cache import PagedCache
from pagedtree.integrations.transformers.stats import GenerationStats, SequenceStats

__all__ = [
    "Drafter",
    "GenerationStats",
    "MedusaDrafter",
    "MedusaHeads",
    "ModelDrafter",
    "NgramDrafter",
    "NoDrafter",
    "PagedCache",
    "SequenceStats",
    "StepResult",
    "generate",
    "medusa_tree",
    "register",
]

register()
