"""transformers models on pagedtree: the attention implementation "pagedtree" (registered by importing this package),
and `generate` with draft trees, also as `custom_generate`.

    from pagedtree.generation.drafters import NgramDrafter
    from pagedtree.integrations.transformers import generate

    sequences, stats = generate(model, input_ids, drafter=NgramDrafter(), max_new_tokens=128)

Needs transformers 4.57 or newer (the extra `pagedtree[transformers]`).
"""

from typing import Any

from pagedtree.generation import drafters
from pagedtree.generation.logprobs import TokenLogprobs
from pagedtree.generation.paged_cache import PagedCache
from pagedtree.generation.stats import GenerationStats, SequenceStats
from pagedtree.generation.token_options import TokenOptions
from pagedtree.integrations.transformers.attention import register
from pagedtree.integrations.transformers.custom_generate import tree_generate
from pagedtree.integrations.transformers.generate import generate
from pagedtree.integrations.transformers.model import ModelDrafter
from pagedtree.integrations.transformers.mtp import MtpDrafter, MtpHead, load_drafter
from pagedtree.integrations.transformers.packed_weights import packed_weights
from pagedtree.integrations.transformers.tensor_parallel import tensor_parallel

__all__ = [
    "GenerationStats",
    "ModelDrafter",
    "MtpDrafter",
    "MtpHead",
    "PagedCache",
    "SequenceStats",
    "TokenLogprobs",
    "TokenOptions",
    "generate",
    "load_drafter",
    "packed_weights",
    "register",
    "tensor_parallel",
    "tree_generate",
]

register()


def __getattr__(name: str) -> Any:
    if name in drafters.__all__:  # imported from here by programs for 0.2
        return getattr(drafters, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
