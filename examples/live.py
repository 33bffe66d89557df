"""Generates one sequence without and with drafts, shows tokens per second, and compares the texts."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagedtree.generation.drafters import Drafter
from pagedtree.integrations.transformers import GenerationStats, generate

__all__ = ["compare_live", "fastest", "first_difference"]

# Updates of a terminal's line per second; tokens per printed line elsewhere.
UPDATES_PER_SECOND = 20
TOKENS_PER_LINE = 64


class Progress:
    """A callback of `generate` that shows progress."""

    def __init__(self, name: str, total: int, decode: Callable[[list[int]], str]) -> None:
        self.name, self.total, self.decode = name, total, decode
        self.tokens: list[int] = []
        self.is_terminal = sys.stdout.isatty()
        self.begin = self.shown_at = time.perf_counter()

    def __call__(self, sequence: int, new: list[int]) -> None:
        before, now = len(self.tokens), time.perf_counter()
        self.tokens += new
        if len(self.tokens) >= self.total:  # `close` writes the last line
            return
        line = self.line(len(self.tokens), now - self.begin)
        if self.is_terminal and now - self.shown_at >= 1 / UPDATES_PER_SECOND:
            self.shown_at = now
            room = shutil.get_terminal_size().columns - len(line) - 4
            text = " ".join(self.decode(self.tokens[-40:]).split())
            print(f"\r\x1b[K{line}  {text[-room:] if room > 0 else ''}", end="", flush=True)
        elif not self.is_terminal and before // TOKENS_PER_LINE < len(self.tokens) // TOKENS_PER_LINE:
            print(line, flush=True)

    def line(self, count: int, seconds: float) -> str:
        return f"  {self.name:18} {count:4} tokens {seconds:6.2f} s {count / max(seconds, 1e-9):7.0f} tokens/s"

    def close(self, stats: GenerationStats, remark: str) -> None:
        """Writes the last line with the figures of the whole call."""
        start = "\r\x1b[K" if self.is_terminal else ""
        print(f"{start}{self.line(stats.num_tokens, stats.wall_time)}{remark}", flush=True)


def fastest(
    model: Any, prompt: Tensor, drafters: dict[str, Callable[[], Drafter | None]], *, max_new_tokens: int
) -> str:
    """Returns the drafter that completes the prompt with the most tokens per second."""

    def rate(name: str) -> float:
        return generate(model, [prompt], drafter=drafters[name](), max_new_tokens=max_new_tokens)[1].tokens_per_second

    return max(drafters, key=rate)


def compare_live(
    model: Any,
    prompt: Tensor,
    drafters: dict[str, Callable[[], Drafter | None]],
    decode: Callable[[list[int]], str],
    *,
    max_new_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Completes `prompt` without drafts (drafters["plain"]) and with the other drafter; returns both sequences."""
    texts, seconds = [], []
    for name, make in drafters.items():
        progress = Progress(name, max_new_tokens, decode)
        sequences, stats = generate(model, [prompt], drafter=make(), max_new_tokens=max_new_tokens, callback=progress)
        texts.append(sequences[0])
        seconds.append(stats.wall_time)
        remark = (
            f", {seconds[0] / seconds[1]:.2f} x plain, {stats.tokens_per_step:.2f} tokens/step" if texts[1:] else ""
        )
        progress.close(stats, remark)
    same = torch.equal(*texts)
    print("both texts are the same, token for token" if same else "THE TEXTS DIFFER")
    return texts[0], texts[1]


def first_difference(plain: list[Tensor], sequences: list[Tensor], model: Any) -> str:
    """Returns the first difference, and the margin of the target's two best tokens there."""
    for b, (expected, got) in enumerate(zip(plain, sequences, strict=True)):
        shared = min(len(expected), len(got))
        different = (expected[:shared] != got[:shared]).nonzero()
        if len(different) or len(expected) != len(got):
            at = int(different[0]) if len(different) else shared
            with torch.no_grad():
                top = model(expected[None, :at]).logits[0, -1].float().topk(2).values
            return f"sequence {b}, token {at}, logit margin {float(top[0] - top[1]):.4f}"
    return "none"
