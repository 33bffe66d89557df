"""Logits after penalties and request options."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pagedtree.bits import unpacked
from pagedtree.options import RequestOptions
from pagedtree.sampling_params import SamplingParams
from pagedtree.tree import TreeBatch

__all__ = ["apply_options"]


def apply_options(
    logits: Tensor, params: SamplingParams, options: RequestOptions | None, *, trees: TreeBatch | None = None,
    draft_tokens: Tensor | None = None, positions: Tensor | None = None, grammar_mask: Tensor | None = None,
    draft_to_target: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns logits after penalties, options and grammar mask, float32 [N, V]. Without trees each row is a root.

    An op with options on the original logits equals the op without options on these. NaN stays NaN, forbidden or not,
    so that its row is still reported; +inf is the largest finite number of the dtype, or after bias of float32.
    """
    num_rows, vocab = logits.shape
    tensors = {name: t.cpu() for name, t in (options or RequestOptions()).tensors().items() if t is not None}
    drafts = [-1] * num_rows if draft_tokens is None else draft_tokens.tolist()
    if draft_to_target is not None:
        drafts = [int(draft_to_target[t]) if 0 <= t < len(draft_to_target) else -1 for t in drafts]
    clean = logits.float().clamp(max=torch.finfo(logits.dtype).max).cpu().numpy()
    grammar = None if grammar_mask is None else grammar_mask.cpu()
    out = clean.copy()
    for row, b, path in paths_of(num_rows, drafts, trees):
        forbidden = np.zeros(vocab, bool)
        for mask, at in ((tensors.get("allowed_mask"), b), (grammar, row)):
            if mask is not None:
                forbidden |= ~(mask[at] if mask.dtype == torch.bool else unpacked(mask[at], vocab)).numpy()
        forbidden[[x for x in ends_of_bad_words(tensors, b, path) if 0 <= x < vocab]] = True
        args = (tensors, params, b, [x for x in path if 0 <= x < vocab])
        if positions is not None and "stop_ids" in tensors and "min_position" in tensors:
            predicted = int(positions[b]) + len(path) + 1
            stops = [x for x in tensors["stop_ids"][b].tolist() if 0 <= x < vocab]
            if predicted < int(tensors["min_position"][b]):
                stopped = forbidden.copy()
                stopped[stops] = True
                if np.nanmax(with_bias_and_penalties(clean[row], stopped, *args), initial=-np.inf) > -np.inf:
                    forbidden = stopped
        out[row] = with_bias_and_penalties(clean[row], forbidden, *args)
    return torch.from_numpy(out).to(logits.device)


def paths_of(num_rows: int, drafts: list[int], trees: TreeBatch | None) -> Iterator[tuple[int, int, list[int]]]:
    """Returns (row, sequence, the tokens of its path below the root) of each row that a walk can visit."""
    if trees is None:
        yield from ((row, row, []) for row in range(num_rows))
        return
    offsets, parents, depths = (t.tolist() for t in (trees.cu_nodes, trees.parents, trees.depths))
    for b, begin in enumerate(offsets[:-1]):
        for row in range(begin, offsets[b + 1]):
            path: list[int] = []
            at = row
            while at > begin and depths[row] >= 0:
                path.insert(0, drafts[at])
                at = begin + parents[at]
            if row == begin or depths[row] >= 0:
                yield row, b, path


def ends_of_bad_words(given: dict[str, Tensor], b: int, path: list[int]) -> list[int]:
    """Returns the last tokens of the words whose other tokens end the text."""
    if not {"bad_tokens", "cu_bad_words", "cu_bad_seqs"} <= given.keys():
        return []
    text = path
    if "history" in given and "history_lens" in given:
        start = int(given["history_start"][b]) if "history_start" in given else 0
        text = given["history"][b, max(start, 0) : max(int(given["history_lens"][b]), 0)].tolist() + path
    first, end = given["cu_bad_seqs"][b : b + 2].tolist()
    words = [
        given["bad_tokens"][begin:stop].tolist() for begin, stop in pairwise(given["cu_bad_words"][first : end + 1])
    ]
    return [word[-1] for word in words if word and text[len(text) - len(word) + 1 :] == word[:-1]]


def with_bias_and_penalties(
    row: np.ndarray, forbidden: np.ndarray, given: dict[str, Tensor], params: SamplingParams, b: int, path: list[int]
) -> np.ndarray:
    """Returns one row, in float32; forbidden entries are -inf and stay so."""
    vocab = row.size
    repetition, presence, frequency = penalties_of(params, b)
    counts = np.zeros(vocab, np.int64)
    if "output_counts" in given:
        counts += given["output_counts"][b].numpy().clip(min=0)
    for x in path:
        counts[x] += 1
    is_present = counts > 0
    if "prompt_mask" in given:
        is_present = is_present | unpacked(given["prompt_mask"][b], vocab).numpy()
    row, is_nan, forbidden = row.copy(), np.isnan(row), forbidden | (row == -np.inf)
    with np.errstate(all="ignore"):
        if {"bias_tokens", "bias_values", "cu_bias"} <= given.keys():
            begin, end = given["cu_bias"][b : b + 2].tolist()
            for x, bias in zip(given["bias_tokens"][begin:end].tolist(), given["bias_values"][begin:end], strict=True):
                if 0 <= x < vocab and not bias.isnan():
                    row[x] += np.float32(bias)
                    forbidden[x] |= bool(bias == -torch.inf)
        row = np.minimum(row, np.finfo(np.float32).max)
        row = np.where(is_present, np.where(row > 0, row / repetition, row * repetition), row)
        row = row - frequency * counts.astype(np.float32)
        row = row - presence * (counts > 0).astype(np.float32)
    return np.where(forbidden & ~is_nan, np.float32(-np.inf), row)


def penalties_of(params: SamplingParams, b: int) -> tuple[np.float32, np.float32, np.float32]:
    """Returns repetition, presence and frequency penalty of a sequence, clamped; NaN is off."""

    def value_of(name: str) -> float:
        value = torch.as_tensor(getattr(params, name)).flatten().tolist()
        return value[b] if len(value) > 1 else value[0]

    repetition = value_of("repetition_penalty")
    presence, frequency = (
        0.0 if math.isnan(value) else min(max(value, -2.0), 2.0)
        for value in (value_of("presence_penalty"), value_of("frequency_penalty"))
    )
    return np.float32(repetition if repetition > 0 else 1), np.float32(presence), np.float32(frequency)
