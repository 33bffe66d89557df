"""Prompts from files, and as tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["Messages", "question", "read_prompts", "token_ids"]

# A conversation whose next message is the model's: dictionaries of role and content.
Messages = list[dict[str, str]]


def question(text: str) -> Messages:
    """A user's first message."""
    return [{"role": "user", "content": text}]


def read_prompts(path: Path) -> list[Messages]:
    """The prompts of a file, in its order.

    .json: a list, .jsonl: a line each, of texts, or of objects with "messages" (role and content of each), or with
    "prompt" or "text". Any other file: a text in each line that is not empty. A text is what a user says.

    ValueError names the file and the entry that is something else.
    """
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".json":
        entries = json.loads(text)
        if not isinstance(entries, list):
            raise ValueError(f"{path}: expected a list of prompts, got {type(entries).__name__}")
    else:
        lines = [line for line in text.splitlines() if line.strip()]
        entries = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else lines
    if not entries:
        raise ValueError(f"{path}: expected prompts, got none")
    return [_messages(f"{path}, entry {number}", entry) for number, entry in enumerate(entries, 1)]


def _messages(where: str, entry: Any) -> Messages:
    if isinstance(entry, dict) and isinstance(entry.get("messages"), list):
        messages: Messages = entry["messages"]
        # The answer that a data set has at the end is not the target's.
        return messages[:-1] if messages and messages[-1].get("role") == "assistant" else messages
    said = entry.get("prompt", entry.get("text")) if isinstance(entry, dict) else entry
    if not isinstance(said, str):
        what = 'a text, or an object with "messages", "prompt" or "text"'
        raise ValueError(f"{where}: expected {what}, got {entry!r:.80}")
    return question(said)


def token_ids(tokenizer: Any, prompts: Iterable[Messages], chat: bool) -> list[list[int]]:
    """Each prompt's tokens. chat: in the tokenizer's chat template, before the model's turn; else the bare texts."""
    if chat:
        return [
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False) for prompt in prompts
        ]
    return [tokenizer.encode("\n".join(message["content"] for message in prompt)) for prompt in prompts]
