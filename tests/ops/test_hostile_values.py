"""Hostile values raise a named error or have no effect, never writing out of bounds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from raw_case import raw_calls
from shard_case import make_case
from step_case import int32
from torch import Tensor

import pagedtree as pt
from pagedtree import distributed
from pagedtree.integrations import flash_attn, flashinfer, sglang

FAR = 2**31 - 1
WORDS = ("rows", "left", "ends", "received", "words", "masses")  # that ranks exchange


@pytest.fixture
def shards() -> Iterator[distributed.VocabShards]:
    """Yields one rank with the vocabulary of 40."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield distributed.VocabShards(40, group=dist.group.WORLD)
    dist.destroy_process_group()


KEYS, ROWS, SLOTS = torch.zeros(2, 8, 1, 64), torch.zeros(2, 1, 64), torch.zeros(2, dtype=torch.int64)
TABLE, LENS, OFFSETS = int32([[0], [1]], "cpu"), int32([3, 3], "cpu"), int32([0, 1, 2], "cpu")
TREES = pt.TreeBatch.from_trees([pt.DraftTree.chain(1)])


# ---- adapter indices


def test_appended_rows_of_no_sequence(backend: str, device: torch.device) -> None:
    cache = torch.zeros(4, 2, 2, 1, 64, device=device)
    rows = torch.ones(7, 1, 64, device=device)
    sequences = torch.tensor([-1, -2, 2, 2**40, 1, 0, 0], device=device)
    positions = torch.tensor([0, 0, 0, 0, 1, 2**40, -1], device=device)
    pages = int32([0, 1, 2], device)
    flashinfer.append_paged_kv_cache(
        rows, rows, sequences, positions, cache, pages, int32([0, 1, 3], device), int32([1, 1], device)
    )
    mask = cache[:, 0].flatten(1).any(1)
    assert mask.tolist() == [False, True, False, False] and cache[1, :, 1].all() and not cache[1, :, 0].any()
    for offsets in (int32([-5, -1, 99], device), int32([99, 3, 1], device)):
        flashinfer.append_paged_kv_cache(rows, rows, sequences, positions, cache.clone(), pages, offsets, offsets[1:])
    with pytest.raises(ValueError, match="batch_indices: expected shape"):
        flashinfer.append_paged_kv_cache(rows, rows, sequences[:2], positions, cache, pages, pages, pages[1:])


def test_page_tables_stay_small() -> None:
    table, _ = flashinfer.page_table(int32([0, 2**30], "cpu"), int32([7, 3], "cpu"), int32([1], "cpu"), 16)
    assert table.tolist() == [[7, 3]]
    table, _ = flashinfer.page_table(int32([-3, 2], "cpu"), torch.tensor([2**32, 3]), int32([1], "cpu"), 16)
    assert table.tolist() == [[-1, -1]] and table.dtype == torch.int32
    with pytest.raises(ValueError, match=r"slot_mapping: `cu_seqlens_q` must end with 0\.\.16, .*got 268435456"):
        pt.slot_mapping(TABLE, LENS, int32([0, 1, 2**28], "cpu"), 8)


def test_flashinfer_masks() -> None:
    bits, one = torch.zeros(8, dtype=torch.uint8), int32([4], "cpu")
    for match, call in {
        "mask_indptr: expected 1 offsets of at least 0": lambda: flashinfer.import_packed_custom_mask(
            bits, int32([-4, 0], "cpu"), int32([0, 2], "cpu"), one
        ),
        "qo_indptr: expected offsets": lambda: flashinfer.import_custom_mask(bits.bool(), int32([2, 0], "cpu"), one),
        "seq_lens: expected shape": lambda: flashinfer.import_custom_mask(bits.bool(), int32([0, 2], "cpu"), TABLE),
        "seq_lens: expected at least 0": lambda: flashinfer.import_custom_mask(bits.bool(), int32([0, 2], "cpu"), -one),
        "tree_mask: expected a row": lambda: flashinfer.export_custom_mask(TABLE, int32([0, 3], "cpu"), one),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_locations_beyond_int32(backend: str, device: torch.device) -> None:
    """Locations do not wrap to other slots."""
    buffer = torch.arange(8.0, device=device)[:, None].clone()
    far = torch.tensor([2**32 + 1, 3], device=device)
    sglang.move_kv_cache([buffer], [], far, torch.tensor([5, 2**32 + 5], device=device))
    assert buffer[:, 0].tolist() == list(range(8))
    q = torch.ones(1, 1, 1, 64, device=device, dtype=torch.float16)
    cache = torch.ones(2, 8, 1, 64, device=device, dtype=torch.float16)
    out = flash_attn.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=2**40, cache_batch_idx=torch.tensor([2**32], device=device)
    )
    assert not out.any()  # no page is read
    _, lse = flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=2**40, return_softmax_lse=True)
    assert lse.isfinite().all()


@pytest.mark.parametrize("mode", [sglang.TreeMaskMode.FULL_MASK, sglang.TreeMaskMode.QLEN_ONLY])
@pytest.mark.parametrize("lens", [[-7, 5], [2**40, 5], [0, FAR]])
def test_sglang_trees_outside_of_their_mask(mode: sglang.TreeMaskMode, lens: list[int]) -> None:
    n, bs, guard = 3, 2, 16
    buffer = torch.full((guard + bs * n * (n + 8) + guard,), 7, dtype=torch.uint8)
    mask, (positions, *links) = buffer[guard:-guard], [torch.zeros(bs * n, dtype=torch.int64) for _ in range(4)]
    links = [link.view(bs, n) for link in links]
    hostile = torch.tensor([[-(2**40), 2**40], [1, -1]])
    seq_lens = torch.tensor(lens)
    sglang.build_tree_kernel_efficient(
        hostile.repeat(1, 2)[:, :3], hostile, seq_lens, mask, positions, *links, topk=2, depth=2, draft_token_num=n,
        tree_mask_mode=mode,
    )  # fmt: skip
    assert (buffer[:guard] == 7).all() and (buffer[-guard:] == 7).all()
    words = sglang.tree_mask_words(mask, seq_lens, n, mode)
    assert words.shape == (bs * n, 1)
    with pytest.raises(ValueError, match="topk: expected at least 1, got 0"):
        sglang.build_tree_kernel_efficient(
            hostile, hostile, seq_lens, mask, positions, *links, topk=0, depth=1, draft_token_num=n, tree_mask_mode=mode
        )


# ---- sharded vocabularies


def hostile_words(shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns random words, with extremes."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
    extremes = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63), 0x0101010101010101, 0x7FF0000000000000, 0x7FFFFFFF7FFFFFFF])
    choice = torch.randint(0, 16, shape, generator=generator)
    return torch.where(choice < 8, extremes[choice.clamp(max=7)], words)


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("draft_law", ["iid", "swor", "onehot"])
def test_shard_ops_take_any_words(backend: str, device: torch.device, draft_law: str, seed: int) -> None:
    """Rows from no earlier round cause no wild access."""
    undrawn = {"draft_probs": None, "draft_rows": None} if draft_law == "onehot" else {}
    count = iter(range(1000))
    for call in raw_calls(device):
        if not call.name.endswith("_shards"):
            continue
        changes = {"draft_law": draft_law, **undrawn}
        call.arguments |= {name: value for name, value in changes.items() if name in call.arguments}
        guarded = []
        for name in WORDS:
            if (words := call.arguments.get(name)) is not None:
                buffer = torch.full((words.shape[0] + 2, words.shape[1]), 0x77, dtype=torch.int64, device=device)
                buffer[1:-1] = hostile_words(words.shape, 97 * seed + next(count)).to(device)
                call.arguments[name] = buffer[1:-1]
                guarded.append(buffer)
        for index in (0, 1, 1023) if "index" in call.arguments else (None,):
            call(**({} if index is None else {"index": index}))
        assert guarded and all((buffer[[0, -1]] == 0x77).all() for buffer in guarded)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_roots_of_any_depth(backend: str, shards: distributed.VocabShards, temperature: float) -> None:
    """A walk begins at the root whatever its depth; nodes left out elsewhere are never emitted."""
    if backend == "cuda":
        pytest.skip("the group's tensors are on the CPU")
    case = make_case(40, torch.float32, 3)
    params = pt.SamplingParams(temperature=temperature)
    for depth in (-1, -FAR, 5):
        depths = case.trees.depths.clone()
        depths[case.trees.cu_nodes[:-1].long()] = depth
        trees = pt.TreeBatch(**{**vars(case.trees), "depths": depths})
        got = distributed.verify_sampled(case.logits, case.drafts, trees, params, **case.streams, shards=shards)
        expected = pt.verify_sampled(case.logits, case.drafts, case.trees, params, **case.streams)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
    trees = pt.TreeBatch(**{**vars(case.trees), "depths": torch.full_like(case.trees.depths, -1)})
    got = distributed.verify_sampled(case.logits, case.drafts, trees, params, **case.streams, shards=shards)
    assert (got.tokens < 40).all()


@pytest.mark.parametrize("max_children", [-1, 1024, 2**40])
def test_children_out_of_range(shards: distributed.VocabShards, max_children: int) -> None:
    case = make_case(40, torch.float32, 3)
    with pytest.raises(ValueError, match=rf"`max_children` must be in 0\.\.1023, got {max_children}"):
        distributed.verify_rejection(
            case.logits, case.drafts, case.trees, pt.SamplingParams(), draft_law="onehot", **case.streams,
            shards=shards, max_children=max_children,
        )  # fmt: skip


# ---- messages


MESSAGES: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, r"^tree_attention: `window` must be of type int, got tuple: \(4, 0\)$",
     lambda: pt.tree_attention(ROWS, KEYS, KEYS, TABLE, LENS, OFFSETS, window=(4, 0))),
    (TypeError, r"^tree_attention: `tree_lens` must be of type Optional\[Tensor\], got list: \[7, 4\]$",
     lambda: pt.tree_attention(ROWS, KEYS, KEYS, TABLE, LENS, OFFSETS, tree_lens=[7, 4])),
    (TypeError, r"got list: \[0, 1, 2, .{67}\.\.\.$",  # cut to 80 letters
     lambda: pt.tree_attention(ROWS, KEYS, KEYS, TABLE, LENS, OFFSETS, tree_lens=list(range(100)))),
    (TypeError, r"^merge_states: `out_a` must be a Tensor, got None$", lambda: pt.merge_states(None, None, None, None)),
    (ValueError, "verify_greedy: `logits` must be of 2 rows, one for each node of the trees, got 1 rows",
     lambda: pt.verify_greedy(torch.zeros(1, 8), SLOTS, TREES)),
    (TypeError, "acceptance: expected probabilities .*, got 'abc'", lambda: pt.choose_tree("abc", lambda size: 1.0)),
    (TypeError, "step_cost: expected a function", lambda: pt.choose_tree([0.5], 1.0)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "call"), MESSAGES)
def test_messages(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.compile(message)):
        call()
