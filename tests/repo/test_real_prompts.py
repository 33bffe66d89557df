"""examples/real_prompts.py: the prompts of each kind, and their form as a chat."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def real_prompts(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("real_prompts")


def test_there_are_16_prompts_of_each_kind(real_prompts):
    prompts = real_prompts.held_out()
    assert [prompt.kind for prompt in prompts] == [kind for kind in real_prompts.KINDS for _ in range(16)]
    assert len({prompt.name for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 48
    for kind in real_prompts.KINDS:
        assert real_prompts.held_out(kind) == [prompt for prompt in prompts if prompt.kind == kind]
    assert real_prompts.held_out(count=3) == [prompt for first in (0, 16, 32) for prompt in prompts[first : first + 3]]


def test_unknown_kinds_and_counts_are_refused(real_prompts):
    with pytest.raises(ValueError, match="kind must be one of edits, summaries, stories, got 'edit'"):
        real_prompts.held_out("edit")
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        real_prompts.held_out(count=0)


def test_chat_ids_follow_the_tokenizers_template(real_prompts):
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(EXAMPLES / "checkpoints" / "target")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    ids = real_prompts.chat_ids(tokenizer, "Größe: 茶 🍵")
    assert type(ids) is list and tokenizer.decode(ids) == "<user>Größe: 茶 🍵<a>"
