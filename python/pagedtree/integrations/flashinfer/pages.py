"""FlashInfer's paged form of a KV cache: views, tables, and rows appended to it."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedtree import append_kv
from pagedtree._arguments import checked, expect_dims, expect_shape, refusal
from pagedtree.integrations.indices import INT32_MAX, as_int32

PagedKVCache = Tensor | tuple[Tensor, Tensor]


@checked()
def cache_views(paged_kv_cache: PagedKVCache, kv_layout: str = "NHD") -> tuple[Tensor, Tensor]:
    """Returns K and V [pages, page_size, heads, dim] as views of FlashInfer's cache, without a copy.

    paged_kv_cache: a tensor [pages, 2, page_size, heads, dim] (HND: [pages, 2, heads, page_size, dim]), or K and V
    without the dimension of 2. Any strides. Raises ValueError for other shapes or layouts.
    """
    if kv_layout not in ("NHD", "HND"):
        raise refusal("kv_layout", '"NHD" or "HND"', repr(kv_layout))
    one = isinstance(paged_kv_cache, Tensor)
    shapes = [[*x.shape] for x in ([paged_kv_cache] if isinstance(paged_kv_cache, Tensor) else paged_kv_cache)]
    if any(len(shape) != (5 if one else 4) for shape in shapes) or (one and shapes[0][1] != 2) or len(shapes) > 2:
        raise refusal("paged_kv_cache", "[pages, 2, ...] of 5 or two tensors of 4 dimensions", shapes)
    if isinstance(paged_kv_cache, Tensor):  # not unbound: autograd lets no such views be written
        k_cache, v_cache = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    else:
        k_cache, v_cache = paged_kv_cache
    return (k_cache, v_cache) if kv_layout == "NHD" else (k_cache.transpose(1, 2), v_cache.transpose(1, 2))


@checked(integers=("indptr", "indices", "last_page_len"))
def page_table(
    indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int, *, max_pages: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns (page_table int32 [B, max_pages], seq_lens int32 [B]) of FlashInfer's compressed rows.

    indptr: int [B + 1], where a sequence's pages begin in indices; last_page_len: int [B], keys in its last page.
    max_pages: default the largest page count, which synchronises. Offsets outside `indices` name no page (-1). Raises
    ValueError for wrong shapes.
    """
    if not 1 <= page_size < 2**31:
        raise refusal("page_size", "1 to 2^31 - 1", page_size)
    if max_pages is not None and not 0 <= max_pages < 2**31:
        raise refusal("max_pages", "0 to 2^31 - 1", max_pages)
    expect_dims("[B + 1]", indptr=indptr)
    expect_dims("[pages]", indices=indices)
    counts = indptr.diff()
    expect_shape(counts.shape, last_page_len=last_page_len)
    if max_pages is None:
        max_pages = min(max(int(counts.max()), 0), indices.numel()) if counts.numel() else 0
    column = torch.arange(max_pages, device=indptr.device, dtype=torch.int64)
    at = indptr[:-1, None].long() + column
    is_page = (column < counts[:, None]) & (at >= 0) & (at < indices.numel())
    at = torch.where(is_page, at, 0)
    table = torch.where(is_page, indices[at] if indices.numel() else -1, -1)
    keys = torch.where(counts > 0, (counts.long() - 1) * page_size + last_page_len, 0)
    return as_int32(table), keys.clamp(0, INT32_MAX).int()


@checked(integers=("batch_indices", "positions", "kv_indices", "kv_indptr"))
def append_paged_kv_cache(
    append_key: Tensor, append_value: Tensor, batch_indices: Tensor, positions: Tensor, paged_kv_cache: PagedKVCache,
    kv_indices: Tensor, kv_indptr: Tensor, kv_last_page_len: Tensor, kv_layout: str = "NHD",
) -> None:  # fmt: skip
    """Writes row i of append_key and append_value [n, heads, dim] at positions[i] of sequence batch_indices[i].

    append_key, append_value: rows of the cache's dtype or, for an fp8 cache, rows to be converted; see `append_kv`.
    batch_indices, positions: int [n]; a row that belongs to no sequence, or at a position outside its pages, is
    skipped. paged_kv_cache: written, see `cache_views`. kv_indices, kv_indptr: see `page_table`; kv_last_page_len has
    no effect. Raises ValueError for wrong shapes or dtypes.
    """
    k_cache, v_cache = cache_views(paged_kv_cache, kv_layout)
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, k_cache.shape[1], append_key.shape[0])
    append_kv(append_key, append_value, k_cache, v_cache, slots)


@checked(integers=("batch_indices", "positions", "kv_indices", "kv_indptr"))
def append_paged_mla_kv_cache(
    append_ckv: Tensor, append_kpe: Tensor, batch_indices: Tensor, positions: Tensor, ckv_cache: Tensor,
    kpe_cache: Tensor, kv_indices: Tensor, kv_indptr: Tensor, kv_last_page_len: Tensor,
) -> None:  # fmt: skip
    """Appends like `append_paged_kv_cache`, to the two parts of a latent cache.

    append_ckv, append_kpe: [n, dim]; ckv_cache, kpe_cache: [pages, page_size, dim], written, of any strides;
    kv_last_page_len has no effect.
    """
    expect_dims("[n, dim]", append_ckv=append_ckv, append_kpe=append_kpe)
    expect_dims("[pages, page_size, dim]", ckv_cache=ckv_cache, kpe_cache=kpe_cache)
    slots = _slots(batch_indices, positions, kv_indices, kv_indptr, ckv_cache.shape[1], append_ckv.shape[0])
    for new, cache in ((append_ckv, ckv_cache), (append_kpe, kpe_cache)):
        append_kv(new[:, None], None, cache[:, :, None], None, slots)


def _slots(
    batch_indices: Tensor, positions: Tensor, kv_indices: Tensor, kv_indptr: Tensor, page_size: int, n: int
) -> Tensor:
    expect_shape([n], batch_indices=batch_indices, positions=positions)
    expect_dims("[B + 1]", kv_indptr=kv_indptr)
    expect_dims("[pages]", kv_indices=kv_indices)
    offsets, rows = kv_indptr.long(), batch_indices.long()
    is_slot = (rows >= 0) & (rows < offsets.numel() - 1) & (positions >= 0)
    if offsets.numel() < 2 or kv_indices.numel() == 0:
        return torch.full_like(rows, -1)
    rows = torch.where(is_slot, rows, 0)
    at = offsets[rows] + positions // page_size
    is_slot &= (at >= 0) & (at < offsets[rows + 1].clamp(max=kv_indices.numel()))
    slots = kv_indices.long()[torch.where(is_slot, at, 0)] * page_size + positions % page_size
    return torch.where(is_slot, slots, -1)


@checked(integers=("kv_indptr", "kv_last_page_len"))
def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Returns int32 [B], keys of each sequence: in its full pages and kv_last_page_len; see `page_table`."""
    expect_dims("[B + 1]", kv_indptr=kv_indptr)
    return ((kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len).int()


@checked(integers=("append_indptr", "seq_lens", "batch_indices", "positions"))
def get_batch_indices_positions(
    append_indptr: Tensor, seq_lens: Tensor, nnz: int, batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (batch_indices, positions) of new rows, int32 [nnz] each, for `append_paged_kv_cache`.

    append_indptr: int [B + 1], offsets of the sequences' new rows, which are the last of seq_lens int [B] keys. Rows
    past its last offset get the sequence -1, which is skipped. batch_indices, positions: written and returned, if
    given. Raises ValueError for wrong shapes.
    """
    expect_dims("[B + 1]", append_indptr=append_indptr)
    expect_shape([append_indptr.numel() - 1], seq_lens=seq_lens)
    expect_shape([nnz], batch_indices=batch_indices, positions=positions)
    row = torch.arange(nnz, device=append_indptr.device, dtype=torch.int64)
    ends = append_indptr[1:].long()
    sequence = torch.searchsorted(ends, row, right=True)
    behind_last = torch.nn.functional.pad(seq_lens.long() - ends, (0, 1))[sequence]  # offset added to a row's number
    is_row = sequence < ends.numel()
    new_indices = torch.where(is_row, sequence, -1)
    new_positions = torch.where(is_row, row + behind_last, 0)
    return (
        new_indices.int() if batch_indices is None else batch_indices.copy_(new_indices),
        new_positions.int() if positions is None else positions.copy_(new_positions),
    )
