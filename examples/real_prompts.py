"""The prompts with which a chat model is shown and measured: 16 edits, 16 summaries and 16 stories.

An answer to "edits" repeats most of the text that the prompt gives, one to "summaries" quotes from it, and one to
"stories" has nothing to repeat. They are held out: nothing may be trained on them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DEMO", "KINDS", "Prompt", "chat_ids", "held_out"]

KINDS = ("edits", "summaries", "stories")
# The edit that `make demo` shows first: a class, of which the answer changes a few lines.
DEMO = "rename-temperature-log"

_HELD_OUT = Path(__file__).parent / "prompts" / "held_out.json"


@dataclass(frozen=True)
class Prompt:
    """`text` is what a user writes to the model; `name` is unique among all prompts."""

    kind: str
    name: str
    text: str


def held_out(kind: str | None = None, count: int | None = None) -> list[Prompt]:
    """The prompts of one kind, or of all kinds one after the other; of each kind at most the first `count`.

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
    """The tokens of a chat in which the user has written `text` and the model is to answer."""
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
