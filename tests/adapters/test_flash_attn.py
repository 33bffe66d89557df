"""FlashAttention's functions on pagedtree, against dense attention of each sequence alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.attention import Pages, close, dense_attention
from support.devices import placed
from torch import Tensor

from pagedtree.check.cases.inputs import offsets
from pagedtree.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

HEADS, KV_HEADS, DIM = 4, 2, 64


def queries(*shape: int, dtype: torch.dtype, dim: int = DIM) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return placed(torch.randn(*shape, HEADS, dim, generator=generator, device="cpu").to(dtype))


def mask_of(n: int, s: int, is_causal: bool, left: int = -1, right: int = -1) -> Tensor:
    """Builds FlashAttention's bottom-right aligned mask."""
    query, key = torch.arange(n)[:, None] + s - n, torch.arange(s)
    mask = key <= query if is_causal else torch.ones(n, s, dtype=torch.bool)
    mask = mask & (key <= query + right) if right >= 0 and not is_causal else mask
    return mask & (key >= query - left) if left >= 0 else mask


def expected(q: list[Tensor], k: list[Tensor], v: list[Tensor], masks: list[Tensor], **options) -> tuple[list, list]:
    rows = zip(q, k, v, masks, strict=True)
    outs, lses = zip(*(dense_attention(*row, **options) for row in rows), strict=True)
    return list(outs), list(lses)


# flash_attn_with_kvcache ----------------------------------------------------------------------------------------------


# causal, and window to both sides
SEES = [(True, (-1, -1)), (True, (0, -1)), (True, (6, 0)), (True, (3, 5)), (False, (-1, -1))]
SEES += [(False, window) for window in ((3, 2), (0, 4), (5, -1), (-1, 3), (90, 90))]
DIMS = [(DIM, DIM), (192, 128)]  # of K and V


@pytest.mark.each_value
@pytest.mark.parametrize(("is_causal", "window_size"), SEES)
@pytest.mark.parametrize("page_size", [1, 7, 16, 256])
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize(("n", "m"), [(1, 0), (1, 1), (4, 4), (2, 5), (5, 2), (12, 0)])
def test_paged_cache(backend, dtype, is_causal, window_size, page_size, dims, n, m) -> None:
    """Some sequences have fewer keys than queries."""
    lens = [37, m, 7 + m, 67]
    paged = Pages.random(lens, page_size, KV_HEADS, dims[0], dtype, dim_v=dims[1])
    q = queries(4, n, dtype=dtype, dim=dims[0])
    caches, table = [paged.k_cache.clone(), paged.v_cache.clone()], paged.table()
    for b, s in enumerate(lens):  # the new rows are absent
        for position in range(s - m, s):
            for cache in caches:
                cache[table[b, position // page_size], position % page_size] = torch.nan
    new = [torch.stack([rows[len(rows) - m :] for rows in side]) for side in (paged.k, paged.v)] if m else []
    options = dict(causal=is_causal, window_size=window_size, softmax_scale=0.2, softcap=2.5, num_splits=3)
    before = torch.tensor(lens, dtype=torch.int32) - m
    options |= dict(cache_seqlens=before, block_table=table, return_softmax_lse=True)
    out, lse = flash_attn_with_kvcache(q, *caches, *new, **options)
    masks = [mask_of(n, s, is_causal, *window_size) for s in lens]
    outs, lses = expected(list(q), paged.k, paged.v, masks, scale=0.2, softcap=2.5)
    close(out, torch.stack(outs))
    assert lse.shape == (4, HEADS, n) and lse.dtype == torch.float32
    torch.testing.assert_close(lse, torch.stack(lses).transpose(1, 2), atol=2e-3, rtol=2e-3)
    for cache, right in zip(caches, (paged.k_cache, paged.v_cache), strict=True):
        torch.testing.assert_close(cache, right, equal_nan=True, rtol=0, atol=0)


def test_latent_cache() -> None:
    """The first 512 columns of a key are its value."""
    paged, q = Pages.random([37, 8], 16, 1, 576, torch.float32), queries(2, 3, dtype=torch.float32, dim=576)
    form = {"cache_seqlens": torch.tensor([37, 8], dtype=torch.int32), "block_table": paged.table()}
    caches = paged.k_cache, paged.k_cache[..., :512]
    out = flash_attn_with_kvcache(q, *caches, **form, causal=True, softmax_scale=0.1)
    values = [rows[..., :512] for rows in paged.k]
    close(out, torch.stack(expected(list(q), paged.k, values, [mask_of(3, s, True) for s in (37, 8)], scale=0.1)[0]))


def test_cache_without_pages(backend, dtype) -> None:
    q, index = queries(3, 2, dtype=dtype), torch.tensor([4, 0, 2], dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    big = placed(torch.randn(2, 5, 9, KV_HEADS + 1, DIM, generator=generator, device="cpu").to(dtype))
    k_cache, v_cache = big[:, :, :, 1:].unbind(0)  # a strided view
    sides = [[cache[i] for i in index.tolist()] for cache in (k_cache, v_cache)]
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_batch_idx=index)
    close(out, torch.stack(expected(list(q), *sides, [mask_of(2, 9, False)] * 3)[0]))
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=6, causal=True)
    rows = [[cache[b, :6] for b in range(3)] for cache in (k_cache, v_cache)]
    close(out, torch.stack(expected(list(q), *rows, [mask_of(2, 6, True)] * 3)[0]))
    # Appends past the cache's end are skipped.
    before, new = big.clone(), torch.ones(3, 2, KV_HEADS, DIM, dtype=dtype)
    flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=8, causal=True)
    before[:, :3, 8, 1:] = 1
    assert torch.equal(big, before)
    # The window counts from the last present key.
    out = flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=8, window_size=(2, 3))
    rows = [[cache[b] for b in range(3)] for cache in (k_cache, v_cache)]
    close(out, torch.stack(expected(list(q), *rows, [mask_of(2, 9, False, 2, 3)] * 3)[0]))


def test_no_sequence_and_no_query(backend, dtype) -> None:
    cache = torch.zeros(3, 4, KV_HEADS, DIM, dtype=dtype)
    for batch, n, window_size in itertools.product((0, 2), (0, 3), ((-1, -1), (2, 3))):
        lens, table = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, 1, dtype=torch.int32)
        out = flash_attn_with_kvcache(
            queries(batch, n, dtype=dtype), cache, cache, cache_seqlens=lens, block_table=table, window_size=window_size
        )
        assert out.shape == (batch, n, HEADS, DIM) and not out.any()


def rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first columns of x [n, H, D] by cos and sin [P, half]."""
    cos, sin, half = cos[positions, None].float(), sin[positions, None].float(), cos.shape[1]
    front, out = x[..., : 2 * half].float(), x.clone()
    if interleaved:
        a, b = front[..., ::2], front[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = front.split(half, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    out[..., : 2 * half] = turned.to(x.dtype)
    return out


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("n", "m", "is_causal"), [(3, 3, True), (2, 3, True), (3, 3, False)])
def test_rotary(backend, dtype, interleaved, n, m, is_causal) -> None:
    lens, generator = [30, 7 + m], torch.Generator().manual_seed(3)
    paged, q = Pages.random(lens, 16, KV_HEADS, DIM, dtype), queries(2, n, dtype=dtype)
    angles = placed(torch.rand(64, 16, generator=generator, device="cpu") * 6)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    new = [torch.stack([rows[len(rows) - m :] for rows in side]) for side in (paged.k, paged.v)]
    before = torch.tensor(lens, dtype=torch.int32) - m
    options = {"block_table": paged.table(), "causal": is_causal, "rotary_interleaved": interleaved}
    out = flash_attn_with_kvcache(q, paged.k_cache, paged.v_cache, *new, cos, sin, before, **options)
    turn = {"cos": cos, "sin": sin, "interleaved": interleaved}
    turned_q, turned_k = [], []
    for b, start in enumerate(before.tolist()):
        turned_q.append(rotated(q[b], start + torch.arange(n) * is_causal, **turn))
        turned_k.append(torch.cat([paged.k[b][:start], rotated(new[0][b], start + torch.arange(m), **turn)]))
    masks = [mask_of(n, s, is_causal) for s in lens]
    close(out, torch.stack(expected(turned_q, turned_k, paged.v, masks)[0]))


def test_call_form_of_flash_attention_3(backend, dtype) -> None:
    """Ragged queries and keys, hints, and fp8 scales expanded over the batch."""
    lens, lens_q, news = [30, 9, 4], [4, 1, 0], [4, 0, 2]
    paged, q = Pages.random(lens, 16, KV_HEADS, DIM, dtype), queries(5, dtype=dtype)
    new = [torch.cat([rows[len(rows) - m :] for rows, m in zip(x, news, strict=True)]) for x in (paged.k, paged.v)]
    form = dict(cu_seqlens_q=offsets(lens_q), max_seqlen_q=4, page_table=paged.table(), causal=True, pack_gqa=True)
    form |= dict(num_splits=1, sm_margin=0, return_softmax_lse=True)
    before = torch.tensor(lens, dtype=torch.int32) - torch.tensor(news, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        q, paged.k_cache, paged.v_cache, *new, cache_seqlens=before, cu_seqlens_k_new=offsets(news), **form
    )
    masks = [mask_of(n, s, True) for n, s in zip(lens_q, lens, strict=True)]
    outs, lses = expected(list(q.split(lens_q)), paged.k, paged.v, masks)
    close(out, torch.cat(outs))
    torch.testing.assert_close(lse, torch.cat(lses).T, atol=2e-3, rtol=2e-3)
    angles = placed(torch.rand(64, 16, generator=torch.Generator().manual_seed(3), device="cpu") * 6)
    turn = {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
    caches, turned = [paged.k_cache.clone(), paged.v_cache.clone()], {**turn, "rotary_seqlens": before + 3}
    ragged = flash_attn_with_kvcache(
        q, *caches, *new, **turned, cache_seqlens=before, cu_seqlens_k_new=offsets(news), **form
    )[0]
    positions = torch.cat([int(b) + 3 + torch.arange(n) for b, n in zip(before, lens_q, strict=True)])
    q0 = rotated(q, positions, *turn.values(), True)[:4]
    k0 = torch.cat([paged.k[0][:26], rotated(new[0][:4], 29 + torch.arange(4), *turn.values(), True)])
    close(ragged[:4], dense_attention(q0, k0, paged.v[0], masks[0])[0])
    stored = [(x.nan_to_num() * 16).to(torch.float8_e4m3fn) for x in (paged.k_cache, paged.v_cache)]
    scale = torch.tensor(1 / 16).expand(3, KV_HEADS)
    form |= {"cache_seqlens": torch.tensor(lens, dtype=torch.int32)}
    out = flash_attn_with_kvcache(q, *stored, k_descale=scale, v_descale=scale, **form)[0]
    back = [[(x * 16).to(torch.float8_e4m3fn).float() / 16 for x in side] for side in (paged.k, paged.v)]
    close(out, torch.cat(expected(list(q.split(lens_q)), *back, masks)[0]))
    with pytest.raises(NotImplementedError, match="k_descale: expected the same scales for all sequences"):
        flash_attn_with_kvcache(q, *stored, k_descale=scale.clone(), v_descale=scale, **form)
    rows = torch.cat(paged.k), torch.cat(paged.v)
    lengths = torch.tensor([29, 9, 2], dtype=torch.int32)
    out = flash_attn_varlen_func(q, *rows, offsets(lens_q), offsets(lens), 4, 30, causal=True, seqused_k=lengths)
    sides = [[x[:n] for x, n in zip(side, lengths.tolist(), strict=True)] for side in (paged.k, paged.v)]
    masks = [mask_of(n, s, True) for n, s in zip(lens_q, lengths.tolist(), strict=True)]
    close(out, torch.cat(expected(list(q.split(lens_q)), *sides, masks)[0]))


# flash_attn_varlen_func -----------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize(("is_causal", "window_size"), SEES)
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("lens_k", [[5, 12, 40, 0], [3, 12, 40, 0]])  # fewer keys than queries, too
def test_ragged_batches(backend, dtype, is_causal, window_size, page_size, dims, lens_k) -> None:
    lens_q = [5, 0, 9, 1]
    paged = Pages.random(lens_k, page_size or 16, KV_HEADS, dims[0], dtype, dim_v=dims[1])
    q = queries(15, dtype=dtype, dim=dims[0])
    rows = (torch.cat(paged.k), torch.cat(paged.v)) if page_size is None else (paged.k_cache, paged.v_cache)
    options = {"causal": is_causal, "window_size": window_size, "softmax_scale": 0.3, "softcap": 3.0}
    options |= {} if page_size is None else {"block_table": paged.table()}
    out = flash_attn_varlen_func(q, *rows, offsets(lens_q), offsets(lens_k), 9, 40, deterministic=True, **options)
    masks = [mask_of(n, s, is_causal, *window_size) for n, s in zip(lens_q, lens_k, strict=True)]
    close(out, torch.cat(expected(list(q.split(lens_q)), paged.k, paged.v, masks, scale=0.3, softcap=3.0)[0]))
