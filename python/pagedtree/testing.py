"""Test helpers: the choice of backend, and drafts that expose the mistakes of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from pagedtree._arguments import checked, expect_dims, expect_shape, refusal
from pagedtree._ops import ops
from pagedtree.drafting.draft import Draft
from pagedtree.tree import MAX_NODES, build_trees

__all__ = ["backends", "decoy_propose", "use_backend"]


@cache
def _known() -> tuple[str, ...]:
    return tuple(ops._backends().split(","))


def backends() -> list[str]:
    """Returns the backends that run here: "cpu", "simt" if built, "cuda" with a GPU."""
    return [name for name in _known() if name != "cuda" or torch.cuda.is_available()]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Runs ops on CPU tensors with backend `name` ("cpu" or "simt"); for the whole process, until the block ends.

    Raises ValueError for a backend that this build lacks.
    """
    if name not in backends():
        raise refusal("name", f"one of {', '.join(backends())}", name)
    if name == "cuda":  # chosen by the tensors' device
        yield
        return
    previous = ops._use_backend(_known().index(name))
    try:
        yield
    finally:
        ops._use_backend(previous)


@checked(integers=("texts", "lengths", "root_tokens"))
def decoy_propose(
    texts: Tensor,
    lengths: Tensor,
    *,
    max_nodes: int,
    max_depth: int,
    root_tokens: Tensor | None = None,
    active: Tensor | None = None,
) -> Draft:
    """Drafts the known continuation of each text, every right token behind siblings that are wrong.

    Tests an engine: generate without drafts, then propose these texts. A correct engine gives the same texts and
    accepts max_depth drafts in every step with enough text left. No accepted node's row equals its depth, so an engine
    that forgets `compact_kv` diverges.

    Args:
        texts: int32 or int64 [B, L], prompt and continuation; negative after the end.
        lengths: int32 or int64 [B], tokens of each text so far, at least 1: the root is the last of them.
        max_nodes: most nodes of a tree, root included, from 2 * max_depth + 1 to 1024.
        max_depth: right drafts of a tree, >= 1.
        root_tokens: int32 or int64 [B], the roots' tokens by the engine. Default: from `texts`.
        active: bool [B]; False = finished: a tree of no nodes.

        width = (max_nodes - 1) // max_depth
        node = 0                                                    # the root
        for depth in range(1, max_depth + 1):
            children = [*(width - 1 wrong tokens), texts[b, lengths[b] + depth - 1]]      # all of them of `node`
            node = width * depth                                    # the last child

    Past a text's end all tokens are -1, which are no drafts.

    Returns a `Draft` of draft_tokens and trees. Raises ValueError for wrong shapes, dtypes or bounds.
    """
    expect_dims("[B, L]", texts=texts)
    batch, length = texts.shape
    expect_shape([batch], lengths=lengths, root_tokens=root_tokens, active=active)
    if active is not None and active.dtype != torch.bool:
        raise refusal("active", "torch.bool", active.dtype)
    if max_depth < 1:
        raise refusal("max_depth", "at least 1", max_depth)
    if not 2 * max_depth < max_nodes <= MAX_NODES:
        raise refusal("max_nodes", f"{2 * max_depth + 1} to {MAX_NODES}", max_nodes)
    width = (max_nodes - 1) // max_depth
    padded_texts = F.pad(texts.long(), (1, max_depth), value=-1)  # column p + 1 has the token of position p
    columns = lengths.long()[:, None] + torch.arange(max_depth + 1, dtype=torch.int64, device=texts.device)
    root, truth = padded_texts.gather(1, columns.clamp(0, length + max_depth)).split([1, max_depth], dim=1)
    distance = torch.arange(width - 1, -1, -1, dtype=torch.int64, device=texts.device)
    decoys = torch.where(truth[:, :, None] >= distance, truth[:, :, None] - distance, truth[:, :, None] + distance)
    drafts = torch.where(truth[:, :, None] >= 0, decoys, -1).flatten(1)
    tokens = torch.cat([root if root_tokens is None else root_tokens.long()[:, None], drafts], dim=1)
    nodes = torch.arange(1 + width * max_depth, dtype=torch.int32, device=texts.device)
    parents = torch.where(nodes > 0, (nodes - 1) // width * width, -1).expand(batch, -1)
    active = torch.ones_like(lengths, dtype=torch.bool) if active is None else active
    row_order = active.logical_not().int().argsort(stable=True)  # rows of idle sequences become padding, which is last
    is_kept = active[row_order, None]
    cu_nodes = F.pad((active * nodes.numel()).cumsum(0), (1, 0)).int()
    trees = build_trees(
        torch.where(is_kept, parents, -1).int().flatten(), cu_nodes, max_nodes=max_nodes, max_depth=max_depth
    )
    return Draft(torch.where(is_kept, tokens[row_order], -1).flatten(), trees)
