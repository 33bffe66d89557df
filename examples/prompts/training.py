"""Prompts that heads learn from: requests of three kinds, made from lists of topics, wordings and texts.

    edits      give back a text or a piece of code with one change
    summaries  say what a text says, and quote from it
    stories    tales, explanations, advice: nothing is given

A head that is to be good at something should have seen the target do it, so what users really ask for is better than
these. None of these texts and wordings is among the held-out prompts.
"""

from __future__ import annotations

import ast
import json
import random
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path

from stdlib_text import read, training_files

__all__ = ["Prompt", "training_prompts"]

SEED = 0


@dataclass(frozen=True)
class Prompt:
    """What a user says, and of which kind it is."""

    kind: str
    text: str


LISTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


@cache
def _library() -> tuple[list[str], list[str]]:
    """Functions and small classes of the standard library, and the prose at the beginning of its modules."""
    snippets, prose = [], []
    for path in training_files():
        try:
            source = read(path)
            module = ast.parse(source)
        except SyntaxError:  # templates and files of other versions
            continue
        lines = source.splitlines()
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and 6 <= (node.end_lineno or 0) - node.lineno <= 24:
                text = "\n".join(line[node.col_offset :] for line in lines[node.lineno - 1 : node.end_lineno])
                if len(text) < 900:
                    snippets.append(text)
        text = ast.get_docstring(module) or ""
        if 400 < len(text) < 1600:
            prose.append(text)
    return snippets, prose


def _shuffled(texts: list[str], rng: random.Random) -> list[str]:
    texts = [*texts]
    rng.shuffle(texts)
    return texts


def _records(rng: random.Random) -> str:
    people = [
        {"name": rng.choice(LISTS["names"]), "age": rng.randint(18, 80), "city": rng.choice(LISTS["places"])}
        for _ in range(rng.randint(3, 6))
    ]
    return json.dumps(people, indent=2)


def _edits(rng: random.Random, count: int) -> list[Prompt]:
    snippets, prose = cycle(_shuffled(_library()[0], rng)), cycle(LISTS["texts"])
    makers = cycle(
        [
            lambda: f"{rng.choice(LISTS['code_changes'])}\n\n```python\n{next(snippets)}\n```",
            lambda: f"```\n{next(snippets)}\n```\n{rng.choice(LISTS['code_changes'])}",
            lambda: f"{rng.choice(LISTS['prose_changes'])}\n\n{next(prose)}",
            lambda: f"{rng.choice(LISTS['record_changes'])}\n\n{_records(rng)}",
        ]
    )
    return [Prompt("edits", next(makers)()) for _ in range(count)]


def _summaries(rng: random.Random, count: int) -> list[Prompt]:
    pairs = zip(_shuffled(_library()[1], rng), cycle(LISTS["texts"]), strict=False)
    texts = cycle([text for pair in pairs for text in pair])
    found = []
    for i in range(count):
        parts = [rng.choice(LISTS["summaries"]), next(texts)]
        found.append(Prompt("summaries", "\n\n".join(parts if i % 2 else parts[::-1])))
    return found


def _stories(rng: random.Random, count: int) -> list[Prompt]:
    found = []
    for i in range(count):
        if i % 2:
            found.append(Prompt("stories", rng.choice(LISTS["explanations"]).format(thing=rng.choice(LISTS["things"]))))
            continue
        who, (does, past) = rng.choice(LISTS["who"]), rng.choice(LISTS["does"])
        names = {"who": who, "Who": who[0].upper() + who[1:], "does": does, "does_past": f"{who} {past}"}
        found.append(Prompt("stories", rng.choice(LISTS["stories"]).format(**names)))
    return found


def training_prompts(edits: int = 240, summaries: int = 160, stories: int = 1800) -> list[Prompt]:
    """So many prompts of each kind, mixed, none of them twice; the same ones in each call."""
    rng = random.Random(SEED)
    found = [*_edits(rng, edits), *_summaries(rng, summaries), *_stories(rng, stories)]
    found = list(dict.fromkeys(found))
    rng.shuffle(found)
    return found
