"""FlashInfer's paged form of a KV cache: views, tables, and rows appended to it."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedtree import append_kv
from pagedtree._arguments import checked, expect_dims
from pagedtree.integrations.indices import INT32_MAX, as_int32

__all__ = ["PagedKVCache", "append_paged_kv_cache", "cache_views", "page_table"]

PagedKVCache = Tensor | tuple[Tensor, Tensor]


@checked()
def cache_views(paged_kv_cache: PagedKVCache, kv_layout: str = "NHD") -> tuple[Tensor, Tensor]:
    """K and V [pages, page_size, heads, dim] as views of FlashInfer's cache; nothing is copied.

    paged_kv_cache: a tensor [pages, 2, page_size, heads, dim] (HND: [pages, 2, heads, page_size, dim]), or K and V
    without the dimension of 2. Any strides. Raises ValueError for other shapes or layouts.
    """
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f'kv_layout: expected "NHD" or "HND", got {kv_layout!r}')
    one = isinstance(paged_kv_cache, Tensor)
    shapes = [[*x.shape] for x in ([paged_kv_cache] if isinstance(paged_kv_cache, Tensor) else paged_kv_cache)]
    if any(len(shape) != (5 if one else 4) for shape in shapes) or (one and shapes[0][1] != 2) or len(shapes) > 2:
        raise ValueError(f"paged_kv_cache: expected [pages, 2, ...] of 5 or two tensors of 4 dimensions, got {shapes}")
    if isinstance(paged_kv_cache, Tensor):  # not unbound: autograd lets no such views be written
        k_cache, v_cache = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    else:
        k_cache, v_cache = paged_kv_cache
    return (k_cache, v_cache) if kv_layout == "NHD" else (k_cache.transpose(1, 2), v_cache.transpose(1, 2))


@checked(integers=("indptr", "indices", "last_page_len"))
def page_table(
    indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int, *, max_pages: int | None = None
) -> tuple[Tensor, Tensor]:
    """(page_table int32 [B, max_pages], seq_lens int32 [B]) of FlashInfer's compressed rows.

    Args:
        indptr: int [B + 1], where a sequence's pages begin in indices; last_page_len: int [B], keys in its last page.
        max_pages: width of the table; default the most pages of a sequence, which synchronises.

    Offsets outside `indices` name no page (-1). Raises ValueError where last_page_len has another shape than the
    sequences.
    """
    if not 1 <= page_size < 2**31:
        raise ValueError(f"page_size: expected 1 to 2^31 - 1, got {page_size}")
    if max_pages is not None and not 0 <= max_pages < 2**31:
        raise ValueError(f"max_pages: expected 0 to 2^31 - 1, got {max_pages}")
    expect_dims("[B + 1]", indptr=indptr)
    expect_dims("[pages]", indices=indices)
    counts = indptr.diff()
    if last_page_len.shape != counts.shape:
        raise ValueError(f"last_page_len: expected shape {[*counts.shape]}, got {[*last_page_len.shape]}")
    if max_pages is None:
        max_pages = min(max(int(counts.max()), 0), indices.numel()) if counts.numel() else 0
    column = torch.arange(max_pages, device=indptr.device)
    at = indptr[:-1, None].long() + column
    known = (column < counts[:, None]) & (at >= 0) & (at < indices.numel())
    at = torch.where(known, at, 0)
    table = torch.where(known, indices[at] if indices.numel() else -1, -1)
    keys = torch.where(counts > 0, (counts.long() - 1) * page_size + last_page_len, 0)
    return as_int32(table), keys.clamp(0, INT32_MAX).int()


@checked(integers=("batch_indices", "positions", "kv_indices", "kv_indptr"))
def append_paged_kv_cache(
    append_key: Tensor, append_value: Tensor, batch_indices: Tensor, positions: Tensor, paged_kv_cache: PagedKVCache,
    kv_indices: Tensor, kv_indptr: Tensor, kv_last_page_len: Tensor, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Writes row i of append_key and append_value [n, heads, dim] at positions[i] of sequence batch_indices[i].

    Args:
        append_key, append_value: rows of the cache's dtype or, for an fp8 cache, rows to be converted; see `append_kv`.
        batch_indices, positions: int [n]. A row that belongs to no sequence, or at a position outside the sequence's
            pages, is skipped.
        paged_kv_cache: written, see `cache_views`.
        kv_indices, kv_indptr: the sequences' pages, see `page_table`; kv_last_page_len is not needed.

    Raises ValueError for wrong shapes or dtypes.
    """
    k_cache, v_cache = cache_views(paged_kv_cache, kv_layout)
    page_size, shape = k_cache.shape[1], (append_key.shape[0],)
    for name, values in (("batch_indices", batch_indices), ("positions", positions)):
        if values.shape != shape:
            raise ValueError(f"{name}: expected shape {[*shape]}, got {[*values.shape]}")
    expect_dims("[B + 1]", kv_indptr=kv_indptr)
    expect_dims("[pages]", kv_indices=kv_indices)
    offsets, rows = kv_indptr.long(), batch_indices.long()
    known = (rows >= 0) & (rows < offsets.numel() - 1) & (positions >= 0)
    if offsets.numel() < 2 or kv_indices.numel() == 0:
        return
    rows = torch.where(known, rows, 0)
    at = offsets[rows] + positions // page_size
    known &= (at >= 0) & (at < offsets[rows + 1].clamp(max=kv_indices.numel()))
    slots = kv_indices.long()[torch.where(known, at, 0)] * page_size + positions % page_size
    append_kv(append_key, append_value, k_cache, v_cache, torch.where(known, slots, -1))
