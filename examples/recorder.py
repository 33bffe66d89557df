"""Collects the steps of one sequence of `generate`, and draws some of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from run_picture import StepRecord, draw_run, html_page

from pagedtree.integrations.transformers import StepResult

__all__ = ["Recorder", "write_picture"]

PICTURED_STEPS = 6


class Recorder:
    """Collects the steps of one sequence for the picture."""

    def __init__(self, decode: Callable[[list[int]], str], sequence: int) -> None:
        self.decode, self.sequence = decode, sequence
        self.steps: list[StepRecord] = []
        self.first_root: int | None = None

    def __call__(self, result: StepResult) -> None:
        for b, sequence in enumerate(result.sequences):
            if sequence.index != self.sequence or b < result.num_read:
                continue
            begin, end = result.trees.cu_nodes[b : b + 2].tolist()
            accepted = int(result.commit.num_accepted[b])
            nodes = result.draft_tokens[begin:end].tolist()
            root = int(result.start[b])
            self.first_root = root if self.first_root is None else self.first_root
            texts = [self.decode([sequence.tokens[root]])] + [self.decode([max(token, 0)]) for token in nodes[1:]]
            path = result.verdict.accept_index[b, 1 : accepted + 1].tolist()
            bonus = self.decode([int(result.commit.last_token[b])])
            self.steps.append(StepRecord(result.trees.parents[begin:end].tolist(), texts, path, bonus))


def write_picture(recorder: Recorder, prompt: list[int], path: Path, title: str) -> None:
    """Draws the steps in which most was accepted, as SVG and as HTML; path: without its ending."""
    steps = recorder.steps
    # The stretch in which most was accepted says most.
    begin = max(range(max(len(steps) - PICTURED_STEPS, 0) + 1), key=lambda i: _gain(steps[i : i + PICTURED_STEPS]))
    before = recorder.decode(prompt) + "".join(
        "".join(step.tokens[node] for node in step.path[1:]) + step.bonus for step in steps[:begin]
    )
    svg = draw_run(steps[begin : begin + PICTURED_STEPS], prompt=before, title=title, first_step=begin + 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".svg").write_text(svg)
    path.with_suffix(".html").write_text(html_page(svg))
    print(f"\npicture of one run: {path.with_suffix('.html')}")


def _gain(steps: list[StepRecord]) -> int:
    return sum(len(step.accepted) for step in steps)
