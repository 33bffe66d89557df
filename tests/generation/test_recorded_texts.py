"""`tree="auto"` on texts of a real model, replayed at the measured costs of its steps.

recorded_texts.json: answers of SmolLM2-135M-Instruct to 16 prompts of each kind in bfloat16, up to 96 tokens; a token
is the place of its first occurrence.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from support.tuner import ROOT, Machine, run

from pagedtree import Draft, DraftTree, TreeBatch
from pagedtree.generation.drafters import NgramDrafter
from pagedtree.generation.tree_tuner import TreeTuner

TOKENS = 96
ROWS = json.loads(Path(__file__).with_name("recorded_texts.json").read_text(encoding="utf-8"))["rows"]
# Two cores with AVX-512: seconds of a step without drafts, of any drafts, and of each drafted row, by the batch size.
SIZES, PLAIN, ONCE, ROW = (1, 4, 8), (31.2e-3, 32.0e-3, 37.2e-3), (0.0, 5.2e-3, 2.5e-3), (0.95e-3, 0.85e-3, 0.83e-3)


class Recorded(Machine):
    """Replays texts in one batch."""

    def __init__(self, rows: list[dict], drafter: NgramDrafter | None) -> None:
        self.rows, self.drafter, self.batch = rows, drafter, len(rows)
        self.noise, self.rng = 0.0, np.random.default_rng()
        texts = [torch.tensor(row["prompt"] + row["text"]) for row in rows]
        self.tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)

    def target(self, drafted: int, size: int) -> float:
        plain, once, row = (float(np.interp(size, SIZES, of_sizes)) for of_sizes in (PLAIN, ONCE, ROW))
        return plain + (once + row * drafted if drafted else 0.0)

    def drafting(self, levels: int, size: int) -> float:
        return 0.3e-3 + 0.06e-3 * size if levels else 0.0

    def draft(self, tree: DraftTree, places: dict[int, int]) -> Draft:
        if tree is ROOT:
            return Draft(torch.zeros(len(places), dtype=torch.int64), TreeBatch.from_trees([ROOT] * len(places)))
        lengths = torch.tensor([len(self.rows[s]["prompt"]) + place for s, place in places.items()])
        return self.drafter.propose(self.tokens[[*places]], lengths.int())

    def confidence(self) -> torch.Tensor:
        return self.drafter.confidence()

    def end_of(self, sequence: int, tokens: int) -> int:
        return len(self.rows[sequence]["text"])

    def path(self, draft: Draft, b: int, sequence: int, place: int) -> tuple[list[int], list[int]]:
        begin, end = draft.trees.cu_nodes[b : b + 2].tolist()
        parents, drafted = draft.trees.parents[begin:end].tolist(), draft.draft_tokens[begin:end].tolist()
        path, tokens = [0], []
        for token in self.rows[sequence]["text"][place:]:
            tokens.append(token)
            child = [n for n, parent in enumerate(parents) if parent == path[-1] and drafted[n] == token]
            if not child:
                break
            path += child
        return path[: len(tokens)], tokens


def seconds(rows: list[dict], drafter: NgramDrafter, is_chosen: bool = False) -> float:
    tuner = TreeTuner(drafter.max_depth) if is_chosen else None
    if tuner is not None:
        num_read = sum(len(row["prompt"]) for row in rows)
        tuner.learn_reading(num_read, 0.9e-3 * num_read)
    return run(Recorded(rows, drafter), tuner, TOKENS, DraftTree.chain(drafter.max_depth))[0]


def plain_seconds(rows: list[dict]) -> float:
    sizes = [sum(len(row["text"]) > place for row in rows) for place in range(TOKENS)]
    return sum(Recorded(rows, None).target(0, size) for size in sizes if size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", dict.fromkeys(row["kind"] for row in ROWS))
def test_chosen_trees_are_near_the_best_choice(kind: str, size: int) -> None:
    """A kind's median speed is at least 0.97 of plain decoding, 0.95 of the best of plain, chains and fixed trees."""
    of_kind = [row for row in ROWS if row["kind"] == kind][: 8 * size]
    over_plain, over_best = [], []
    for first in range(0, len(of_kind), size):
        rows = of_kind[first : first + size]
        plain, chosen = plain_seconds(rows), seconds(rows, NgramDrafter(32), is_chosen=True)
        fixed = [seconds(rows, NgramDrafter(16, max_branches=branches)) for branches in (1, 4)]
        over_plain.append(plain / chosen)
        over_best.append(min(plain, *fixed) / chosen)
    print(over_plain, over_best)
    assert median(over_plain) >= 0.97 and median(over_best) >= 0.95
