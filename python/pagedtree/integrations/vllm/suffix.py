"""Prompt lookup with a memory over requests, for vLLM's `custom_class` method."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from pagedtree.generation.drafters import SuffixDrafter
from pagedtree.integrations.vllm.drafters import NgramTreeDrafter
from pagedtree.integrations.vllm.proposals import Proposal, proposals_of
from pagedtree.integrations.vllm.texts import Texts

__all__ = ["SuffixTreeDrafter"]


class SuffixTreeDrafter(NgramTreeDrafter):
    """Prompt lookup in the request's text and in the answers of finished requests.

    Options: those of `pagedtree.integrations.transformers.SuffixDrafter` but `memory` and `num_nodes`. The memory is
    the first rank's, in the host's memory.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "max_tokens": 1_000_000,
        "max_depth": None,
        "max_branches": 4,
        "min_ngram": 1,
        "max_ngram": 16,
    }

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.texts = Texts()

    def make(self) -> SuffixDrafter:
        return SuffixDrafter(num_nodes=self.max_nodes, **self.options)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self.texts.forget(request_id, self.drafter)

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[Proposal]:
        self.drafter.select(self.texts.sequences(request_ids, tokens))
        return proposals_of(self.drafter, tokens, torch.device("cpu"))
