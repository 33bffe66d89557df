"""Drafts that are looked up in the text itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pagedtree import _C, Draft, drafting, ngram_propose
from pagedtree._arguments import refusal
from pagedtree.generation.drafters.base import Drafter, StepResult
from pagedtree.generation.rules import Sampling
from pagedtree.generation.scheduler import GeneratedSequence


class NgramDrafter(Drafter):
    """Prompt lookup: the continuation of an earlier occurrence of the last n-gram (`pagedtree.ngram_propose`).

    Args:
        num_nodes: nodes of a tree, the root included.
        max_depth: tokens of the longest draft; default all nodes for a chain, else half of them.
        max_branches: continuations merged into a tree; 1 gives a chain.
        min_ngram, max_ngram: lengths of the n-grams; longer ones come first.
        remember: also search the predictions at rejected nodes of this many earlier steps.
    """

    is_capturable = True

    def __init__(
        self,
        num_nodes: int = 32,
        *,
        max_depth: int | None = None,
        max_branches: int = 4,
        min_ngram: int = 1,
        max_ngram: int = 4,
        remember: int = 0,
    ) -> None:
        if num_nodes < 2:
            raise refusal("num_nodes", "at least 2 (the root and a draft token)", num_nodes)
        self.max_nodes = num_nodes
        self.max_depth = max_depth or (num_nodes - 1 if max_branches == 1 else num_nodes // 2)
        self.max_branches, self.is_chain = max_branches, max_branches == 1
        self._depth = self.max_depth
        self.min_ngram, self.max_ngram = min_ngram, max_ngram
        self.remember = remember
        self._rejected: dict[int, Tensor] = {}
        # Arguments, draft and `extra` of the last proposal.
        self._proposed: tuple[Tensor, Tensor, Draft, Tensor | None] | None = None

    def begin(self, page_size: int, sampling: Sampling) -> None:
        self._rejected.clear()
        self._proposed = None
        self._depth = self.max_depth

    def propose(self, tokens: Tensor, lengths: Tensor) -> Draft:
        return self._propose(tokens, lengths, self._extra(tokens))

    def propose_captured(self, tokens: Tensor, lengths: Tensor, active: Tensor, rows: Tensor) -> Draft:
        return self._propose(tokens, lengths, active=active)

    def _propose(
        self, tokens: Tensor, lengths: Tensor, extra: Tensor | None = None, active: Tensor | None = None
    ) -> Draft:
        draft = ngram_propose(
            tokens,
            lengths,
            max_nodes=self.max_nodes,
            max_depth=self._depth,
            min_ngram=self.min_ngram,
            max_ngram=self.max_ngram,
            max_branches=self.max_branches,
            extra=extra,
            active=active,
        )
        self._proposed = tokens, lengths, draft, extra
        return draft

    def confidence(self) -> Tensor | None:
        """Returns fp32 [N], higher after longer matches (the score of SuffixDecoding, Oliaro et al., 2024)."""
        return None if self._proposed is None else torch.from_numpy(self._copied()[1])

    def same_before(self) -> np.ndarray:
        """Returns [B] on the host: match length, at most `max_ngram`, before each text's first draft; 0 without one."""
        assert self._proposed is not None
        trees = self._proposed[2].trees
        offsets, child = trees.cu_nodes.cpu().numpy(), trees.first_child.cpu().numpy()
        roots = offsets[:-1]
        first = child[np.minimum(roots, len(child) - 1)]
        drafted = np.flatnonzero((np.diff(offsets) > 1) & (first >= 0))
        same = np.zeros(len(roots), dtype=np.int64)
        same[drafted] = self._copied()[0][roots[drafted] + first[drafted]]
        return same

    def _copied(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns each node's match length before an earlier copy, and the joint log-probability it implies."""
        assert self._proposed is not None
        tokens, lengths, draft, _ = self._proposed
        return _C.copied_text(
            tokens.cpu().numpy(),
            lengths.cpu().numpy(),
            draft.trees.cu_nodes.cpu().numpy(),
            draft.trees.parents.cpu().numpy(),
            draft.draft_tokens.cpu().numpy(),
            self.max_ngram,
        )

    def observe(self, result: StepResult) -> None:
        if not self.remember or result.trees.max_nodes == 1:
            return
        predicted, path = result.logits.argmax(-1), result.verdict.accept_index
        new = drafting.rejected_predictions(result.trees, result.draft_tokens, predicted, path, context=self.max_ngram)
        for sequence, text in zip(result.sequences, new, strict=True):
            history = self._rejected.get(sequence.index, text[:0])
            self._rejected[sequence.index] = torch.cat([history, text])[-self.remember * text.shape[0] :]

    def forget(self, sequence: GeneratedSequence) -> None:
        self._rejected.pop(sequence.index, None)

    def _extra(self, tokens: Tensor) -> Tensor | None:
        if not self._rejected:
            return None
        texts = [self._rejected.get(sequence.index, tokens[0, :0]) for sequence in self._selected]
        width = max(text.shape[0] for text in texts)
        return torch.stack([F.pad(text, (width - text.shape[0], 0), value=-1) for text in texts])
