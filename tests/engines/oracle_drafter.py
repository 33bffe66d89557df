"""Drafters that know the texts, so that every path is accepted and half of its rows must move."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from pagedtree.integrations.vllm.drafters import TreeDrafter

__all__ = ["OracleDrafter", "ReadingDrafter"]


class OracleDrafter(TreeDrafter):
    """Drafts the text's next token and a wrong one at each level, in alternating order.

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


class ReadingDrafter(OracleDrafter):
    """Checks the target's states on every rank of a greedy engine.

    Options: texts, and layers, whose outputs `features` keeps in parts for each request.
    """

    defaults: ClassVar[dict[str, Any]] = {"texts": [], "layers": []}
    needs_hidden = True
    on_every_rank = True

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.feature_layers = self.options["layers"]
        self.texts: dict[str, np.ndarray] = {}
        self.features: dict[str, list[Tensor]] = {}
        self.num_checked = 0

    def load_model(self, target_model: Any) -> None:
        self.target = target_model

    def read(self, request_ids: list[str], tokens: list[np.ndarray], starts: list[int], features: list[Tensor]) -> None:
        for request_id, text, start, part in zip(request_ids, tokens, starts, features, strict=True):
            if not any(script[: len(text)] == text[: len(script)].tolist() for script in self.options["texts"]):
                raise RuntimeError("features of another text")
            if start + len(part) >= len(text):
                raise RuntimeError("features of a token that nobody has read")
            if start == 0:  # new, or read again
                self.features[request_id] = []
            if start != sum(map(len, self.features[request_id])):
                raise RuntimeError(f"features from {start} on follow {sum(map(len, self.features[request_id]))}")
            self.features[request_id].append(part)

    def draft(
        self, request_ids: list[str], tokens: list[np.ndarray], hidden: Tensor | None = None
    ) -> list[tuple[list[int], np.ndarray]]:
        roots = [int(text[-1]) for text in tokens]
        if self.target.compute_logits(hidden).argmax(-1).tolist() != roots:
            raise RuntimeError("a hidden state is not that of the root")
        self.num_checked += len(roots)
        for request_id, text in zip(request_ids, tokens, strict=True):
            self.texts[request_id] = text.copy()
            if self.feature_layers and sum(map(len, self.features[request_id])) != len(text) - 1:
                raise RuntimeError("features do not end at the token before the root")
        return super().draft(request_ids, tokens)
