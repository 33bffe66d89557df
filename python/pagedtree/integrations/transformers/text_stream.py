"""The text of tokens that arrive a few at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["TextStream"]

# So many tokens at least are decoded again with the next ones: the text of some depends on those before them.
CONTEXT = 8
# A longer window is cut, at a place where the rest decodes to the same text alone:
MAX_WINDOW = 32
# a character has at most four tokens, a word seldom more than eight.
MAX_CUTS = 8
# A window that has no such place is cut anyway when it is longer than this.
MAX_UNCUT = 64
# An incomplete character lacks at most three tokens.
MAX_MISSING = 3
# The next token changes at most so many characters where spaces are cleaned up: in "n ' ", a "t" joins all.
CLEANED = 4
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes tokens as they come: the return values of `add` and `finish` join to the text of all tokens.

    That text is `tokenizer.decode(tokens, skip_special_tokens=True)`. Characters that later tokens may change are held
    back: an incomplete character and, if the tokenizer cleans up spaces, four characters. If later tokens change
    returned text nevertheless (with byte fallback, a wrong byte after a right character), they are decoded by
    themselves, so that no letter is lost or doubled.

    tokenizer: anything with transformers' `decode`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._left_out: dict[int, bool] = {}
        self._restart([])

    def add(self, tokens: Sequence[int]) -> str:
        """Returns the text that became final since the last call; may be empty."""
        self._window += [token for token in tokens if not self._is_left_out(token)]
        return self._advance(is_last=False)

    def finish(self) -> str:
        """Returns the text held back."""
        return self._advance(is_last=True)

    def _restart(self, tokens: list[int]) -> None:
        self._window = tokens
        # The returned part of the window's text: its first `_settled` tokens without `_held` at the end.
        self._returned, self._settled, self._held = "", 0, ""

    def _advance(self, is_last: bool) -> str:
        decoded = self._decode(self._window)
        count, text = (len(self._window), decoded) if is_last else self._without_incomplete(decoded)
        certain = text[: max(len(text) - CLEANED, 0)] if self._cleans and not is_last else text
        if certain.startswith(self._returned):
            new = certain[len(self._returned) :]
            self._returned, self._settled, self._held = certain, count, text[len(certain) :]
            self._cut(decoded)
            return new
        is_waiting = self._returned.startswith(certain) and len(self._window) <= MAX_UNCUT
        if is_waiting and not is_last:
            return ""
        held = self._held
        self._restart(self._window[self._settled :])
        return held + self._advance(is_last)

    def _without_incomplete(self, whole: str) -> tuple[int, str]:
        """Returns the window's tokens up to a whole character, and their text."""
        count, text = len(self._window), whole
        while text.endswith(INCOMPLETE) and len(self._window) - count < MAX_MISSING:
            count -= 1
            text = self._decode(self._window[:count])
        # Tokens of several bytes may each end within a character, and bytes may be wrong: the last sign is incomplete.
        return (len(self._window), whole[:-1]) if text.endswith(INCOMPLETE) else (count, text)

    def _cut(self, whole: str) -> None:
        if len(self._window) <= MAX_WINDOW:
            return
        rest = len(whole) - len(self._returned)
        last = len(self._window) - CONTEXT
        for start in range(last, max(last - MAX_CUTS, 0), -1):
            text = self._decode(self._window[start:])
            if len(text) > rest and whole.endswith(text):
                break
        else:
            if len(self._window) <= MAX_UNCUT or len(text) < rest:
                return
        self._window, self._settled = self._window[start:], self._settled - start
        self._returned = text[: len(text) - rest]

    def _is_left_out(self, token: int) -> bool:
        """Returns whether it is a special token, which gives other tokens no context."""
        if token not in self._left_out:
            self._left_out[token] = not self._decode([token]) and bool(self.tokenizer.decode([token]))
        return self._left_out[token]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text
