"""Counts and times of a call of `generate`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedtree.generation.logprobs import TokenLogprobs


@dataclass
class SequenceStats:
    """Statistics of one outcome of one prompt.

    Attributes:
        num_tokens: generated tokens.
        decode_steps: passes that verified a tree. accepted: accepted draft tokens in each of them.
        evictions: how often it lost its pages. restored_tokens: tokens read again after that.
        time_to_first_token: seconds from the call of `generate`.
        finish_reason: "eos", "length", "stop_string", "grammar" or "callback".
    """

    num_tokens: int = 0
    decode_steps: int = 0
    accepted: list[int] = field(default_factory=list)
    evictions: int = 0
    restored_tokens: int = 0
    time_to_first_token: float = 0.0
    finish_reason: str = ""
    logprobs: TokenLogprobs | None = None


@dataclass
class GenerationStats:
    """Statistics of one call of `generate`.

    Attributes:
        steps: passes of the target model. packed_tokens: tokens fed to it, padding included.
        wall_time, draft_time: seconds in all, and of drafting and node selection (on a GPU only until work is queued).
        num_pages, peak_pages, pages_taken: pages in the pool, held at most, and taken over the whole call.
        grammar_time: seconds of filling grammar masks, normally during the target's pass. grammar_wait: of waiting for
            late masks, and advancing the matchers.
        drafted_steps: passes with drafts, under tree="auto".
        shared_prefix_steps: passes that read a prefix of several sequences once.
        sequences: one entry per returned sequence.
    """

    steps: int = 0
    packed_tokens: int = 0
    wall_time: float = 0.0
    draft_time: float = 0.0
    grammar_time: float = 0.0
    grammar_wait: float = 0.0
    num_pages: int = 0
    peak_pages: int = 0
    pages_taken: int = 0
    drafted_steps: int = 0
    shared_prefix_steps: int = 0
    sequences: list[SequenceStats] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def evictions(self) -> int:
        return sum(sequence.evictions for sequence in self.sequences)

    @property
    def restored_tokens(self) -> int:
        return sum(sequence.restored_tokens for sequence in self.sequences)

    @property
    def accepted_histogram(self) -> Counter[int]:
        """Number of verified trees with 0, 1, 2, ... accepted draft tokens."""
        return Counter(count for sequence in self.sequences for count in sequence.accepted)

    @property
    def mean_accepted(self) -> float:
        histogram = self.accepted_histogram
        return sum(count * times for count, times in histogram.items()) / max(histogram.total(), 1)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per sequence and verified tree: accepted drafts and the bonus token."""
        return self.mean_accepted + 1.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the call's time, prefill included."""
        return self.num_tokens / self.wall_time if self.wall_time else 0.0

    @property
    def time_to_first_token(self) -> float:
        """Average seconds until a sequence's first token."""
        times = [sequence.time_to_first_token for sequence in self.sequences]
        return sum(times) / max(len(times), 1)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after each sequence's first one, over the time since the first token of all; 0 without any."""
        times = [sequence.time_to_first_token for sequence in self.sequences if sequence.num_tokens]
        seconds = self.wall_time - min(times, default=0.0)
        return (self.num_tokens - len(times)) / seconds if seconds > 0 else 0.0

    def summary(self) -> str:
        rate = self.decode_tokens_per_second
        lines = [
            f"{self.num_tokens} tokens in {self.wall_time:.2f} s: first token after"
            f" {1e3 * self.time_to_first_token:.0f} ms{f', then {rate:.1f} tokens/s' if rate else ''}",
            f"{self.steps} passes, {self.tokens_per_step:.2f} tokens per sequence and step ({self.mean_accepted:.2f} of"
            " them drafted)",
            f"pages: at most {self.peak_pages} of {self.num_pages}; {self.evictions} evictions,"
            f" {self.restored_tokens} tokens restored",
        ]
        if self.grammar_time:
            lines.append(
                f"grammars: masks filled for {self.grammar_time:.2f} s, {self.grammar_wait:.2f} s not hidden by passes"
            )
        return "\n".join(lines)
