"""What a target answers to prompts, by its own `generate`, kept in a file: a second run begins at once.

What is drafted must please the target, so a drafter learns most from texts that the target wrote itself.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedtree import SamplingParams
from pagedtree.integrations.transformers import NgramDrafter, generate

__all__ = ["Text", "fingerprint", "own_texts"]

TOP_P = 0.95  # of what is sampled
# So many are answered side by side, and so many answers are lost at most if the program is stopped.
BATCH, CHUNK = 64, 192


@dataclass(frozen=True)
class Text:
    """tokens: of a prompt and its answer, which begins at `start`."""

    start: int
    tokens: list[int]


def fingerprint(model: Any) -> str:
    """Names a model by its config and by a row of each of its weights."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in sorted(model.state_dict().items()):
        row: Tensor = weight.flatten()[: weight.shape[-1] if weight.ndim else 1]
        digest.update(name.encode() + row.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def own_texts(
    model: Any, prompts: Sequence[Sequence[int]], file: Path, max_new_tokens: int, temperatures: Sequence[float]
) -> list[Text]:
    """The model's answers to `prompts` (token ids) at each of `temperatures`, those to the first prompts first.

    file: where answers are looked for, and to which new ones are added, a JSON object in each line.
    """
    name = fingerprint(model)
    wanted = {
        _key(name, prompt, temperature, max_new_tokens): (list(prompt), temperature)
        for prompt in prompts
        for temperature in temperatures
    }
    found = _read(file)
    missing = [key for key in wanted if key not in found]
    file.parent.mkdir(parents=True, exist_ok=True)
    began, made = time.monotonic(), 0
    for first in range(0, len(missing), CHUNK):
        keys = missing[first : first + CHUNK]
        texts = _answers(model, [wanted[key] for key in keys], max_new_tokens)
        found |= dict(zip(keys, texts, strict=True))
        with file.open("a") as lines:
            for key, text in zip(keys, texts, strict=True):
                print(json.dumps({"key": key, **asdict(text)}), file=lines)
        made += sum(len(text.tokens) - text.start for text in texts)
        done, seconds = first + len(keys), time.monotonic() - began
        left = seconds / done * (len(missing) - done) / 60
        print(f"answers: {done} of {len(missing)}, {made / seconds:.0f} tokens/s, {left:.0f} minutes left", flush=True)
    return [found[key] for key in wanted]


def _key(name: str, prompt: Sequence[int], temperature: float, max_new_tokens: int) -> str:
    return hashlib.sha256(json.dumps([name, [*prompt], temperature, TOP_P, max_new_tokens]).encode()).hexdigest()[:24]


def _read(file: Path) -> dict[str, Text]:
    if not file.exists():
        return {}
    rows = map(json.loads, file.read_text().splitlines())
    return {row.pop("key"): Text(**row) for row in rows}


def _answers(model: Any, asked: list[tuple[list[int], float]], max_new_tokens: int) -> list[Text]:
    """asked: prompts and their temperatures, of which 0 is greedy."""
    prompts = [prompt for prompt, _ in asked]
    params = SamplingParams(temperature=torch.tensor([temperature for _, temperature in asked]), top_p=TOP_P)
    how = {"max_new_tokens": max_new_tokens, "max_sequences": BATCH, "params": params}
    sequences, _ = generate(model, prompts, drafter=NgramDrafter(), **how)
    return [Text(len(prompt), row.tolist()) for prompt, row in zip(prompts, sequences, strict=True)]
