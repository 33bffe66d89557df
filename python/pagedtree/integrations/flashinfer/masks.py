"""FlashInfer's custom masks: one bit for each (query, key) of a sequence, keys of the prefix included.

A mask of booleans is flat: sequence after sequence, row after row, queries x keys. A packed one holds the same bits in
bytes, the lowest bit first; sequence b starts at byte mask_indptr[b]. Lengths are read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pagedtree._arguments import checked, expect_dims, expect_shape, refusal
from pagedtree.bits import unpacked
from pagedtree.tree import mask_words

_LENGTHS = {"qo_indptr", "seq_lens", "tree_lens"}


@checked(integers=_LENGTHS, one_device=False)
def import_custom_mask(
    custom_mask: Tensor, qo_indptr: Tensor, seq_lens: Tensor, tree_lens: Tensor | None = None
) -> Tensor:
    """Returns the mask words of `tree_attention`, int32 [T, W], of a boolean mask.

    custom_mask: bool [sum of queries x keys]. qo_indptr: int [B + 1], offsets of the queries. seq_lens: int [B], keys.
    tree_lens: int [B], the number of last keys that the words cover, also for tree_attention; default the queries, at
    most the keys. Raises ValueError for a wrong mask size, and for rows that do not see every earlier key.
    """
    sizes = _sizes(qo_indptr, seq_lens, tree_lens)
    num_bits = sum(n * s for n, s, _ in sizes)
    expect_shape([num_bits], custom_mask=custom_mask)
    parts = custom_mask.split([n * s for n, s, _ in sizes])
    return _words([part.view(n, s) for part, (n, s, _) in zip(parts, sizes, strict=True)], sizes, custom_mask.device)


@checked(integers=_LENGTHS | {"mask_indptr"}, one_device=False)
def import_packed_custom_mask(
    packed_custom_mask: Tensor,
    mask_indptr: Tensor | None,
    qo_indptr: Tensor,
    seq_lens: Tensor,
    tree_lens: Tensor | None = None,
) -> Tensor:
    """Converts a packed mask, uint8, as `import_custom_mask` does. mask_indptr: int [B + 1], default without gaps."""
    if packed_custom_mask.dtype != torch.uint8 or packed_custom_mask.dim() != 1:
        got = f"{packed_custom_mask.dtype} {[*packed_custom_mask.shape]}"
        raise refusal("packed_custom_mask", "uint8 in one dimension", got)
    sizes = _sizes(qo_indptr, seq_lens, tree_lens)
    begins = _byte_offsets(sizes) if mask_indptr is None else mask_indptr.tolist()
    rows = []
    if len(begins) < len(sizes) or min(begins, default=0) < 0:
        raise refusal("mask_indptr", f"{len(sizes)} offsets of at least 0", begins)
    for begin, (n, s, _) in zip(begins, sizes, strict=False):
        segment = packed_custom_mask[begin : begin + -(-n * s // 8)]
        if 8 * segment.numel() < n * s:
            raise refusal("packed_custom_mask", f"{n * s} bits from byte {begin} on", 8 * len(segment))
        bits = segment[:, None] >> torch.arange(8, dtype=torch.uint8, device=segment.device) & 1
        rows.append(bits.flatten()[: n * s].view(n, s))
    return _words(rows, sizes, packed_custom_mask.device)


@checked(integers=_LENGTHS | {"tree_mask"}, one_device=False)
def export_custom_mask(
    tree_mask: Tensor, qo_indptr: Tensor, seq_lens: Tensor, tree_lens: Tensor | None = None
) -> Tensor:
    """Returns the boolean mask for the arguments of `tree_attention`: bool [sum of queries x keys].

    tree_mask: int32 [T, W]; the others as in `import_custom_mask`. Raises ValueError for tree_lens outside 0..seq_lens,
    and for fewer rows than queries.
    """
    parts = _export(tree_mask, _sizes(qo_indptr, seq_lens, tree_lens))
    return torch.cat([torch.empty(0, dtype=torch.bool, device=tree_mask.device), *parts])


@checked(integers=_LENGTHS | {"tree_mask"}, one_device=False)
def export_packed_custom_mask(
    tree_mask: Tensor, qo_indptr: Tensor, seq_lens: Tensor, tree_lens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the packed mask of `export_custom_mask`, uint8, and its mask_indptr, int32 [B + 1], offsets in bytes."""
    sizes = _sizes(qo_indptr, seq_lens, tree_lens)
    weights = torch.arange(8, dtype=torch.uint8, device=tree_mask.device)
    parts = [torch.empty(0, dtype=torch.uint8, device=tree_mask.device)]
    for part in _export(tree_mask, sizes):
        bits = torch.nn.functional.pad(part, (0, -part.numel() % 8)).view(-1, 8)
        parts.append((bits.byte() << weights).sum(-1, dtype=torch.uint8))
    return torch.cat(parts), torch.tensor(_byte_offsets(sizes), dtype=torch.int32, device=tree_mask.device)


def _sizes(qo_indptr: Tensor, seq_lens: Tensor, tree_lens: Tensor | None) -> list[tuple[int, int, int]]:
    """Returns (queries, keys, keys that the words cover) of each sequence."""
    expect_dims("[B + 1]", qo_indptr=qo_indptr)
    queries, keys = qo_indptr.diff().tolist(), seq_lens.tolist()
    expect_shape([len(queries)], seq_lens=seq_lens, tree_lens=tree_lens)
    if min(queries, default=0) < 0 or (qo_indptr.numel() and qo_indptr[0] != 0):
        raise refusal("qo_indptr", "offsets from 0 that do not descend", qo_indptr.tolist())
    if min(keys, default=0) < 0:
        raise refusal("seq_lens", "at least 0 keys", keys)
    trees = map(min, queries, keys) if tree_lens is None else tree_lens.tolist()
    sizes = list(zip(queries, keys, trees, strict=True))
    for b, (_, s, t) in enumerate(sizes):
        if not 0 <= t <= s:
            raise refusal("tree_lens", f"0 to {s} keys in sequence {b}", t)
    return sizes


def _byte_offsets(sizes: Sequence[tuple[int, int, int]]) -> list[int]:
    return [0, *accumulate(-(-n * s // 8) for n, s, _ in sizes)]


def _words(masks: Sequence[Tensor], sizes: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:
    width = max((t for _, _, t in sizes), default=0)
    rows = []
    for b, (mask, (_, s, t)) in enumerate(zip(masks, sizes, strict=True)):
        if not mask[:, : s - t].all():
            raise refusal("custom_mask", f"every row of sequence {b} to see its first {s - t} keys")
        rows.append(torch.nn.functional.pad(mask[:, s - t :] != 0, (0, width - t)))
    empty = torch.empty(0, width, dtype=torch.bool, device=device)
    return mask_words(torch.cat([empty, *rows]))


def _export(tree_mask: Tensor, sizes: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    expect_dims("[T, W]", tree_mask=tree_mask)
    rows = sum(n for n, _, _ in sizes)
    if rows > tree_mask.shape[0]:
        raise refusal("tree_mask", f"a row for each of {rows} queries", tree_mask.shape[0])
    parts, begin = [], 0
    for n, s, t in sizes:
        words = torch.nn.functional.pad(tree_mask[begin : begin + n], (0, max(0, -(-t // 32) - tree_mask.shape[1])))
        parts.append(torch.nn.functional.pad(unpacked(words, t), (s - t, 0), value=True).flatten())
        begin += n
    return parts
