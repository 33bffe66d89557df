"""SGLang's draft trees: `build_tree_kernel_efficient`, and its links read back."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from pagedtree import TreeBatch, build_trees
from pagedtree._arguments import checked, expect_shape, refusal
from pagedtree.integrations.sglang.masks import write_mask

LINKS = ("retrive_index", "retrive_next_token", "retrive_next_sibling")


def either_spelling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Accepts retrieve_* for an argument retrive_*."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = {name.replace("retrieve_", "retrive_"): value for name, value in kwargs.items()}
        if len(arguments) < len(kwargs):
            raise refusal("retrive_*", "it or retrieve_*", "both of one argument", TypeError)
        return function(*args, **arguments)

    return call


def expect_links(bs: int, n: int, *links: Tensor) -> None:
    expect_shape([bs, n], **dict(zip(LINKS, links, strict=True)))


@either_spelling
@checked(
    integers=("parent_list", "selected_index", "verified_seq_len", "positions", *LINKS),
    written=("tree_mask", "positions", *LINKS),
)
def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Links EAGLE's selected drafts into trees of N = draft_token_num nodes.

    Args:
        parent_list: integers [bs, topk * (depth - 1) + 1] (any width at depth 1): entry t is the draft that the t-th
            group of topk drafts continues.
        selected_index: integers [bs, N - 1], the drafts chosen; draft x is in group x // topk; group 0 follows the
            root.
        verified_seq_len: integers [bs], the lengths without the tree.
        tree_mask: written as `TreeMaskMode` says; bool or bytes (bit-packed: any integers), contiguous. FULL_MASK's
            prefix part stays unchanged.
        positions: [bs * N], written: verified_seq_len + depth of the node.
        retrive_index, retrive_next_token, retrive_next_sibling: [bs, N], written: the flat row b * N + i, first child
            and next sibling (-1: none).
        topk, depth: branching and levels of the draft.

    Malformed trees come out as SGLang's: a node whose parent was not selected has none; a node sees the root and up to
    `depth` nodes from itself upwards. Trees outside tree_mask are not written. Raises ValueError for wrong shapes and
    for topk, depth or draft_token_num below 1.
    """
    for name, value in (("topk", topk), ("depth", depth), ("draft_token_num", draft_token_num)):
        if value < 1:
            raise refusal(name, "at least 1", value)
    n, bs = draft_token_num, verified_seq_len.numel()
    expect_shape([bs], verified_seq_len=verified_seq_len)
    expect_shape([bs, n - 1], selected_index=selected_index)
    width = parent_list.shape[-1] if depth == 1 else topk * (depth - 1) + 1
    expect_shape([bs, width], parent_list=parent_list)
    expect_shape([bs * n], positions=positions)
    expect_links(bs, n, retrive_index, retrive_next_token, retrive_next_sibling)

    parents = _selected_parents(parent_list, selected_index, topk)
    nodes = torch.arange(n, device=parents.device, dtype=torch.int64)
    up = torch.nn.functional.pad(parents, (0, 1), value=n)
    at, levels = nodes.expand(bs, n), torch.zeros_like(parents)
    seen = torch.zeros(bs, n, n + 1, dtype=torch.bool, device=parents.device)
    for _ in range(min(depth, n)):
        seen.scatter_(2, at[:, :, None], True)
        levels = levels + ((at > 0) & (at < n))
        at = up.gather(1, at)
    seen[:, :, 0] = True
    write_mask(tree_mask, seen[:, :, :n], verified_seq_len.long(), tree_mask_mode)
    children = parents[:, None, :] == nodes[:, None]
    younger = (parents[:, :, None] == parents[:, None, :]) & (parents < n)[:, :, None] & (nodes > nodes[:, None])
    for link, candidates in ((retrive_next_token, children), (retrive_next_sibling, younger)):
        link.copy_(torch.where(candidates.any(-1), candidates.byte().argmax(-1), -1))
    retrive_index.copy_(torch.arange(bs * n, device=parents.device, dtype=torch.int64).view(bs, n))
    levels = torch.where((at > 0) & (at < n), depth, levels)  # parents may form a circle
    positions.copy_((verified_seq_len[:, None] + levels).flatten())


def _selected_parents(parent_list: Tensor, selected_index: Tensor, topk: int) -> Tensor:
    """Returns int64 [bs, N]: the parent of each node's draft, or N at the root and for unselected parents."""
    group = selected_index.long() // topk
    indices = torch.nn.functional.pad(parent_list.long(), (0, 1), value=-1)
    match = selected_index[:, None, :] == indices.gather(1, group.clamp(0, indices.shape[1] - 1))[:, :, None]
    match = torch.nn.functional.pad(match, (1, 1))  # node 0, and "none" behind the last
    match[:, :, -1] = True
    parents = torch.where(group > 0, match.byte().argmax(-1), 0)
    return torch.nn.functional.pad(parents, (1, 0), value=selected_index.shape[1] + 1)


@either_spelling
@checked(integers=("verified_seq_len", "positions", *LINKS), written=("positions", *LINKS))
def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Writes the links and positions of trees of N = draft_token_num nodes, given as masks.

    tree_mask: bool or bytes, bs * N * N elements: node i sees node j; parents come before their children. positions:
    [bs * N], verified_seq_len [bs] + the number of earlier nodes that a node sees. The links are as
    `build_tree_kernel_efficient` writes them; a node's parent is the last earlier node that it sees. Raises ValueError
    for wrong shapes.
    """
    bs, n = batch_size, draft_token_num
    if tree_mask.element_size() != 1 or tree_mask.numel() != bs * n * n:
        got = f"{tree_mask.numel()} of {tree_mask.dtype}"
        raise refusal("tree_mask", f"{bs * n * n} elements of one byte", got)
    expect_shape([bs], verified_seq_len=verified_seq_len)
    expect_shape([bs * n], positions=positions)
    expect_links(bs, n, retrive_index, retrive_next_token, retrive_next_sibling)
    node = torch.arange(n, device=tree_mask.device, dtype=torch.int64)
    sees = (tree_mask.view(torch.uint8).reshape(bs, n, n) != 0) & (node < node[:, None])
    parent = torch.where(sees, node, -1).amax(-1) if n else sees.sum(-1)
    sibling = (parent[:, :, None] == parent[:, None, :]) & (parent >= 0)[:, :, None] & (node > node[:, None])
    for link, later in ((retrive_next_token, sees.transpose(1, 2)), (retrive_next_sibling, sibling)):
        link.copy_(torch.where(later.any(-1), later.byte().argmax(-1), -1) if n else parent)
    retrive_index.copy_(torch.arange(bs * n, device=node.device, dtype=torch.int64).view(bs, n))
    positions.copy_((verified_seq_len[:, None] + sees.sum(-1)).flatten())


def trees_from_links(next_token: Tensor, next_sibling: Tensor, max_depth: int) -> tuple[TreeBatch, Tensor]:
    """Returns the trees of SGLang's links [bs, N], sorted parents and elder siblings first, unreachable nodes last, and
    order [bs, N]: node i of a tree is the caller's order[i]."""
    bs, n = next_token.shape
    nodes = torch.arange(n, device=next_token.device, dtype=torch.int64).expand(bs, n)
    no_link = nodes.new_full((bs, n + 1), n)
    links = (torch.where((link > 0) & (link < n), link.long(), n) for link in (next_token, next_sibling))
    parent, elder = (no_link.scatter(1, link, nodes) for link in links)
    parent[:, n] = elder[:, n] = n
    up = torch.where(parent < n, parent, elder)  # the node before each node on the way from the root
    up[:, 0] = 0
    eldest = torch.where(parent < n, torch.arange(n + 1, device=nodes.device, dtype=torch.int64), elder)
    hops = torch.ones_like(up)
    hops[:, 0] = 0
    for _ in range(n.bit_length()):  # twice as far each time; a node that has not arrived after n moves is in a circle
        hops, up = hops + hops.gather(1, up), up.gather(1, up)
        eldest = eldest.gather(1, eldest)
    order = hops[:, :n].argsort(dim=1, stable=True)
    rank = torch.nn.functional.pad(order.argsort(1), (0, 1), value=n)
    parents = rank.gather(1, parent.gather(1, eldest).gather(1, order)).int()
    parents[:, 0] = -1
    cu_nodes = torch.arange(bs + 1, dtype=torch.int32, device=order.device) * n
    return build_trees(parents.flatten(), cu_nodes, max_nodes=n, max_depth=max_depth), order
