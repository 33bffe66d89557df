"""attention_plan(segment=...): the bits of a sequence's rows do not depend on the batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support.attention import Target, check, once_per_backend, random_tree
from torch import Tensor

from pagedtree import DraftTree, tree_attention
from pagedtree.check.cases.attention import plan_of

KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "window": {},
    "fp8": {"cache_dtype": torch.float8_e4m3fn},
    "latent": {"heads": (16, 1), "head_dim": 576, "head_dim_v": 512, "latent": True},
}
WINDOW = 150


def pool_of(target: Target, kind: str = "whole") -> dict[str, Any]:
    """Trees and causal queries, with few and with many rows, of which one prompt begins with its first key."""
    few = kind == "latent" or target.variant == "wgmma"  # slow on simt
    kinds = [DraftTree.chain(4), 3, random_tree(np.random.default_rng(1), 12 if few else 40), 20 if few else 70]
    prefixes = [900, 70, 1100, 0] if target.backend == "cpu" else [130, 70, 260, 0] if few else [300, 70, 420, 0]
    case = target.case(prefixes, kinds, **{"heads": (4, 2), **KINDS[kind]}).build()
    return {**case, "window": WINDOW} if kind == "window" else case


def batch_of(pool: dict[str, Any], order: list[int], seed: int, padding: int = 0) -> dict[str, Any]:
    """The pool's sequences `order`, on other pages, and rows of no sequence."""
    cu = pool["cu_seqlens_q"].tolist()
    rows = torch.cat([torch.arange(cu[b], cu[b + 1]) for b in [*order, *order[:1]]])  # the last ones are padding
    rows = rows[: sum(cu[b + 1] - cu[b] for b in order) + padding].to(pool["q"].device)
    pages, table = pool["k_cache"].shape[0], pool["page_table"][order]
    places = torch.randperm(pages, generator=torch.Generator().manual_seed(seed), device="cpu").to(table.device)
    caches = [pool[name].float()[places.argsort()].to(pool[name].dtype) for name in ("k_cache", "v_cache")]
    if pool["k_cache"].data_ptr() == pool["v_cache"].data_ptr():
        caches[1] = caches[0][..., : caches[1].shape[3]]
    lens = torch.tensor([0, *(cu[b + 1] - cu[b] for b in order)]).cumsum(0)
    return {
        **pool, "k_cache": caches[0], "v_cache": caches[1], "q": pool["q"][rows], "tree_mask": pool["tree_mask"][rows],
        "page_table": torch.where(table < 0, table, places.int()[table.long().clamp(min=0)]),
        "cu_seqlens_q": lens.int().to(table.device),
        **{name: pool[name][order] for name in ("seq_lens", "tree_lens")},
    }  # fmt: skip


def attend(call: dict[str, Any], segment: int, hint: int) -> list[tuple[Tensor, Tensor]]:
    """Output and log-sum-exp of each sequence."""
    plan = plan_of(call, hint, call.get("window", 0), segment)
    out, lse = tree_attention(**call, plan=plan, max_seqlen_q=hint, return_lse=True)
    cu = call["cu_seqlens_q"].tolist()
    assert not out[cu[-1] :].any()
    return [(out[begin:end], lse[begin:end]) for begin, end in pairwise(cu)]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("kind", "segment"), [("whole", 64), ("whole", 192), ("whole", 4096), ("window", 192), ("fp8", 64), ("latent", 64)]
)
def test_bits_do_not_depend_on_the_batch(
    target: Target, monkeypatch: pytest.MonkeyPatch, kind: str, segment: int
) -> None:
    pool = pool_of(target, kind)
    alone = [attend(batch_of(pool, [b], b), segment, 70)[0] for b in range(4)]
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "7:227:8")
    batches = [([3, 2, 1, 0], 1, 2), ([1, 2, 1], 40, 0), ([0, 0, 3, 3, 0], 70, 5)]
    for seed, (order, hint, padding) in enumerate(batches):
        for b, found in zip(order, attend(batch_of(pool, order, seed, padding), segment, hint), strict=True):
            assert torch.equal(found[0], alone[b][0]) and torch.equal(found[1], alone[b][1]), (order, b)


@once_per_backend
@pytest.mark.parametrize("window", [0, WINDOW])
def test_results_are_right_with_any_plan(target: Target, window: int) -> None:
    """For these lengths, for others, and with cuts that are no multiples; garbage leaves no memory."""
    pool = {**pool_of(target), "window": window}
    plan = plan_of(pool, 40, window, 128)
    dense, shifted = torch.zeros_like(plan), plan.clone()
    cuts = dense[:-2].view(3, 1025, -1)
    cuts[:, 0, 0] = 256
    cuts[:, 1:257, 2] = torch.arange(256) // 12
    cuts[:, 1:257, 0] = 2
    shifted[:-2].view(3 * 1025, -1)[1:, 2] += 1
    for other in (plan, dense, shifted, plan_of({**pool, "seq_lens": pool["seq_lens"].flip(0)}, 1, 0, 128)):
        check({**pool, "plan": other, "max_seqlen_q": 40})
    garbage = torch.randint(-(2**31), 2**31, plan.shape, generator=torch.Generator().manual_seed(0), device="cpu").int()
    tree_attention(**pool, plan=garbage.to(plan.device))


def test_a_key_that_others_do_not_see_changes_nothing(target: Target) -> None:
    """The last node's value is infinite: segments of its row tile are computed again, query by query."""
    pool = pool_of(target)
    page, slot = divmod(int(pool["seq_lens"][2]) - 1, pool["v_cache"].shape[1])
    found = []
    for value in (0.0, float("inf")):
        pool["v_cache"][pool["page_table"][2, page].long(), slot] = value
        found.append(attend(pool, 128, 40))
    assert not found[1][2][0][-1].isfinite().any()
    for (zeros, _), (infinite, _) in zip(*found, strict=True):
        assert torch.equal(zeros[:-1], infinite[:-1])
