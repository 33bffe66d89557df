"""A drafter that knows the texts: every path is accepted, and half of its rows have to be moved."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from pagedtree.integrations.vllm.drafters import TreeDrafter

__all__ = ["OracleDrafter"]


class OracleDrafter(TreeDrafter):
    """Two children a level, the next token of the text and a wrong one; which comes first alternates.

    Options: texts, token ids of prompts and outputs.
    """

    defaults: ClassVar[dict[str, Any]] = {"texts": []}

    def draft(self, request_ids: list[str], tokens: list[np.ndarray]) -> list[tuple[list[int], np.ndarray]]:
        return [self.draft_one(text.tolist()) for text in tokens]

    def draft_one(self, known: list[int]) -> tuple[list[int], np.ndarray]:
        following = next((t[len(known) :] for t in self.options["texts"] if t[: len(known)] == known), [])
        draft_tokens: list[int] = []
        parents, node = [-1], 0
        for level, token in enumerate(following[: (self.max_nodes - 1) // 2]):
            wrong = (token + 1) % 2048
            draft_tokens += [token, wrong] if level % 2 else [wrong, token]
            parents += [node, node]
            node = len(draft_tokens) - level % 2
        return draft_tokens, np.array(parents)
