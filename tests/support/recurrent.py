"""Layers with a recurrent state, on trees and sequences."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedtree as pt
from pagedtree import TreeBatch, build_trees
from support import int32, offsets_of, seeded

PLAIN = torch.float32  # default dtype


@pytest.fixture(autouse=True)
def plain_dtype(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets PLAIN for importing files: only the cpu backend has float32."""
    if backend != "cpu":
        monkeypatch.setattr(sys.modules[__name__], "PLAIN", torch.float16)


def trees_of(sizes: list[int], seed: int = 0, *, reach: int = 9, padding: int = 0) -> TreeBatch:
    """Draws trees; a parent is among the `reach` nodes before."""
    generator, parents = torch.Generator("cpu").manual_seed(seed), []
    for size in sizes:
        for i in range(size):
            parents.append(int(torch.randint(max(0, i - reach), i, (), generator=generator, device="cpu")) if i else -1)
    most = max([*sizes, 1])
    return build_trees(int32(parents + [-1] * padding), offsets_of(sizes), max_nodes=most, max_depth=most - 1)


def paths_to(trees: TreeBatch, leaves: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Returns accept_index and num_accepted of paths to nodes, -1: none."""
    accept, accepted = [], []
    for b, leaf in enumerate(leaves):
        path: list[int] = []
        while leaf >= 0:
            path.insert(0, leaf)
            leaf = int(trees.parents[trees.cu_nodes[b] + leaf])
        accept.append(path + [-1] * (width - len(path)))
        accepted.append(max(len(path) - 1, 0))
    return int32(accept).reshape(len(leaves), width), int32(accepted)


@dataclass
class Layer:
    """A call's arguments, with trees or cu_seqlens."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    state: Tensor
    state_index: Tensor
    trees: TreeBatch | None
    options: dict = field(default_factory=dict)

    def part(self, rows: slice | Tensor, **changes: Any) -> Layer:
        """Selects rows; `changes` has their trees or cu_seqlens."""
        names = ("q", "k", "v", "g", "beta")
        return replace(self, **{name: getattr(self, name)[rows] for name in names}, **changes)

    def as_batch(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Returns transformers' arguments for one sequence: q, k, v, g, beta; state."""
        assert self.beta is not None
        rows = [t[None] for t in (self.q, self.k, self.v, self.g, self.beta)]
        return rows, {"initial_state": self.state[:1], "output_final_state": True}

    def run(self, op: Callable = pt.tree_delta_rule) -> Tensor:
        return op(self.q, self.k, self.v, self.g, self.beta, self.state, self.state_index, self.trees, **self.options)

    def advance(self, op: Callable = pt.advance_state, *path: Tensor) -> Tensor:
        options = {name: value for name, value in self.options.items() if name != "scale"}
        arguments = (self.state_index, self.k, self.v, self.g, self.beta, self.trees, *path)
        if op is not pt.advance_state:
            return op(self.state, *arguments, **options)
        state = torch.empty_strided(self.state.shape, self.state.stride()).copy_(self.state)
        op(state, *arguments, **options)
        return state


def layer(
    rows: TreeBatch | list[int], *, dims: tuple[int, int] = (32, 24), heads: tuple[int, int] = (2, 4),
    dtype: torch.dtype | None = None, channels: bool = False, with_beta: bool = True, seed: int = 1,
    transposed: bool = False, slots: list[int] | None = None, **options: object,
) -> Layer:  # fmt: skip
    generator = seeded(seed)
    if isinstance(rows, TreeBatch):
        trees, count, batch = rows, rows.parents.shape[0], rows.batch_size
    else:
        trees, count, batch = None, sum(rows), len(rows)
        options["cu_seqlens"] = offsets_of(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    (key_dim, value_dim), (key_heads, value_heads), dtype = dims, heads, dtype or PLAIN
    # Strided, as columns of one projection.
    q, k = draw(count, 2 * key_heads * key_dim + 8).to(dtype)[:, : 2 * key_heads * key_dim].chunk(2, 1)
    if not options.get("l2norm"):
        q, k = (torch.nn.functional.normalize(x.unflatten(1, (key_heads, key_dim)).float(), dim=-1) for x in (q, k))
        q, k = q.to(dtype), k.to(dtype)
    state = draw(batch + 3, value_heads, key_dim, value_dim)
    if transposed:
        state = state.transpose(2, 3).contiguous().transpose(2, 3)
    return Layer(
        q.reshape(count, key_heads, key_dim) if q.dim() == 3 else q.unflatten(1, (key_heads, key_dim)),
        k.reshape(count, key_heads, key_dim) if k.dim() == 3 else k.unflatten(1, (key_heads, key_dim)),
        draw(count, value_heads, 2 * value_dim).to(dtype)[..., :value_dim],
        -draw(count, value_heads, *([key_dim] if channels else [])).abs(),
        draw(value_heads, count).sigmoid().T if with_beta else None,
        state,
        int32(slots if slots is not None else [(b + 2) % (batch + 3) for b in range(batch)]),
        trees,
        options,
    )


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))
