"""Prompts that show and measure a chat model: 16 edits, 16 summaries and 16 stories.

An answer to "edits" repeats most of the given text, "summaries" quotes from it, "stories" repeats nothing. The prompts
are held out: nothing may be trained on them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DEMO", "KINDS", "Prompt", "chat_ids", "held_out"]

KINDS = ("edits", "summaries", "stories")
# The edit that `make demo` shows first: the answer changes a few lines of a class.
DEMO = "rename-temperature-log"

_HELD_OUT = Path(__file__).parent / "prompts" / "held_out.json"


@dataclass(frozen=True)
class Prompt:
    """`text` is a user's message to the model; `name` is unique among all prompts."""

    kind: str
    name: str
    text: str


def held_out(kind: str | None = None, count: int | None = None) -> list[Prompt]:
    """Returns the first `count` prompts of one kind, or of each kind in turn.

    Raises:
        ValueError: `kind` is not one of KINDS, or `count` is less than 1.
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if count is not None and count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    prompts = [Prompt(**entry) for entry in json.loads(_HELD_OUT.read_text(encoding="utf-8"))]
    kinds = KINDS if kind is None else (kind,)
    return [prompt for one in kinds for prompt in [p for p in prompts if p.kind == one][:count]]


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns the tokens of a chat up to the model's answer to `text`."""
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
