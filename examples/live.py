"""One sequence, generated without and with drafts: tokens per second while it runs, and whether the texts agree."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagedtree.integrations.transformers import Drafter, GenerationStats, generate

__all__ = ["compare_live"]

TRIAL_TOKENS = 96
# A terminal's line is written anew this many times per second; elsewhere one line is printed per so many tokens.
UPDATES_PER_SECOND = 20
TOKENS_PER_LINE = 64


class Progress:
    """A callback of `generate` that shows how far one sequence is."""

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
        """Writes the last line, with the figures of the whole call."""
        start = "\r\x1b[K" if self.is_terminal else ""
        print(f"{start}{self.line(stats.num_tokens, stats.wall_time)}{remark}", flush=True)


def compare_live(
    model: Any,
    prompt: Tensor,
    drafters: dict[str, Callable[[], Drafter | None]],
    decode: Callable[[list[int]], str],
    *,
    max_new_tokens: int,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """Completes `prompt` without drafts (drafters["plain"]) and with the fastest drafter; returns both sequences."""

    def run(name: str, count: int, progress: Progress | None = None) -> tuple[Tensor, GenerationStats]:
        sequences, stats = generate(
            model, [prompt], drafter=drafters[name](), max_new_tokens=count, page_size=page_size, callback=progress
        )
        return sequences[0], stats

    trials = {name: run(name, TRIAL_TOKENS)[1].tokens_per_second for name in drafters if name != "plain"}
    best = max(trials, key=trials.__getitem__)
    print(
        f"\none sequence: a prompt of {len(prompt)} tokens and {max_new_tokens} more, without drafts and then with the"
    )
    print(f"drafter that was the fastest of {len(trials)} on the first {TRIAL_TOKENS} tokens, {best}:")
    texts, seconds = [], []
    for name in ("plain", best):
        progress = Progress(name, max_new_tokens, decode)
        text, stats = run(name, max_new_tokens, progress)
        texts.append(text)
        seconds.append(stats.wall_time)
        remark = ""
        if name == best:
            remark = f", {seconds[0] / seconds[1]:.2f} x plain, {stats.tokens_per_step:.2f} tokens/step"
        progress.close(stats, remark)
    same = torch.equal(*texts)
    print("both texts are the same, token for token" if same else "THE TEXTS DIFFER")
    return texts[0], texts[1]
