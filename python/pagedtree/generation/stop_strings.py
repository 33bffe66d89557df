"""Stop strings of `generate`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pagedtree._arguments import refusal

# Extra tokens decoded before a possible stop string: some decode to nothing or merge with the next.
CONTEXT = 8


class StopStrings:
    """A search for the token that completes the first stop string.

    strings: one or several, none of them empty. tokenizer: the model's; anything with transformers' `decode`.
    """

    def __init__(self, strings: str | Sequence[str], tokenizer: Any) -> None:
        several: Any = [strings] if isinstance(strings, str) else strings
        self.strings: list[str] = list(several) if isinstance(several, Iterable) else [several]
        if not all(isinstance(string, str) and string for string in self.strings):
            raise refusal("stop_strings", "texts that are not empty", repr(strings))
        if not callable(getattr(tokenizer, "decode", None)):
            raise refusal("tokenizer", "the model's tokenizer with stop_strings", type(tokenizer).__name__)
        self.tokenizer = tokenizer
        # Each token of a stop string has at least one of its bytes.
        self.window = max((len(string.encode()) for string in self.strings), default=0) + CONTEXT

    def end(self, known: list[int], new: list[int]) -> int | None:
        """Returns how many new tokens remain; None if no stop string ends in them. known: the tokens before them."""
        tail = known[-self.window :]
        if not self._occur([*tail, *new]):
            return None
        return next((end for end in range(1, len(new)) if self._occur([*tail, *new[:end]])), len(new))

    def _occur(self, tokens: list[int]) -> bool:
        text = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self.strings)
