"""SGLang's tree masks in their buffers, and as words for `tree_attention`."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from pagedtree._arguments import expect_shape, refusal
from pagedtree.bits import packed
from pagedtree.integrations.indices import INT32_MAX
from pagedtree.tree import mask_words


class TreeMaskMode(IntEnum):
    """The buffer layout of a tree mask of N nodes per sequence; the sequences follow each other.

    FULL_MASK: one byte for each (node, position), N rows of seq_len + N; QLEN_ONLY: one byte for each (node, node);
    QLEN_ONLY_BITPACKING: the bits of a row in 1, 2 or 4 bytes (N up to 8, 16, 32), the lowest first.
    """

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


def _cells(seq_lens: Tensor, n: int, mode: int) -> Tensor:
    """Returns int64 [bs, n, n]: the tree's byte offsets in a byte mask, which may be too small for them."""
    seq_lens = seq_lens.clamp(0, INT32_MAX)
    rows = n + seq_lens if mode == TreeMaskMode.FULL_MASK else torch.full_like(seq_lens, n)
    begin = (rows.cumsum(0) - rows) * n + rows - n
    nodes = torch.arange(n, device=seq_lens.device, dtype=torch.int64)
    return begin[:, None, None] + rows[:, None, None] * nodes[:, None] + nodes


def _packed_rows(tree_mask: Tensor, bs: int, n: int) -> Tensor:
    if n > 32:
        raise refusal("draft_token_num", "at most 32 in a bit-packed mask", n)
    width = 4 if n > 16 else 2 if n > 8 else 1
    raw = tree_mask.view(-1).view(torch.uint8)
    if raw.numel() < bs * n * width:
        raise refusal("tree_mask", f"at least {bs * n * width} bytes", raw.numel())
    return raw[: bs * n * width].view(bs * n, width)


def _flat_bytes(tree_mask: Tensor, bs: int, n: int) -> Tensor:
    if tree_mask.element_size() != 1 or tree_mask.numel() < bs * n * n:
        wanted = f"at least {bs * n * n} elements of one byte"
        raise refusal("tree_mask", wanted, f"{tree_mask.numel()} {tree_mask.dtype}")
    return tree_mask.view(-1).view(torch.uint8)


def _mode(tree_mask_mode: int) -> TreeMaskMode:
    modes = [mode.value for mode in TreeMaskMode]
    if tree_mask_mode not in modes:
        raise refusal("tree_mask_mode", f"one of {modes}", tree_mask_mode)
    return TreeMaskMode(tree_mask_mode)


def write_mask(tree_mask: Tensor, seen: Tensor, seq_lens: Tensor, mode: int) -> None:
    """Writes seen, bool [bs, N, N], to a mask's buffer; drops entries past its end."""
    bs, n, _ = seen.shape
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        rows = _packed_rows(tree_mask, bs, n)
        rows.copy_(packed(seen).view(bs * n, 1).view(torch.uint8)[:, : rows.shape[1]])
    else:
        cells, values = _cells(seq_lens, n, _mode(mode)).flatten(), seen.flatten().byte()
        mask = _flat_bytes(tree_mask, bs, n)
        if cells.numel() == 0:
            return
        is_inside = cells < mask.numel()
        # Cells past the buffer's end repeat the first cell's write instead.
        first = torch.where(is_inside[0], cells[0], 0), torch.where(is_inside[0], values[0], mask[0])
        mask.scatter_(0, torch.where(is_inside, cells, first[0]), torch.where(is_inside, values, first[1]))


def tree_mask_words(tree_mask: Tensor, seq_lens: Tensor, draft_token_num: int, tree_mask_mode: int) -> Tensor:
    """Returns the mask of `tree_attention`, int32 [bs * N, ceil(N / 32)], of SGLang's mask (see `TreeMaskMode`).

    seq_lens: integers [bs], without the trees. Only the tree parts of byte masks are read; 0 past the buffer. Raises
    ValueError for a mask that is too small for the trees alone, or packed for more than 32 nodes.
    """
    bs, n = seq_lens.numel(), draft_token_num
    expect_shape([bs], seq_lens=seq_lens)
    if tree_mask_mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        rows = _packed_rows(tree_mask, bs, n)
        return torch.nn.functional.pad(rows, (0, 4 - rows.shape[1])).view(torch.int32)
    cells, mask = _cells(seq_lens.long(), n, _mode(tree_mask_mode)), _flat_bytes(tree_mask, bs, n)
    is_inside = cells < mask.numel()
    seen = (mask[torch.where(is_inside, cells, 0)] != 0) & is_inside
    return mask_words(seen.flatten(0, 1))
