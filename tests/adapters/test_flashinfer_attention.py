"""FlashInfer's paged form and masks over tree_attention, against dense attention of each sequence alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support import int32
from support.attention import Pages, causal_mask, close, dense_attention, random_trees, tree_sees
from support.devices import placed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedtree.attention import PLAN_SIZE, tree_attention
from pagedtree.check.cases.inputs import as_words, offsets
from pagedtree.integrations.flashinfer import (
    BatchPrefillWithPagedKVCacheWrapper,
    append_paged_kv_cache,
    cache_views,
    export_custom_mask,
    export_packed_custom_mask,
    import_custom_mask,
    import_packed_custom_mask,
    page_table,
)

HEADS, KV_HEADS, DIM = 4, 2, 64


class Batch:
    """Random sequences in FlashInfer's form, in one tensor or two of either layout."""

    def __init__(
        self, lens: list[int], queries: list[int], page_size: int, dtype, layout="NHD", form=1, dims=(DIM, DIM)
    ):
        self.lens, self.queries, self.page_size, self.layout, self.dtype = lens, queries, page_size, layout, dtype
        self.dim = dims[0]
        self.paged = Pages.random(lens, page_size, KV_HEADS, dims[0], dtype, dim_v=dims[1])
        caches = [self.paged.k_cache, self.paged.v_cache]
        if layout == "HND":
            caches = [cache.transpose(1, 2).contiguous() for cache in caches]
        self.kv_cache = torch.stack(caches, 1) if form == 1 else tuple(caches)
        self.indptr = offsets([len(pages) for pages in self.paged.pages])
        self.indices = int32([page for pages in self.paged.pages for page in pages])
        self.last_page_len = int32([(s - 1) % page_size + 1 if s else 0 for s in lens])
        self.qo_indptr = offsets(queries)
        generator = torch.Generator().manual_seed(2)
        self.q = placed(torch.randn(sum(queries), HEADS, self.dim, generator=generator, device="cpu").to(dtype))

    @property
    def form(self) -> tuple[Any, ...]:
        """Returns the first arguments of plan()."""
        rows = self.qo_indptr, self.indptr, self.indices, self.last_page_len
        return *rows, HEADS, KV_HEADS, self.dim, self.page_size

    def plan(self, **options) -> BatchPrefillWithPagedKVCacheWrapper:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(8), self.layout)
        wrapper.plan(*self.form, **{"q_data_type": self.dtype, **options})
        return wrapper

    def causal(self, window: int = 0) -> list[Tensor]:
        return [causal_mask(n, s, window=window) for n, s in zip(self.queries, self.lens, strict=True)]

    def expected(self, sees: list[Tensor], **options) -> tuple[Tensor, Tensor]:
        rows = zip(self.q.split(self.queries), self.paged.k, self.paged.v, sees, strict=True)
        outs, lses = zip(*(dense_attention(*row, **options) for row in rows), strict=True)
        return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", [1, 2])
def test_the_cache_is_not_copied(layout, form) -> None:
    batch = Batch([9, 4], [1, 1], 4, torch.float32, layout, form)
    views = cache_views(batch.kv_cache, layout)
    storages = [batch.kv_cache.untyped_storage()] * 2 if form == 1 else [c.untyped_storage() for c in batch.kv_cache]
    for view, storage, original in zip(views, storages, (batch.paged.k_cache, batch.paged.v_cache), strict=True):
        assert view.untyped_storage().data_ptr() == storage.data_ptr()
        torch.testing.assert_close(view, original, equal_nan=True, rtol=0, atol=0)
    odd = torch.zeros(9, 2, 5, 3, 70)[1:, :, 1:, :, 3:67]  # strides are kept
    k_cache, v_cache = cache_views(odd)
    assert k_cache.data_ptr() == odd.data_ptr() and v_cache.stride() == odd[:, 1].stride()


def test_page_table() -> None:
    table, lens = page_table(int32([0, 2, 2, 5]), int32([7, 3, 4, 1, 0]), int32([1, 0, 16]), 16)
    assert table.tolist() == [[7, 3, -1], [-1] * 3, [4, 1, 0]] and lens.tolist() == [17, 0, 48]
    assert table.dtype == lens.dtype == torch.int32
    table, lens = page_table(int32([0, 2]), int32([7, 3]), int32([1]), 16, max_pages=4)
    assert table.tolist() == [[7, 3, -1, -1]]
    assert page_table(int32([0]), int32([]), int32([]), 16, max_pages=0)[0].shape == (0, 0)
    assert page_table(int32([0, 3]), int32([5]), int32([1]), 1)[0].tolist() == [[5]]  # more pages than exist


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("form", "dims"), [(1, (DIM, DIM)), (2, (DIM, DIM)), (2, (192, 128))])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_causal_and_full(backend, dtype, layout, form, dims, page_size) -> None:
    batch = Batch([37, 0, 8, 3], [5, 0, 8, 1], page_size, dtype, layout, form, dims)
    out = batch.plan(causal=True, head_dim_vo=dims[1]).run(batch.q, batch.kv_cache)
    close(out, batch.expected(batch.causal())[0])
    out, lse = batch.plan().run(batch.q, batch.kv_cache, return_lse=True)
    everything = [torch.ones(n, s, dtype=torch.bool) for n, s in zip(batch.queries, batch.lens, strict=True)]
    expected, natural = batch.expected(everything)
    close(out, expected)
    torch.testing.assert_close(lse, natural / math.log(2), atol=2e-3, rtol=2e-3)


def tree_batch(dtype, sizes=(7, 1, 33, 0), prefixes=(12, 0, 30, 5), page_size=8):
    batch = Batch([p + n for p, n in zip(prefixes, sizes, strict=True)], list(sizes), page_size, dtype)
    trees = random_trees([max(n, 1) for n in sizes])
    return batch, [tree_sees(tree, p)[:n, : p + n] for tree, p, n in zip(trees, prefixes, sizes, strict=True)]


def packed(sees: list[Tensor]) -> Tensor:
    parts = [np.packbits(seen.flatten().cpu().numpy(), bitorder="little") for seen in sees]
    return placed(torch.from_numpy(np.concatenate(parts)))


@pytest.mark.parametrize("mask", ["custom_mask", "packed_custom_mask"])
def test_tree_masks(backend, dtype, mask) -> None:
    batch, sees = tree_batch(dtype)
    flags = packed(sees) if mask.startswith("packed") else torch.cat([seen.flatten() for seen in sees])
    out, lse = batch.plan(**{mask: flags}).run(batch.q, batch.kv_cache, return_lse=True, lse_base="ln", lse_layout="HN")
    expected, natural = batch.expected(sees)
    close(out, expected)
    assert lse.is_contiguous()
    torch.testing.assert_close(lse, natural.T, atol=2e-3, rtol=2e-3)


def test_any_pattern(backend, dtype) -> None:
    """Some sequences have more queries than keys, some rows no visible key."""
    batch = Batch([6, 9, 3], [6, 4, 6], 4, dtype)
    generator = torch.Generator().manual_seed(0)
    rows = zip(batch.queries, batch.lens, strict=True)
    sees = [placed(torch.rand(n, s, generator=generator, device="cpu") < 0.5) for n, s in rows]
    sees[0][2] = False
    sees[1][:, :5] = True
    wrapper = batch.plan(custom_mask=torch.cat([seen.flatten() for seen in sees])[None])
    out, lse = wrapper.run(batch.q, batch.kv_cache, return_lse=True)
    close(out, batch.expected(sees)[0])
    assert not out[2].any() and (lse[2] == -torch.inf).all()
    close(batch.plan(causal=True).run(batch.q, batch.kv_cache), batch.expected(batch.causal())[0])


def test_windows_caps_sinks_and_buffers(backend, dtype) -> None:
    batch = Batch([37, 8], [5, 8], 4, dtype)
    wrapper = batch.plan(causal=True, window_left=6, logits_soft_cap=2.5, sm_scale=0.2)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out, lse = torch.empty_like(batch.q), torch.empty(13, HEADS)
    result = wrapper.run(batch.q, batch.kv_cache, sinks=sinks, out=out, lse=lse, return_lse=True)
    assert result[0] is out and result[1] is lse
    sees = batch.causal(window=7)  # inclusive
    expected, natural = batch.expected(sees, scale=0.2, softcap=2.5, sinks=sinks)
    close(out, expected)
    torch.testing.assert_close(lse, natural / math.log(2), atol=3e-3, rtol=3e-3)
    out = wrapper.run(batch.q, batch.kv_cache, window_left=2)
    close(out, batch.expected(batch.causal(window=3), scale=0.2, softcap=2.5)[0])


def test_fp8_cache(backend, dtype) -> None:
    batch = Batch([20, 7], [3, 7], 4, dtype)
    stored = (batch.kv_cache.nan_to_num() * 16).to(torch.float8_e4m3fn)
    out = batch.plan(causal=True).run(batch.q, stored, k_scale=1 / 16, v_scale=torch.tensor(1 / 16))
    for side in (batch.paged.k, batch.paged.v):
        side[:] = [(x * 16).to(torch.float8_e4m3fn).float() / 16 for x in side]
    close(out, batch.expected(batch.causal())[0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append(backend, dtype, layout) -> None:
    batch = Batch([37, 8, 3], [5, 8, 1], 4, dtype, layout)
    blank = torch.full_like(batch.kv_cache, torch.nan)
    where = torch.tensor([(b, i) for b, s in enumerate(batch.lens) for i in range(s)] + [(1, 8), (2, -1), (0, 99)])
    k, v = (torch.cat([*side, side[0][:3]]) for side in (batch.paged.k, batch.paged.v))  # the last three are skipped
    form = batch.indices, batch.indptr, batch.last_page_len
    append_paged_kv_cache(k, v, where[:, 0].int(), where[:, 1].int(), blank, *form, kv_layout=layout)
    torch.testing.assert_close(blank, batch.kv_cache, equal_nan=True, rtol=0, atol=0)


def test_older_names_of_plan_and_run(backend, dtype) -> None:
    batch = Batch([37, 8], [5, 3], 4, dtype, form=2)
    expected, lse = batch.expected(batch.causal())
    inputs, wrapper = (batch.q, batch.kv_cache), BatchPrefillWithPagedKVCacheWrapper(torch.empty(8))
    with pytest.raises(RuntimeError, match="begin_forward"):
        wrapper.forward(*inputs)
    wrapper.begin_forward(*batch.form)
    full, _ = wrapper.run_return_lse(*inputs)
    close(wrapper.forward(*inputs, causal=True), expected)
    out, found = wrapper.forward_return_lse(*inputs, causal=True)
    close(out, expected)
    torch.testing.assert_close(found, lse / math.log(2), atol=2e-3, rtol=2e-3)
    assert torch.equal(wrapper.forward(*inputs), full) and not torch.equal(full, out)
    narrow = wrapper.forward(*inputs, causal=True, window_left=0)  # each row returns its key's value
    assert torch.equal(narrow[4], batch.paged.v[0][36].repeat_interleave(2, 0))
    with pytest.raises(NotImplementedError, match="pos_encoding_mode"):
        wrapper.forward(*inputs, pos_encoding_mode="ROPE_LLAMA")
    wrapper.end_forward()


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ({"q_data_type": torch.bfloat16}, ValueError),
        ({"kv_data_type": "bfloat16"}, ValueError),
        ({"o_data_type": torch.bfloat16}, NotImplementedError),
    ],
)
def test_dtypes_that_contradict_the_tensors(backend, dtype, told, error) -> None:
    batch = Batch([37, 8], [5, 3], 4, dtype)
    close(
        batch.plan(causal=True, **dict.fromkeys(told, dtype)).run(batch.q, batch.kv_cache),
        batch.expected(batch.causal())[0],
    )
    with pytest.raises(error, match=rf"{next(iter(told))}: plan\(\) was told torch.bfloat16, run\(\) got {dtype}"):
        batch.plan(causal=True, **told).run(batch.q, batch.kv_cache)


# masks ----------------------------------------------------------------------------------------------------------------


def test_masks_there_and_back() -> None:
    _, sees = tree_batch(torch.float32)
    flat, qo_indptr = torch.cat([seen.flatten() for seen in sees]), offsets([len(seen) for seen in sees])
    seq_lens = int32([seen.shape[1] for seen in sees])
    words = import_custom_mask(flat, qo_indptr, seq_lens)
    rows = torch.cat([as_words(seen[:, seen.shape[1] - len(seen) :].numpy(), 2) for seen in sees])
    assert torch.equal(words, rows)
    assert torch.equal(export_custom_mask(words, qo_indptr, seq_lens), flat)
    bits, mask_indptr = export_packed_custom_mask(words, qo_indptr, seq_lens)
    assert torch.equal(bits, packed(sees))
    assert mask_indptr.tolist() == offsets([-(-seen.numel() // 8) for seen in sees]).tolist()
    for indptr in (mask_indptr, None):
        assert torch.equal(import_packed_custom_mask(bits, indptr, qo_indptr, seq_lens), words)
    spaced = torch.cat([torch.full((3,), 255, dtype=torch.uint8), bits])
    assert torch.equal(import_packed_custom_mask(spaced, mask_indptr + 3, qo_indptr, seq_lens), words)


@pytest.mark.parametrize(("lens", "queries", "tree_lens"), [([14], [2], [5]), ([14, 6], [3, 2], [0, 0])])
def test_rectangular_masks(backend, dtype, lens, queries, tree_lens) -> None:
    """Two queries of a tree of five; words without keys, which make all visible."""
    batch = Batch(lens, queries, 4, dtype)
    sees = [torch.ones(n, s, dtype=torch.bool) for n, s in zip(queries, lens, strict=True)]
    if any(tree_lens):
        sees = [tree_sees(random_trees([5])[0], 9)[3:]]
    form = batch.qo_indptr, int32(lens), int32(tree_lens)
    flat = torch.cat([seen.flatten() for seen in sees])
    words = import_custom_mask(flat, *form)
    assert words.shape == (sum(queries), 1)
    table, seq_lens = page_table(batch.indptr, batch.indices, batch.last_page_len, 4)
    out = tree_attention(
        batch.q, *cache_views(batch.kv_cache), table, seq_lens, batch.qo_indptr, words, tree_lens=int32(tree_lens)
    )
    close(out, batch.expected(sees)[0])
    assert torch.equal(export_custom_mask(words, *form), flat)


def test_masks_that_are_refused() -> None:
    form = offsets([2, 2]), int32([5, 4])
    mask = torch.ones(18, dtype=torch.bool)
    mask[11] = False  # sequence 1, first row, second key of its prefix
    with pytest.raises(ValueError, match="every row of sequence 1 to see its first 2 keys"):
        import_custom_mask(mask, *form)
    assert import_custom_mask(mask, *form, int32([2, 4])).tolist() == [[3], [3], [13], [15]]
    with pytest.raises(ValueError, match="packed_custom_mask: expected 8 bits from byte 2 on, got 0"):
        import_packed_custom_mask(torch.zeros(2, dtype=torch.uint8), None, *form)


class LargestStorage(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        storages = [x.untyped_storage() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.bytes = max([self.bytes, *(storage.nbytes() for storage in storages)])
        return result


@pytest.mark.parametrize("causal", [False, True])
def test_offsets_of_queries_that_are_not_there(causal) -> None:
    """Such offsets are refused before an allocation of their size."""
    batch = Batch([3, 5], [1, 2], 4, torch.float32)
    largest = LargestStorage()

    def outcome(begins: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        batch.qo_indptr = torch.tensor(begins, dtype=dtype)
        with largest:
            return batch.plan(causal=causal).run(batch.q, batch.kv_cache)

    assert outcome([0, 1, 3]).shape == batch.q.shape
    for begins, message in {
        (0, 1, 2**26): "expected at most 3 queries, the rows of q, got 67108864",
        (0, 2**26, 2**26): "expected at most 3 queries, the rows of q, got 67108864",
        (0, 1, 4): "expected at most 3 queries, the rows of q, got 4",
        (0, 1, 2**40): r"expected offsets that int32 can hold, got \[0, 1, 1099511627776\]",
        (1, 1, 3): r"expected offsets from 0 that do not descend, got \[1, 1, 3\]",
        (0, 4, 3): r"expected offsets from 0 that do not descend, got \[0, 4, 3\]",
        (0, 0, -1): r"expected offsets from 0 that do not descend, got \[0, 0, -1\]",
        (0, 3): r"expected shape \[3\], got \[2\]",
        (): r"expected shape \[3\], got \[0\]",
    }.items():
        with pytest.raises(ValueError, match=rf"^[\w.]+: qo_indptr: {message}$"):
            outcome([*begins], torch.int64)
    assert largest.bytes <= 4 * PLAN_SIZE


def test_other_refusals() -> None:
    batch = Batch([3], [1], 4, torch.float32)
    run = batch.plan(causal=True).run
    with pytest.raises(NotImplementedError, match="q_scale: expected none"):
        run(batch.q, batch.kv_cache, q_scale=2.0)
    with pytest.raises(NotImplementedError, match="args: expected none"):
        run(batch.q, batch.kv_cache, 1.0)
    with pytest.raises(ValueError, match="lse_base: expected one of"):
        run(batch.q, batch.kv_cache, lse_base="log10")
    with pytest.raises(NotImplementedError, match="use_cuda_graph: expected none"):
        BatchPrefillWithPagedKVCacheWrapper(torch.empty(8), "NHD", use_cuda_graph=True, backend="fa2")
    with pytest.raises(ValueError, match="kv_layout: expected"):
        BatchPrefillWithPagedKVCacheWrapper(torch.empty(8), "TND")
    with pytest.raises(RuntimeError, match=r"plan\(\)"):
        BatchPrefillWithPagedKVCacheWrapper(torch.empty(8)).run(batch.q, batch.kv_cache)
    with pytest.raises(ValueError, match="paged_kv_cache: expected"):
        cache_views(batch.kv_cache[:, 0])
    with pytest.raises(ValueError, match="paged_kv_cache: expected"):
        cache_views(torch.zeros(4, 3, 4, 2, 64))
