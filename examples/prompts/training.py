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

from prompts import passages
from stdlib_text import read, training_files

__all__ = ["Prompt", "training_prompts"]

SEED = 0


@dataclass(frozen=True)
class Prompt:
    """What a user says, and of which kind it is."""

    kind: str
    text: str


CODE_CHANGES = (
    "Put a docstring of one line into every function of this code and leave the rest alone.",
    "Here is some Python. Give it back with type annotations.",
    "Please rename the first parameter (after self, if there is one) to `item`, everywhere in this code.",
    "I want a log message at the beginning of each function here. Use the logging module.",
    "Change the indentation of this code to two spaces.",
    "Could you put comments into this code that say what each part does?",
    "Rewrite this so that errors are caught and printed. Keep everything else.",
    "Show me this code again, but with the longest name in it shortened.",
    "Take the comments and docstrings out of this code and print it again.",
    "Add a parameter `verbose=False` to this, and print what happens if it is set.",
)
PROSE_CHANGES = (
    "Put this into the past tense:",
    "Copy the following text, but write every number as a word.",
    "Give me this text again in British spelling, with nothing else changed.",
    "Correct whatever is wrong in this passage and write the whole passage out.",
    "Make the tone of this a bit more formal. Stay close to the wording:",
    "Please break this into short paragraphs, keeping all of the words:",
    "Replace every name in this text by another one, then show the result:",
    "Write this again as a numbered list, one sentence in each line.",
)
RECORD_CHANGES = (
    "Add a field `active` that is true to each entry of this JSON and print all of it.",
    'In this JSON, change the key "city" to "town". Print the complete result.',
    "Sort this JSON by name and show me the whole of it.",
    "Raise every age in this JSON by one year, and give me back the full JSON.",
    "Turn this JSON into a Markdown table.",
    "Make a CSV file of this JSON, with a header line.",
)
SUMMARIES = (
    "What are the main points here? Quote the sentences that you take them from.",
    "Tell me in three sentences what this is about, with one literal quotation.",
    "Sum this up for someone in a hurry. Use quotation marks where you take over the wording.",
    "Which sentence of the following matters most? Repeat it word for word and say why.",
    "Read this and list its claims, each followed by the words of the text that support it.",
    "Give a short abstract of this passage, then its first and its last sentence as they stand.",
    "Explain the passage below to a colleague, and cite it at least twice.",
    "Who does what in this text? Answer with quotations.",
)
STORIES = (
    "Tell me a tale about {who} who {does}.",
    "Write the beginning of a novel in which {who} {does}.",
    "Make up a bedtime story: {who} {does}, and in the end all is well.",
    "I need a funny anecdote where {who} {does}.",
    "Write a letter in which {who} tells a friend about the day when {does_past}.",
    "Invent a dialogue between {who} and a stranger. {Who} {does}.",
)
EXPLANATIONS = (
    "How does {thing} work?",
    "Describe {thing} to a ten-year-old.",
    "I have to give a talk about {thing}. What should I say?",
    "What are the good and the bad sides of {thing}?",
    "Write an encyclopedia entry on {thing}.",
    "Tell me the history of {thing} in a few paragraphs.",
    "What do people often get wrong about {thing}?",
    "Give me some practical advice about {thing}.",
)


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
        {"name": rng.choice(passages.NAMES), "age": rng.randint(18, 80), "city": rng.choice(passages.PLACES)}
        for _ in range(rng.randint(3, 6))
    ]
    return json.dumps(people, indent=2)


def _edits(rng: random.Random, count: int) -> list[Prompt]:
    snippets, prose = cycle(_shuffled(_library()[0], rng)), cycle(passages.TEXTS)
    makers = cycle(
        [
            lambda: f"{rng.choice(CODE_CHANGES)}\n\n```python\n{next(snippets)}\n```",
            lambda: f"```\n{next(snippets)}\n```\n{rng.choice(CODE_CHANGES)}",
            lambda: f"{rng.choice(PROSE_CHANGES)}\n\n{next(prose)}",
            lambda: f"{rng.choice(RECORD_CHANGES)}\n\n{_records(rng)}",
        ]
    )
    return [Prompt("edits", next(makers)()) for _ in range(count)]


def _summaries(rng: random.Random, count: int) -> list[Prompt]:
    pairs = zip(_shuffled(_library()[1], rng), cycle(passages.TEXTS), strict=False)
    texts = cycle([text for pair in pairs for text in pair])
    found = []
    for i in range(count):
        parts = [rng.choice(SUMMARIES), next(texts)]
        found.append(Prompt("summaries", "\n\n".join(parts if i % 2 else parts[::-1])))
    return found


def _stories(rng: random.Random, count: int) -> list[Prompt]:
    found = []
    for i in range(count):
        if i % 2:
            found.append(Prompt("stories", rng.choice(EXPLANATIONS).format(thing=rng.choice(passages.THINGS))))
            continue
        who, (does, past) = rng.choice(passages.WHO), rng.choice(passages.DOES)
        names = {"who": who, "Who": who[0].upper() + who[1:], "does": does, "does_past": f"{who} {past}"}
        found.append(Prompt("stories", rng.choice(STORIES).format(**names)))
    return found


def training_prompts(edits: int = 240, summaries: int = 160, stories: int = 1800) -> list[Prompt]:
    """So many prompts of each kind, mixed, none of them twice; the same ones in each call."""
    rng = random.Random(SEED)
    found = [*_edits(rng, edits), *_summaries(rng, summaries), *_stories(rng, stories)]
    found = list(dict.fromkeys(found))
    rng.shuffle(found)
    return found
