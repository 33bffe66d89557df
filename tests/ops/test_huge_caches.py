"""Caches beyond 2^31 elements and 2^32 bytes, in sparse memory, equal small ones bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numpy.random import default_rng
from support import int32
from support.attention import Target, random_tree
from support.batches import FP8, bytes_of, payload
from support.memory import sparse
from torch import Tensor

from pagedtree import DraftTree, append_kv, compact_kv, tree_attention

FIRST_PAGE = 1 << 27  # slots exceed 2^31
STRIDES = {  # of page, slot, head; one carries offsets past 2^32 elements
    "page ids": lambda s, h, d: (s * h * d, h * d, d),
    "page stride": lambda s, h, d: ((1 << 30) + 64, h * d, d),
    "slot stride": lambda s, h, d: (h * d, (1 << 30) + 64, d),
    "head stride": lambda s, h, d: (s * d, d, (1 << 32) + 64),
}


@pytest.fixture(params=STRIDES)
def far(request: pytest.FixtureRequest) -> str:
    return request.param


def page_ids(far: str, pages: int) -> Tensor:
    """Returns the huge cache's ids of a small cache's pages."""
    return torch.arange(pages) + (FIRST_PAGE if far == "page ids" else 0)


def huge_copy(far: str, small: Tensor) -> Tensor:
    pages, *row = small.shape
    ids = page_ids(far, pages)
    page_size, heads, dim = (*row, 1, 1)[:3]
    strides = STRIDES[far](page_size, heads, dim)
    huge = sparse((int(ids[-1]) + 1, *row), (*strides, 1)[: len(row) + 1], small.dtype)
    huge[ids] = small
    return huge


def same_pages(far: str, huge: Tensor, small: Tensor) -> bool:
    return torch.equal(bytes_of(huge[page_ids(far, small.shape[0])]), bytes_of(small))


@pytest.mark.each_value
@pytest.mark.parametrize("stored", [None, FP8], ids=str)
def test_tree_attention(target: Target, far: str, stored: torch.dtype | None) -> None:
    if target.device.type != "cpu":
        pytest.skip("sparse memory is the host's")
    kinds = [DraftTree.full([2, 2]), "causal", random_tree(default_rng(0), 30)]
    case = target.case([20, 35, 3], kinds, cache_dtype=stored, page_size=8).build()
    expected = tree_attention(**case, return_lse=True)
    caches = {name: huge_copy(far, case[name]) for name in ("k_cache", "v_cache")}
    table = case["page_table"] + int(page_ids(far, 1)[0])
    result = tree_attention(**{**case, **caches, "page_table": table}, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_tree_attention_of_distant_rows(target: Target) -> None:
    """q, out, masks and page table exceed 2^32 elements."""
    if target.device.type != "cpu":
        pytest.skip("sparse memory is the host's")
    case = target.case([20, 35, 3], [DraftTree.full([2, 2]), "causal", random_tree(default_rng(0), 30)]).build()
    expected = tree_attention(**case)
    rows = {"q": (1 << 28) + 64, "out": (1 << 28) + 64, "tree_mask": (1 << 28) + 1, "page_table": (1 << 32) + 1}
    for name, stride in rows.items():
        like = case.get(name, expected)
        distant = sparse(like.shape, (stride, *like.stride()[1:]), like.dtype)
        if name != "out":
            distant.copy_(like)
        assert torch.equal(tree_attention(**{**case, name: distant}), expected), name
    heads = sparse(expected.shape, (64, (1 << 31) + 64, 1), expected.dtype).copy_(case["q"])
    assert torch.equal(tree_attention(**{**case, "q": heads, "out": torch.empty_like(expected)}), expected)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float16, FP8)], ids=str)
@pytest.mark.parametrize("dim", [64, 5])
def test_append_kv(backend: str, device: torch.device, far: str, dim: int, dtypes: tuple[Any, Any]) -> None:
    if device.type != "cpu":
        pytest.skip("sparse memory is the host's")
    dtype, stored = dtypes
    pages, page_size, heads, tokens = 9, 9, 2, 20
    generator = torch.Generator().manual_seed(dim)
    k, v = torch.randn((2, tokens, heads, dim), generator=generator).to(dtype)
    small = [payload((pages, page_size, heads, dim), stored, side, device) for side in range(2)]
    huge = [huge_copy(far, cache) for cache in small]
    slots = torch.randperm(pages * page_size, generator=generator)[:tokens]
    slots[3] = -1
    slots[4] = pages * page_size - 1
    append_kv(k, v, *small, slots)
    far_slots = torch.where(slots < 0, -1, slots + int(page_ids(far, 1)[0]) * page_size)
    append_kv(k, v, *huge, far_slots)
    assert all(same_pages(far, h, s) for h, s in zip(huge, small, strict=True))
    distant = sparse(k.shape, ((1 << 28) + 64, dim, 1), dtype).copy_(k)
    again = [cache.clone() for cache in small]
    append_kv(distant, v, *again, slots)
    assert all(torch.equal(bytes_of(a), bytes_of(s)) for a, s in zip(again, small, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_compact_kv(backend: str, device: torch.device, far: str, dtype: torch.dtype) -> None:
    if device.type != "cpu":
        pytest.skip("sparse memory is the host's")
    page_size = 9
    small = [payload((6, page_size, 2, 64), dtype, i, device) for i in range(2)]
    huge = [huge_copy(far, cache) for cache in small]
    before = [cache.clone() for cache in small]
    table = int32([[5, 1], [4, 3]])
    moves = {
        "start": int32([page_size - 2, 0]),  # across pages; within one
        "accept_index": int32([[0, 2, 5], [0, 3, 7]]),
        "num_accepted": int32([2, 2]),
    }
    lengths = compact_kv(small, table, **moves)
    assert torch.equal(compact_kv(huge, table + int(page_ids(far, 1)[0]), **moves), lengths)
    assert not any(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(small, before, strict=True))
    assert all(same_pages(far, h, s) for h, s in zip(huge, small, strict=True))
