"""Offsets that descend are read as ascending ones, the same on every backend: no row belongs to two sequences."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_case import int32, int64
from torch import Tensor

import pagedtree as pt

PARENTS = [[-1, 0, 0, 1], [-1, 0], [-1, 0, 1, 1, 0], [-1], [-1, 0, 0]]
OFFSETS = [0, 4, 6, 11, 12, 15]
BATCH, ROWS, VOCAB = 5, 18, 24  # three rows are padding
FAR = 2**31 - 1


class Inputs:
    """Arguments of any op for five trees, whose offsets are `offsets` instead of OFFSETS."""

    def __init__(self, offsets: Tensor) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(offsets.device)

        def integers(high: int, *shape: int) -> Tensor:
            return torch.randint(high, shape, generator=generator).to(offsets.device)

        device = offsets.device
        self.offsets = offsets
        trees = pt.TreeBatch.from_trees([pt.DraftTree(p) for p in PARENTS], capacity=ROWS, device=device)
        self.trees = dataclasses.replace(trees, cu_nodes=offsets)
        self.slots, self.table = int32([4, 0, 3, 1, 2], device), integers(12, BATCH, 4).int()
        self.lens, self.start = int32([16, 9, 13, 7, 16], device), int32([3, 0, 6, 2, 9], device)
        self.path = int32([[0, 1, 3], [0, 1, -1], [0, 1, 2], [0, -1, -1], [0, 2, -1]], device)
        self.accepted = int32([2, 1, 2, 0, 1], device)
        self.verdict = pt.Verdict(self.path, self.accepted, integers(VOCAB, BATCH, 3), int32([0] * BATCH, device))
        self.logits, self.drafts = normal(ROWS, VOCAB), integers(VOCAB, ROWS)
        self.drawn = {"draft_law": "iid", "draft_probs": normal(ROWS, VOCAB).softmax(-1)}
        self.streams = {"seeds": integers(99, BATCH), "positions": integers(99, BATCH)}
        self.params = pt.SamplingParams(temperature=0.8, repetition_penalty=1.5)
        drafts = self.drafts.tolist()
        words = [[[5], [drafts[2], 7]], [], [[drafts[8], 3]], None, [[9]]]
        self.options = pt.RequestOptions.from_lists(VOCAB, bad_words=words, device=device)
        self.survival, self.q = normal(ROWS).abs(), normal(ROWS, 2, 64).bfloat16()
        self.cache = normal(2, 12, 4, 1, 64).bfloat16()
        self.heads, self.decays = normal(ROWS, 2, 16).bfloat16(), -normal(ROWS, 2).abs()
        self.state, self.conv_state = normal(BATCH, 2, 16, 16), normal(BATCH, 32, 2).bfloat16()
        self.x, self.weight = self.heads.flatten(1), normal(32, 3).bfloat16()

    def verify(self, op: Callable[..., pt.Verdict], **given: Any) -> pt.Verdict:
        given |= self.streams | {"options": self.options}
        return op(self.logits, self.drafts, self.trees, self.params, **given)

    def attend(self, mask: Tensor | None) -> Any:
        return pt.tree_attention(self.q, *self.cache, self.table, self.lens, self.offsets, mask, return_lse=True)

    def delta_rule(self, trees: pt.TreeBatch | None, **given: Tensor) -> Tensor:
        heads = (self.heads, self.heads, self.heads, self.decays, None)
        return pt.tree_delta_rule(*heads, self.state, self.slots, trees, **given)

    def convolve(self, trees: pt.TreeBatch | None, **given: Tensor) -> Tensor:
        return pt.tree_conv1d(self.x, self.weight, None, self.conv_state, self.slots, trees, **given)

    def advance_state(self, *path: Any, **given: Tensor) -> Tensor:
        pt.advance_state(self.state, self.slots, self.heads, self.heads, self.decays, None, *path, **given)
        return self.state

    def advance_conv(self, *path: Any, **given: Tensor) -> Tensor:
        pt.advance_conv(self.conv_state, self.slots, self.x, *path, **given)
        return self.conv_state


CALLS: dict[str, Callable[[Inputs], Any]] = {
    "build_trees": lambda t: pt.build_trees(t.trees.parents, t.offsets, max_nodes=5, max_depth=3),
    "select_nodes": lambda t: pt.select_nodes(t.trees, t.survival, 9),
    "slot_mapping": lambda t: pt.slot_mapping(t.table, t.lens, t.offsets, 4, total_q=ROWS),
    "prepare_step": lambda t: pt.prepare_step(t.trees, t.table, t.start, 4, total_q=ROWS),
    "commit": lambda t: pt.commit(t.verdict, t.trees, t.start, node_map=torch.arange(ROWS).int().to(t.start)),
    "tree_attention": lambda t: t.attend(None),
    "tree_attention of trees": lambda t: t.attend(t.trees.mask),
    "tree_delta_rule": lambda t: t.delta_rule(t.trees),
    "tree_delta_rule of sequences": lambda t: t.delta_rule(None, cu_seqlens=t.offsets),
    "tree_conv1d": lambda t: t.convolve(t.trees),
    "tree_conv1d of sequences": lambda t: t.convolve(None, cu_seqlens=t.offsets),
    "advance_state": lambda t: t.advance_state(t.trees, t.path, t.accepted),
    "advance_state of sequences": lambda t: t.advance_state(None, cu_seqlens=t.offsets),
    "advance_conv": lambda t: t.advance_conv(t.trees, t.path, t.accepted),
    "advance_conv of sequences": lambda t: t.advance_conv(None, cu_seqlens=t.offsets),
    "verify_greedy": lambda t: pt.verify_greedy(t.logits, t.drafts, t.trees),
    "verify_sampled": lambda t: t.verify(pt.verify_sampled),
    "verify_rejection": lambda t: t.verify(pt.verify_rejection, **t.drawn),
    "verify_block": lambda t: t.verify(pt.verify_block, **t.drawn),
    "verify_traversal": lambda t: t.verify(pt.verify_traversal, **t.drawn),
    "verify_typical": lambda t: pt.verify_typical(t.logits, t.drafts, t.trees, pt.SamplingParams()),
}


def sequence_of(row: int, offsets: list[int]) -> int:
    """The sequence that a row belongs to by a binary search, one bit of the answer after the other; -1 if none."""
    found, batch = 0, len(offsets) - 1
    for bit in (8, 4, 2, 1):
        if found + bit <= batch and offsets[found + bit] <= row:
            found += bit
    return found if offsets[found] <= row else -1


def ascending(offsets: list[int]) -> list[int]:
    """Returns what such offsets stand for."""
    bounds = sorted({0, *(max(offset, 0) for offset in offsets)})
    return [next(row for row in bounds if sequence_of(row, offsets) >= b) for b in range(len(offsets))]


def random_offsets(rng: random.Random) -> list[int]:
    offsets = list(OFFSETS)
    for _ in range(rng.randrange(1, 4)):
        offsets[rng.randrange(BATCH + 1)] = rng.choice([*range(-2, ROWS + 3), FAR, -FAR - 1])
    return rng.sample(offsets, len(offsets)) if rng.random() < 0.2 else offsets


def tensors_of(value: Any) -> list[Tensor]:
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        return [t for part in value for t in tensors_of(part)]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.parametrize("name", CALLS)
def test_they_are_read_as_ascending(
    backend: str, device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDTREE_SIMT_ORDER", "reverse")  # what two CTAs write would be another one's
    assert ascending(OFFSETS) == OFFSETS
    rng, call, descending = random.Random(0), CALLS[name], 0
    for _ in range(15 if "attention" in name else 40):
        offsets = random_offsets(rng)
        descending += sorted(offsets) != offsets
        own = int32(offsets, device)
        got, expected = (tensors_of(call(Inputs(o))) for o in (own, int32(ascending(offsets), device)))
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            # Some ops return the offsets as they are, or each of them clamped to the rows.
            assert a.equal(b) or (a.shape == own.shape and a.equal(own.clamp(*a.aminmax()))), (offsets, i, a, b)
    assert descending > 5


def test_the_first_and_last_rows_of_no_sequence() -> None:
    """Offsets that begin above 0, and one that no row reaches."""
    trees = pt.build_trees(int32([-1] * 8), int32([3, 1, 6, 4]), max_nodes=4, max_depth=2)
    assert trees.depths.tolist() == [-1, 0, *[-1] * 6]  # rows 1 to 5 are one tree
    assert ascending([3, 1, 6, 4]) == [1, 1, 6, 6]
    assert ascending([5, 3]) == [3, 3]
    slots = pt.slot_mapping(int64([[0, 1]]).int(), int32([4]), int32([5, 3]), 4, total_q=6)
    assert slots.tolist() == [-1] * 6
