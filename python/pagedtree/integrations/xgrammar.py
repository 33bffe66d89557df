"""xgrammar's grammars on draft trees. Needs xgrammar, at least 0.2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xgrammar

from pagedtree._arguments import expect_type, refusal
from pagedtree.grammars import TokenTree

__all__ = ["XGrammarMatcher"]


class XGrammarMatcher:
    """One sequence's `xgrammar.GrammarMatcher`, for `pagedtree.grammars.GrammarMasks`.

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=config.vocab_size)
        compiled = xgrammar.GrammarCompiler(info).compile_json_schema(schema, max_whitespace_cnt=20)
        masks = GrammarMasks([XGrammarMatcher(xgrammar.GrammarMatcher(compiled), info.vocab_size)], config.vocab_size)

    A tree is one call of `traverse_draft_tree`, without Python's global lock. Where the grammar has ended, by a stop
    token or, with terminate_without_stop_token, its last token, only stop tokens are allowed. A captured span is
    recorded by `accept` alone.

    matcher: xgrammar's own, to which direct calls count here, too. vocab_size: of the compiling `TokenizerInfo`.
    """

    def __init__(self, matcher: xgrammar.GrammarMatcher, vocab_size: int) -> None:
        """Raises TypeError for other types, ValueError for a vocabulary of another width than the matcher's masks."""
        expect_type("matcher", matcher, xgrammar.GrammarMatcher)
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
            raise refusal("vocab_size", "an integer", f"{vocab_size!r:.40}", TypeError)
        self.matcher = matcher
        self.vocab_size = vocab_size
        self.stop_token_ids: Sequence[int] = list(matcher.stop_token_ids)
        if vocab_size < 1 or not self._masks_have_words(-(-vocab_size // 32)):
            raise refusal("vocab_size", "that of the grammar's TokenizerInfo", vocab_size)

    def fill_tree(self, tree: TokenTree, mask: np.ndarray[Any, Any]) -> None:
        tokens, parents, first_child, next_sibling = tree
        links = torch.from_numpy(first_child), torch.from_numpy(next_sibling)
        self.matcher.traverse_draft_tree(*links, torch.from_numpy(tokens), torch.from_numpy(mask))
        # xgrammar clears the row of a draft that the grammar forbids, as it does where the grammar has ended.
        # By numpy: torch would start a thread pool for each calling thread.
        words, bits = np.divmod(np.maximum(tokens, 0), 32)
        is_forbidden = mask[parents, words] >> bits & 1 == 0
        mask[is_forbidden & (parents >= 0)] = -1

    def accept(self, token: int) -> bool:
        return bool(self.matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)

    def is_terminated(self) -> bool:
        return bool(self.matcher.is_terminated())

    def _masks_have_words(self, words: int) -> bool:
        # A matcher that has ended fills no mask.
        if self.matcher.is_terminated():
            return True
        try:
            self.matcher.fill_next_token_bitmask(torch.empty((1, words), dtype=torch.int32))
        except RuntimeError:
            return False
        return True
