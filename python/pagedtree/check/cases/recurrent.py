"""tree_delta_rule, advance_state, tree_conv1d, advance_conv."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pagedtree import TreeBatch, advance_conv, advance_state, build_trees, tree_conv1d, tree_delta_rule
from pagedtree.check.case import Case, Place, Results, relative
from pagedtree.check.cases.inputs import DTYPES, int32, offsets, path_to, random_tree, seeded
from pagedtree.reference import recurrent as loops

TREES, LENGTHS = (9, 0, 1, 33, 12), (5, 0, 1, 130)
# Whether a decay is a channel's or a head's, and whether there is a delta.
KINDS = {"gdn": (False, True), "kda": (True, True), "mamba2": (False, False), "gla": (True, False)}
BOUNDS = {"fp32": 1e-4, "fp16": 2.5e-3, "bf16": 1e-2}  # of a result as a whole; a row may have twice as much


def cases() -> Iterator[Case]:
    for dtype in ("bf16", "fp16", "fp32"):
        for kind in KINDS:
            yield from _delta_rule(f"trees/{dtype}/{kind}", dtype, kind, TREES)
            yield from _delta_rule(f"causal/{dtype}/{kind}", dtype, kind, None)
        for width, activation in ((4, "silu"), (2, None), (1, None), (16, "silu")):
            yield from _conv(f"trees/{dtype}/{width} taps", dtype, width, activation, TREES)
            yield from _conv(f"causal/{dtype}/{width} taps", dtype, width, activation, None)
    for i, dims in enumerate(((8, 8), (8, 256), (256, 8), (40, 72), (136, 200), (128, 128), (256, 64))):
        kind = ("gdn", "kda")[i % 2]
        yield from _delta_rule(f"heads of {dims[0]} and {dims[1]}", "bf16", kind, (20, 5), dims=dims)
    for dtype, nodes, layout, kind in itertools.product(
        ("fp16", "bf16"), (16, 64), ("channels", "columns"), ("gdn", "kda")
    ):
        name = f"states by {layout}/{nodes} nodes/{dtype}/{kind}"
        reach = 2 if nodes > 16 else 7  # so that the path has more than 16 nodes
        yield from _delta_rule(name, dtype, kind, (9, nodes), reach=reach, by_columns=layout == "columns")
    yield from _delta_rule("100 trees", "bf16", "kda", (2,) * 100, dims=(72, 8))
    yield from _delta_rule("a chain of 256", "bf16", "gdn", (256, 3), reach=1)
    yield from _delta_rule("256 nodes", "bf16", "kda", (256,), reach=40)
    yield from _delta_rule("decays of -inf", "bf16", "kda", TREES, forgetting=True)
    yield from _delta_rule("decays of -inf in sequences", "bf16", "gdn", None, forgetting=True)
    yield from _delta_rule("no sequence", "bf16", "gdn", ())
    yield from _conv("no sequence", "bf16", 4, "silu", ())


def _rows(sizes: Sequence[int] | None, reach: int) -> tuple[TreeBatch | None, Tensor | None, int, int]:
    """Returns the trees, with three rows of padding, or cu_seqlens; then the numbers of rows and sequences."""
    if sizes is None:
        return None, offsets(LENGTHS), sum(LENGTHS), len(LENGTHS)
    parents = [parent for b, n in enumerate(sizes) if n for parent in random_tree(b, n, reach).parents.tolist()]
    bound = max([*sizes, 1])
    trees = build_trees(int32(parents + [-1] * 3), offsets(sizes), max_nodes=bound, max_depth=bound - 1)
    return trees, None, len(parents) + 3, len(sizes)


def _path(trees: TreeBatch | None) -> tuple[Tensor, ...]:
    if trees is None:
        return ()
    nodes, accepted = list[list[int]](), []
    for b, (begin, end) in enumerate(zip(trees.cu_nodes.tolist(), trees.cu_nodes.tolist()[1:], strict=False)):
        path = path_to((end - begin) // 2 if b and end > begin else -1, trees.parents[begin:end])
        accepted.append(max(len(path) - 1, 0))
        nodes.append(path)
    width = max([len(path) for path in nodes] + [1])
    return int32([path + [-1] * (width - len(path)) for path in nodes]).reshape(-1, width), int32(accepted)


def _delta_rule(
    name: str, dtype: str, kind: str, sizes: Sequence[int] | None, *, dims: tuple[int, int] = (64, 32), reach: int = 7,
    forgetting: bool = False, by_columns: bool = False,
) -> Iterator[Case]:  # fmt: skip
    trees, cut, count, batch = _rows(sizes, reach)
    generator, (key_dim, value_dim) = seeded(count), dims
    # Columns of one wide projection, and states as transformers keeps them.
    wide = torch.randn(count, 4 * key_dim + 4 * value_dim, generator=generator, dtype=torch.float32)
    q, k, v = wide.to(DTYPES[dtype]).split([2 * key_dim, 2 * key_dim, 4 * value_dim], 1)
    q, k, v = q.unflatten(1, (2, key_dim)), k.unflatten(1, (2, key_dim)), v.unflatten(1, (4, value_dim))
    of_channels, with_delta = KINDS[kind]
    g = -torch.rand(count, 4, *([key_dim] if of_channels else []), generator=generator, dtype=torch.float32)
    if forgetting:
        g[torch.rand(g.shape, generator=generator, dtype=torch.float32) < 0.1] = -torch.inf
    beta = torch.rand(count, 4, generator=generator, dtype=torch.float32) if with_delta else None
    state = torch.randn(batch + 2, 4, value_dim, key_dim, generator=generator, dtype=torch.float32).transpose(2, 3)
    if by_columns:  # a channel's columns are contiguous, not a column's channels
        state = state.contiguous()
    index = int32([b + 1 if b != 2 else -1 for b in range(batch)])
    options: dict[str, Any] = {"l2norm": True, "l2norm_eps": 4.0}  # large, so that it shows
    factor = 0.3 if kind == "kda" else None
    path: Any = _path(trees)

    def run(place: Place) -> Results:
        inputs = place.put((q, k, v, g, beta, state, index, trees))
        return {"out": tree_delta_rule(*inputs, cu_seqlens=place.put(cut), **options, scale=factor)}

    def advance(place: Place) -> Results:
        inputs = place.put((state, index, k, v, g, beta, trees, *path))
        advance_state(*inputs, cu_seqlens=place.put(cut), **options)
        return {"state": inputs[0]}

    def outputs() -> Results:
        return {
            "out": loops.tree_delta_rule(q, k, v, g, beta, state, index, trees, cu_seqlens=cut, **options, scale=factor)
        }

    def states() -> Results:
        return {"state": loops.advance_state(state, index, k, v, g, beta, trees, *path, cu_seqlens=cut, **options)}

    near = relative(2 * BOUNDS[dtype], floor=0.3)
    backends = ("cpu",) if dtype == "fp32" else None
    yield Case(f"tree_delta_rule/{name}", ("tree_delta_rule",), run, outputs, compare={"out": near}, backends=backends)
    yield Case(f"advance_state/{name}", ("advance_state",), advance, states, compare={"state": near}, backends=backends)


def _conv(name: str, dtype: str, width: int, activation: Any, sizes: Sequence[int] | None) -> Iterator[Case]:
    trees, cut, count, batch = _rows(sizes, 7)
    generator, channels = seeded(width), 150
    x = torch.randn(count, channels + 3, generator=generator, dtype=torch.float32).to(DTYPES[dtype])[:, 3:]
    weight = torch.randn(channels, width, generator=generator, dtype=torch.float32).to(DTYPES[dtype])
    bias = weight[:, 0].contiguous() if activation else None
    state = torch.randn(batch + 2, width - 1, channels, generator=generator, dtype=torch.float32)
    state = state.to(DTYPES[dtype]).transpose(1, 2)
    index = int32([b + 1 if b != 2 else -1 for b in range(batch)])
    path: Any = _path(trees)

    def run(place: Place) -> Results:
        inputs = place.put((x, weight, bias, state, index, trees))
        return {"out": tree_conv1d(*inputs, cu_seqlens=place.put(cut), activation=activation)}

    def advance(place: Place) -> Results:
        inputs = place.put((state, index, x, trees, *path))
        advance_conv(*inputs, cu_seqlens=place.put(cut))
        return {"conv_state": inputs[0]}

    def outputs() -> Results:
        return {"out": loops.tree_conv1d(x, weight, bias, state, index, trees, cu_seqlens=cut, activation=activation)}

    def states() -> Results:
        return {"conv_state": loops.advance_conv(state, index, x, trees, *path, cu_seqlens=cut)}

    near, backends = relative(2 * BOUNDS[dtype], floor=0.3), ("cpu",) if dtype == "fp32" else None
    yield Case(f"tree_conv1d/{name}", ("tree_conv1d",), run, outputs, compare={"out": near}, backends=backends)
    yield Case(f"advance_conv/{name}", ("advance_conv",), advance, states, backends=backends)
