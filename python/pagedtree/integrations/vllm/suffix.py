"""Prompt lookup with a memory over requests."""

from __future__ import annotations

from typing import Any, ClassVar

from pagedtree.generation.drafters import SuffixDrafter
from pagedtree.integrations.vllm.drafters import NGRAMS, KnowsTexts, NgramTreeDrafter, WithoutModel


class SuffixTreeDrafter(WithoutModel, KnowsTexts):
    """Prompt lookup in the request's text and in the answers of finished requests.

    Options: see docs/integrations/vllm.md.
    """

    defaults: ClassVar[dict[str, Any]] = {"max_tokens": 1_000_000, **NgramTreeDrafter.defaults, "max_ngram": 16}
    largest: ClassVar[dict[str, int]] = {**NGRAMS, "max_tokens": 2**30}

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.drafter = SuffixDrafter(num_nodes=self.max_nodes, **self.options)
        self.max_depth = self.drafter.max_depth
