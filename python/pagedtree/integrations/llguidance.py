"""llguidance's grammars on draft trees. Needs llguidance, at least 1.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np

from pagedtree._arguments import expect_type, refusal
from pagedtree.grammars import DepthFirstMatcher

__all__ = ["LLGuidanceMatcher"]


class LLGuidanceMatcher(DepthFirstMatcher):
    """One sequence's `llguidance.LLMatcher`, for `pagedtree.grammars.GrammarMasks`.

        tokenizer = llguidance.hf.from_tokenizer(hf_tokenizer)
        space = {"whitespace_pattern": "[ \\n]{0,20}"}
        matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(schema, space))
        masks = GrammarMasks([LLGuidanceMatcher(matcher, tokenizer)], vocab_size=config.vocab_size)

    Rows are computed without Python's global lock; where the grammar leaves no choice of bytes, only the tokenizer's
    own tokens are allowed. A grammar also ends where nothing can follow a complete text.

    matcher: llguidance's own, to which direct calls count here, too. vocab_size, stop_token_ids: the tokenizer's.
    """

    def __init__(self, matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer) -> None:
        """tokenizer: the matcher's. Raises TypeError for other types, ValueError for a matcher with an error."""
        expect_type("matcher", matcher, llguidance.LLMatcher)
        expect_type("tokenizer", tokenizer, llguidance.LLTokenizer)
        if matcher.is_error():
            raise refusal("matcher", "one without error", _first_line(matcher))
        self.matcher = matcher
        self.vocab_size = tokenizer.vocab_size
        # Releases that know a single one have no list.
        self.stop_token_ids: Sequence[int] = list(getattr(tokenizer, "eos_tokens", [tokenizer.eos_token]))

    def fill_row(self, row: np.ndarray[Any, Any]) -> None:
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._expect_no_error()

    def accept(self, token: int) -> bool:
        # An id outside the vocabulary would end the matcher with an error.
        accepted = 0 <= token < self.vocab_size and self.matcher.try_consume_tokens([token]) == 1
        self._expect_no_error()
        return accepted

    def rollback(self, count: int) -> None:
        self.matcher.rollback(count)
        self._expect_no_error()

    def is_terminated(self) -> bool:
        self._expect_no_error()  # which llguidance counts as an end, too
        return bool(self.matcher.is_stopped())

    def _expect_no_error(self) -> None:
        if self.matcher.is_error():
            raise RuntimeError(f"llguidance: {_first_line(self.matcher)}")


def _first_line(matcher: llguidance.LLMatcher) -> str:
    return (matcher.get_error() or "").partition("\n")[0][:200]
