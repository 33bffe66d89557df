"""The live output of `python -m pagedtree generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from pagedtree.generation.stats import decoding_rate
from pagedtree.integrations.transformers.text_stream import TextStream

__all__ = ["Printer"]


class Printer:
    """Prints a single outcome as it comes. Several outcomes are printed at the end.

    Progress goes to standard error, unless a terminal shows the text itself. The rate excludes prefill and each
    outcome's first token. num_sequences: outcomes. max_tokens: of all together. tokens: each outcome's so far.
    """

    def __init__(self, tokenizer: Any, num_sequences: int, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[list[int]] = [[] for _ in range(num_sequences)]
        self._stream = TextStream(tokenizer) if num_sequences == 1 else None
        self._max_tokens, self._tenths, self._first_time = max_tokens, 0, 0.0
        self._shows_progress = num_sequences > 1 or not sys.stdout.isatty()
        self._is_live = sys.stderr.isatty()  # one line is written again and again there, else ten lines in all

    def add(self, sequence: int, tokens: Sequence[int]) -> None:
        """Prints the outcome's next tokens: a callback of `generate`."""
        self._first_time = self._first_time or time.perf_counter()
        self.tokens[sequence] += tokens
        if self._shows_progress:
            self._show_progress()
        if self._stream is not None:
            text = self._stream.add(tokens)
            if text:
                print(text, end="", flush=True)

    def finish(self) -> None:
        """Prints the rest."""
        if self._shows_progress and self._is_live:
            print(file=sys.stderr)
        if self._stream is not None:
            print(self._stream.finish())
            return
        for sequence, tokens in enumerate(self.tokens):
            print(f"--- outcome {sequence}\n{self.tokenizer.decode(tokens, skip_special_tokens=True)}")

    def _show_progress(self) -> None:
        count = sum(map(len, self.tokens))
        is_next_tenth = 10 * count // self._max_tokens > self._tenths
        self._tenths = 10 * count // self._max_tokens
        if self._is_live or is_next_tenth:
            rate = decoding_rate(map(len, self.tokens), time.perf_counter() - self._first_time)
            line = f"{count} of at most {self._max_tokens} tokens" + (f", {rate:.1f} tokens/s" if rate else "")
            begin, end = ("\r", "") if self._is_live else ("", "\n")
            print(begin + line, end=end, file=sys.stderr, flush=True)
