"""FlashInfer's merging, latent caches, lengths, and sampling of chains."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import int32, seeded
from support.attention import Pages, causal_mask, close, dense_attention
from support.devices import placed
from support.exact import LIMIT, excess
from torch import Tensor

from pagedtree.check.cases.inputs import offsets
from pagedtree.integrations import flashinfer
from pagedtree.integrations.flashinfer import chain_speculative_sampling

QUERIES, HEADS, PAGE = [5, 3], 4, 4


def paged_form(pages: Pages, lens: list[int], page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns indptr, indices and last_page_len."""
    last = [(s - 1) % page_size + 1 if s else 0 for s in lens]
    return offsets([len(p) for p in pages.pages]), int32([page for p in pages.pages for page in p]), int32(last)


def test_merging(backend, dtype) -> None:
    """Merged parts of the keys equal attention over all."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (placed(torch.randn(s, 2, 64, generator=generator, device="cpu").to(dtype)) for s in (5, 30, 30))
    everything, lse = dense_attention(q, k, v, torch.ones(5, 30, dtype=torch.bool))
    masks = [torch.ones(5, n, dtype=torch.bool) for n in (11, 12, 7)]
    parts = [dense_attention(q, *rows) for rows in zip(k.split([11, 12, 7]), v.split([11, 12, 7]), masks, strict=True)]
    values, scores = (torch.stack(side, 1) for side in zip(*parts, strict=True))
    values, scores = values.to(dtype), scores.float() / math.log(2)
    out, base2 = flashinfer.merge_states(values, scores)
    close(out, everything)
    torch.testing.assert_close(base2, lse / math.log(2), atol=2e-3, rtol=2e-3)
    first = flashinfer.merge_state(values[:, 0], scores[:, 0], values[:, 1], scores[:, 1])
    close(flashinfer.merge_state(*first, values[:, 2], scores[:, 2])[0], everything)
    one, logs = values[:, 0].clone(), scores[:, 0].contiguous().clone()
    mask = torch.tensor([True, False, True, False, True])
    flashinfer.merge_state_in_place(one, logs, values[:, 1], scores[:, 1], mask)
    assert torch.equal(one, torch.where(mask[:, None, None], first[0], values[:, 0]))
    assert torch.equal(logs, torch.where(mask[:, None], first[1], scores[:, 0]))
    alone = flashinfer.merge_states(values[:, :1], scores[:, :1])
    assert torch.equal(alone[0], values[:, 0])
    with pytest.raises(ValueError, match=r"s: expected shape \[5, 3, 2\]"):
        flashinfer.merge_states(values, scores[:, :2])


def test_lengths_and_places_of_new_rows(on_device, backend) -> None:
    assert flashinfer.get_seq_lens(int32([0, 2, 2, 5]), int32([7, 0, 16]), 16).tolist() == [23, 0, 48]
    new = int32([0, 1, 3, 6, 10]), int32([5, 5, 5, 5])  # FlashInfer's documented example
    sequence, positions = flashinfer.get_batch_indices_positions(*new, 12)
    assert sequence.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, -1, -1] and sequence.dtype == torch.int32
    assert positions.tolist() == [4, 3, 4, 2, 3, 4, 1, 2, 3, 4, 0, 0]
    buffers = torch.empty(12, dtype=torch.int32), torch.empty(12, dtype=torch.int32)
    found = flashinfer.get_batch_indices_positions(*new, 12, *buffers)
    assert found[0] is buffers[0] and found[1] is buffers[1] and torch.equal(buffers[1], positions)
    with pytest.raises(ValueError, match=r"positions: expected shape \[12\]"):
        flashinfer.get_batch_indices_positions(*new, 12, buffers[0], buffers[1][:9])


@pytest.mark.parametrize("is_causal", [False, True])
def test_latent_caches(on_device, backend, is_causal) -> None:
    dtype = torch.float32 if backend == "cpu" else torch.bfloat16
    lens = [19, 6]
    pages = Pages.random(lens, PAGE, 1, 576, dtype)
    q = placed(torch.randn(8, HEADS, 576, generator=torch.Generator().manual_seed(2), device="cpu").to(dtype))
    indptr, indices, last = paged_form(pages, lens, PAGE)
    plan = offsets(QUERIES), indptr, indices, int32(lens), HEADS, 512, 64, PAGE, is_causal, 0.1
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(8), backend="fa2")
    with pytest.raises(RuntimeError, match=r"plan\(\)"):
        wrapper.run(q[..., :512], q[..., 512:], *[pages.k_cache[:, :, 0]] * 2)
    wrapper.plan(*plan, dtype, dtype)
    # Two views of one tensor are read in place, and written by the append.
    pool = torch.full_like(pages.k_cache[:, :, 0], torch.nan)
    ckv, kpe = pool[..., :512], pool[..., 512:]
    rows = torch.cat(pages.k)[:, 0]
    places = flashinfer.get_batch_indices_positions(offsets(lens), int32(lens), sum(lens))
    flashinfer.append_paged_mla_kv_cache(rows[:, :512], rows[:, 512:], *places, ckv, kpe, indices, indptr, last)
    out, lse = wrapper.run(q[..., :512], q[..., 512:], ckv, kpe, return_lse=True, return_lse_base_on_e=True)
    seen = causal_mask if is_causal else lambda n, s: torch.ones(n, s, dtype=torch.bool)
    sees = list(map(seen, QUERIES, lens))
    expected = [
        dense_attention(rows, k, k[..., :512], seen, scale=0.1)
        for rows, k, seen in zip(q.split(QUERIES), pages.k, sees, strict=True)
    ]
    close(out, torch.cat([x[0] for x in expected]))
    torch.testing.assert_close(lse, torch.cat([x[1] for x in expected]), atol=2e-2, rtol=2e-2)
    assert torch.equal(out, wrapper.run(query=q, kv_cache=pool))
    apart = [x.clone() for x in (q[..., :512], q[..., 512:], ckv, kpe)]
    again, base2 = wrapper.run(*apart, return_lse=True)
    assert torch.equal(out, again)
    torch.testing.assert_close(base2, lse / math.log(2))


def test_latent_wrapper_refusals() -> None:
    plan = int32([0, 1]), int32([0, 1]), int32([0]), int32([3]), HEADS
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(8))
    with pytest.raises(NotImplementedError, match="use_cuda_graph: expected none"):
        flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(8), use_cuda_graph=True)
    with pytest.raises(ValueError, match="head_dim_ckv, head_dim_kpe: expected 512 and 64, got 256 and 64"):
        wrapper.plan(*plan, 256, 64, PAGE, True, 0.1)
    with pytest.raises(ValueError, match=r"kv_len_arr: expected shape \[1\]"):
        wrapper.plan(*plan[:3], int32([3, 4]), HEADS, 512, 64, PAGE, True, 0.1)
    wrapper.plan(*plan, 512, 64, PAGE, True, 0.1, torch.float16)
    q, cache = torch.zeros(1, HEADS, 576), torch.zeros(2, PAGE, 576)
    parts = q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:]
    with pytest.raises(ValueError, match="q_data_type: plan"):
        wrapper.run(*parts)
    with pytest.raises(NotImplementedError, match="kv_len: expected none"):
        wrapper.run(*parts, kv_len=int32([3]))
    with pytest.raises(NotImplementedError, match="metadata: expected none"):
        wrapper.plan(*plan, 512, 64, PAGE, True, 0.1, metadata=object(), lse_mode="none")
    wrapper.plan(*plan, 512, 64, PAGE, True, 0.1, query_layout="packed")
    with pytest.raises(ValueError, match="query: expected it alone"):
        wrapper.run(*parts, query=q)
    with pytest.raises(ValueError, match="kv_cache: expected a tensor or its two parts"):
        wrapper.run(*parts[:2])
    with pytest.raises(ValueError, match="ckv_cache: expected pages of 4"):
        wrapper.run(*parts[:2], torch.zeros(2, 8, 512), torch.zeros(2, 8, 64))
    with pytest.raises(ValueError, match="q_nope: expected"):
        wrapper.run(parts[0][:, :1], *parts[1:])


# ---- sampling of chains


def random_distributions(rng: np.random.Generator, *shape: int) -> Tensor:
    return placed(torch.from_numpy(rng.dirichlet(np.full(shape[-1], 0.7), shape[:-1])).float())


def random_chains(vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns draft and target distributions and drafts of 50 chains of 4."""
    rng = np.random.default_rng(0)
    target = random_distributions(rng, 50, 5, vocab)
    return random_distributions(rng, 50, 4, vocab), target, torch.randint(vocab, (50, 4))


@pytest.mark.parametrize("seed", range(5))
def test_documented_example(device, seed) -> None:
    draft = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]]], device=device)
    target = torch.tensor([[[0, 0.1, 0.6, 0.3], [1.0, 0, 0, 0], [0.7, 0.1, 0.1, 0.1]]], device=device)
    ids = torch.tensor([[2, 1]], dtype=torch.int32, device=device)
    tokens, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=seed, offset=0)
    assert tokens.dtype == torch.int32
    assert (tokens.tolist(), accepted.tolist(), emitted.tolist()) == ([[2, 0, -1]], [1], [1])


def test_counts_are_added(on_device) -> None:
    draft, target, ids = random_chains(5)
    accepted, emitted = torch.full((50,), 100, dtype=torch.int64), torch.full((50,), 200, dtype=torch.int32)
    again = chain_speculative_sampling(draft, ids, target, generator=seeded(3))
    result = chain_speculative_sampling(draft, ids, target, accepted, emitted, generator=seeded(3))
    assert result[1] is accepted and result[2] is emitted
    assert torch.equal(result[0], again[0])
    assert torch.equal(accepted - 100, again[1]) and torch.equal(emitted - 200, again[2])
    assert (again[1] >= again[2]).all() and (again[1] > again[2]).any()
    lengths = (again[0] >= 0).sum(1) - 1
    assert torch.equal(lengths, again[2])
    for row, drafts, n in zip(again[0].tolist(), ids.tolist(), again[2].tolist(), strict=True):
        assert row[:n] == drafts[:n]


def test_seeds() -> None:
    draft, target, ids = random_chains(9)
    runs = [
        chain_speculative_sampling(draft, ids, target, seed=s, offset=o)[0] for s, o in ((1, 0), (1, 0), (1, 5), (2, 0))
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2]) and not torch.equal(runs[0], runs[3])


@pytest.mark.parametrize("vocab", [5, 41])
def test_distribution_of_the_first_two_tokens(on_device, draws, vocab) -> None:
    """First tokens follow the target's distribution, accepted or not."""
    rng = np.random.default_rng(vocab)
    count = draws(60_000)
    draft, target = random_distributions(rng, 2, vocab), random_distributions(rng, 3, vocab)
    generator = seeded(1)
    ids = torch.stack([torch.multinomial(distribution, count, True, generator=generator) for distribution in draft], 1)
    tokens, _, emitted = chain_speculative_sampling(
        draft.expand(count, 2, vocab), ids, target.expand(count, 3, vocab), generator=generator
    )
    tokens = tokens.long()
    for column, rows in ((0, torch.ones(count, dtype=torch.bool)), (1, emitted > 0)):
        p = (target[column].double() / target[column].sum()).cpu().numpy()
        assert excess(tokens[rows, column].bincount(minlength=vocab).cpu().numpy(), p) < LIMIT, column


def test_an_id_outside_ends_the_chain(on_device) -> None:
    rng = np.random.default_rng(0)
    draft = random_distributions(rng, 2, 3, 5)
    ids = torch.tensor([[1, -1, 2], [1, 2, 5]])
    target = torch.nn.functional.one_hot(torch.tensor([[1, 4, 2, 3], [1, 2, 0, 3]]), 5).float()
    tokens, accepted, emitted = chain_speculative_sampling(draft + 1e-6, ids, target)
    assert tokens.tolist() == [[1, 4, -1, -1], [1, 2, 0, -1]]
    assert (accepted.tolist(), emitted.tolist()) == ([2, 2], [1, 2])
