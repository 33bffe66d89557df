"""Hostile values raise a named error or have equal effects on every backend, never writing out of bounds."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from calls.raw import op_names, raw_calls
from support import int32
from support.batches import batch_of, streams, tied_case
from support.memory import sparse
from torch import Tensor

import pagedtree as pt
from pagedtree import SamplingParams, distributed
from pagedtree._arguments import expect_type
from pagedtree.integrations import flash_attn, flashinfer, sglang
from pagedtree.testing import backends, use_backend

FAR = 2**31 - 1

# ---- every op. docs/concepts.md says which values are left open

# Backend-specific plans; words that must come from the round before.
OPEN = ("attention_plan", "step_shards", "weigh_shards")
# Sums in a backend's order; their operands stay unchanged.
ROUNDED = ("tree_attention", "tree_attention.out", "tree_attention.without_lse", "tree_delta_rule", "tree_conv1d",
           "advance_state", "merge_states")  # fmt: skip
SUMMED = ("q", "k", "v", "k_cache", "v_cache", "x", "weight", "bias", "out_a", "out_b")
# Left open by docstrings: rows that share a slot, non-finite scales.
LEFT_OPEN = {"append_kv": ("slots",), "rope_append": ("slots",), "rope_append.out": ("slots",),
             "compact_kv": ("page_table",), "tree_attention": ("k_scale", "v_scale"),
             "advance_state": ("state_index",), "advance_conv": ("state_index",)}  # fmt: skip
INTEGERS = (0, 1, -1, 2, -2, 3, 5, 7, 8, 9, 12, 63, 2**15, FAR, -FAR - 1, 2**30)
LARGE = (2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))


def with_bad_values(rng: random.Random, t: Tensor) -> Tensor:
    t = t.clone()
    values = t.view(-1) if t.is_contiguous() else t.reshape(-1)
    pool: tuple[Any, ...] = INTEGERS + (LARGE if t.dtype == torch.int64 else ())
    if t.dtype.is_floating_point:
        pool = (0.0, 1.0, -448.0, float("nan")) if t.dtype == torch.float8_e4m3fn else FLOATS
    for _ in range(rng.randrange(1, 4) if values.numel() else 0):
        value = torch.tensor(rng.choice(pool), dtype=torch.float32 if t.dtype.is_floating_point else torch.int64)
        values[rng.randrange(values.numel())] = value.to(t.dtype)
    return values.view(t.shape)


def same(name: str, a: Tensor, b: Tensor) -> bool:
    if name in ROUNDED and a.dtype.is_floating_point:
        return torch.allclose(a.double().cpu(), b.double().cpu(), rtol=2e-2, atol=2e-2, equal_nan=True)
    return a.cpu().view(torch.uint8).equal(b.cpu().view(torch.uint8)) or a.allclose(b, 0, 0, equal_nan=True)


@pytest.mark.skipif("simt" not in backends(), reason="built without simt")
@pytest.mark.parametrize("name", [name for name in op_names() if name not in OPEN])
def test_bad_values_give_the_same_on_every_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDTREE_SIMT_ORDER", "reverse")
    rng, calls = random.Random(0), [call for call in raw_calls() if call.name == name]
    for _ in range(60):
        call = rng.choice(calls).on_memory(Tensor.clone)
        left_out = LEFT_OPEN.get(name, ()) + (SUMMED if name in ROUNDED else ())
        names = [key for key in call.tensors() if key not in left_out]
        keys = rng.sample(names, min(len(names), rng.randrange(1, 3)))
        for key in keys:
            bad = with_bad_values(rng, call.arguments[key])
            # Decays above 0 or NaN are unspecified.
            call.arguments[key] = bad.nan_to_num(nan=-1.0, neginf=-torch.inf).clamp(max=0) if key == "g" else bad
        results = []
        for backend in ("cpu", "simt"):
            with use_backend(backend):
                results.append(call.named_results())
        for key, expected in results[0].items():
            got = results[1][key]
            assert same(name, expected, got), ({k: call.arguments[k] for k in keys}, key, expected, got)


# ---- offsets: no row belongs to two sequences

OFFSETS = ("cu_nodes", "cu_seqlens_q", "cu_seqlens")
# Without ranks' ops, whose words come from the round before, and backend-specific plans.
OFFSET_CALLS = [
    (i, name)
    for i, call in enumerate(raw_calls())
    for name in OFFSETS
    if name in call.tensors() and not call.name.endswith("_shards") and call.name != "attention_plan"
]


def sequence_of(row: int, offsets: list[int]) -> int:
    """Returns a row's sequence by binary search, bit by bit; -1 for none."""
    found, batch = 0, len(offsets) - 1
    for bit in (8, 4, 2, 1):
        if found + bit <= batch and offsets[found + bit] <= row:
            found += bit
    return found if offsets[found] <= row else -1


def ascending(offsets: list[int]) -> list[int]:
    """Returns the offsets that ops read instead."""
    bounds = sorted({0, *(max(offset, 0) for offset in offsets)})
    return [next(row for row in bounds if sequence_of(row, offsets) >= b) for b in range(len(offsets))]


def random_offsets(rng: random.Random, offsets: list[int]) -> list[int]:
    found = list(offsets)
    for _ in range(rng.randrange(1, 4)):
        found[rng.randrange(len(found))] = rng.choice([*range(-2, offsets[-1] + 3), FAR, -FAR - 1])
    return rng.sample(found, len(found)) if rng.random() < 0.2 else found


@pytest.mark.parametrize(("index", "name"), OFFSET_CALLS)
def test_descending_offsets_are_read_as_ascending(
    backend: str, device: torch.device, index: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDTREE_SIMT_ORDER", "reverse")  # changes a row that two CTAs write
    call, rng, descending = raw_calls(device)[index], random.Random(0), 0
    good = call.arguments[name].tolist()
    assert ascending(good) == good
    for _ in range(10 if "attention" in call.name else 20):
        offsets = random_offsets(rng, good)
        descending += sorted(offsets) != offsets
        results = []
        for values in (offsets, ascending(offsets)):
            call.arguments[name] = int32(values, device)
            results.append({key: t for key, t in call.named_results().items() if not key.startswith(name)})
        original = int32(offsets, device)
        for key, found in results[0].items():
            expected = results[1][key]
            # Some ops return the offsets, or clamp them to the rows.
            is_own = found.shape == original.shape and found.equal(original.clamp(*found.aminmax()))
            assert is_own or torch.allclose(found, expected, 0, 0, equal_nan=True), (call.name, offsets, key)
    assert descending > 3


# ---- adapters' indices

KEYS, ROWS, SLOTS = torch.zeros(2, 8, 1, 64), torch.zeros(2, 1, 64), torch.zeros(2, dtype=torch.int64)
TABLE, LENS, OFFSETS = int32([[0], [1]], "cpu"), int32([3, 3], "cpu"), int32([0, 1, 2], "cpu")
TREES = pt.TreeBatch.from_trees([pt.DraftTree.chain(1)])


def test_append_skips_rows_of_no_sequence(backend: str, device: torch.device) -> None:
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
    with pytest.raises(ValueError, match=r"slot_mapping: cu_seqlens_q: expected an end in 0\.\.16, .*got 268435456"):
        pt.slot_mapping(TABLE, LENS, int32([0, 1, 2**28], "cpu"), 8)


def test_negative_offsets_of_masks() -> None:
    bits, one = torch.zeros(8, dtype=torch.uint8), int32([4], "cpu")
    with pytest.raises(ValueError, match="mask_indptr: expected 1 offsets of at least 0"):
        flashinfer.import_packed_custom_mask(bits, int32([-4, 0], "cpu"), int32([0, 2], "cpu"), one)


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

WORDS = ("rows", "left", "ends", "received", "words", "masses")  # that ranks exchange


@pytest.fixture
def shards() -> Iterator[distributed.VocabShards]:
    """Yields one rank with the vocabulary of 40."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield distributed.VocabShards(40, group=dist.group.WORLD)
    dist.destroy_process_group()


def hostile_words(shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns random words, with extremes."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
    extremes = torch.tensor([0, -1, 1, 2**63 - 1, -(2**63), 0x0101010101010101, 0x7FF0000000000000, 0x7FFFFFFF7FFFFFFF])
    choice = torch.randint(0, 16, shape, generator=generator)
    return torch.where(choice < 8, extremes[choice.clamp(max=7)], words)


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(6))
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
    case = tied_case(40, torch.float32, 3)
    params = SamplingParams(temperature=temperature)
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


# ---- logits, draft_probs and grammar masks beyond 2^31 elements

COUNT, VOCAB = 6, 77
STRIDE = (1 << 32) // (COUNT - 1) + 101  # the last rows start beyond 2^31 elements, and 2^32
PARAMS = SamplingParams(temperature=0.9, top_k=40)


def far_apart(small: Tensor) -> Tensor:
    huge = sparse(tuple(small.shape), (STRIDE, 1), small.dtype)
    huge[:] = small
    return huge


def many_rows(small: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a tensor beyond 2^32 elements that ends with the rows, and their indices."""
    count = (1 << 32) // small.shape[1] + 100
    huge = sparse((count, small.shape[1]), (small.shape[1], 1), small.dtype)
    huge[-small.shape[0] :] = small
    return huge, torch.arange(count - small.shape[0], count)


def verdicts(parents: list[int], logits: Tensor, mask: Tensor, drafts: Tensor, probs: Tensor, rows: Tensor | None):
    """Returns each op's verdict on one tree."""
    trees, words = batch_of([parents], torch.device("cpu")), streams(1, torch.device("cpu"), 5)
    found: list[pt.Verdict] = [
        pt.verify_greedy(logits, drafts, trees, grammar_mask=mask),
        pt.verify_sampled(logits, drafts, trees, PARAMS, grammar_mask=mask, **words),
        pt.verify_typical(logits, drafts, trees, PARAMS, grammar_mask=mask),
        pt.verify_rejection(logits, drafts, trees, PARAMS, draft_law="onehot", grammar_mask=mask, **words),
    ]
    for op in (pt.verify_rejection, pt.verify_block, pt.verify_traversal):
        fields = {"draft_law": "iid", "draft_probs": probs, "draft_rows": rows, "grammar_mask": mask, **words}
        found.append(op(logits, drafts, trees, PARAMS, **fields))
        found.append(op(logits, drafts, trees, PARAMS, draft_params=PARAMS, **fields))
    return found


@pytest.mark.parametrize("shape", [[-1, 0, 1, 2, 3, 4], [-1, 0, 0, 1, 1, 3]], ids=["chain", "tree"])
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
def test_huge_logits_verify_as_small_ones(backend, shape, packed):
    if backend == "cuda":
        pytest.skip("memory of a GPU is not sparse")
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(COUNT, VOCAB, generator=generator).to(torch.bfloat16) * 3
    probs = (logits.float() + torch.randn(COUNT, VOCAB, generator=generator) / 2).softmax(-1)
    drafts = torch.zeros(COUNT, dtype=torch.int64)
    for node, parent in enumerate(shape[1:], 1):
        drafts[node] = logits[parent].argmax() if node < 4 else probs[parent].argmax()
    mask = torch.rand(COUNT, VOCAB, generator=generator) < 0.9
    mask[:, drafts] = True
    if packed:
        bits = torch.nn.functional.pad(mask, (0, -VOCAB % 32)).view(COUNT, -1, 32).long()
        mask = (bits << torch.arange(32)).sum(-1).int()
    expected = verdicts(shape, logits, mask, drafts, probs, None)
    assert any((verdict.num_accepted > 2).any() for verdict in expected)
    all_probs, rows = many_rows(probs.half())
    for got, again in (
        (verdicts(shape, far_apart(logits), far_apart(mask), drafts, far_apart(probs), None), expected),
        (
            verdicts(shape, logits, mask, drafts, all_probs, rows),
            verdicts(shape, logits, mask, drafts, probs.half(), None),
        ),
    ):
        for a, b in zip(got, again, strict=True):
            assert all(x.equal(y) for x, y in zip(a, b, strict=True))


def test_huge_logits_sample_as_small_ones(backend):
    if backend == "cuda":
        pytest.skip("memory of a GPU is not sparse")
    logits = torch.randn(COUNT, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    words = streams(COUNT, torch.device("cpu"))
    assert pt.sample(far_apart(logits), PARAMS, **words).equal(pt.sample(logits, PARAMS, **words))


# ---- messages

MESSAGES: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, r"^tree_attention: window: expected type int, got tuple: \(4, 0\)$",
     lambda: pt.tree_attention(ROWS, KEYS, KEYS, TABLE, LENS, OFFSETS, window=(4, 0))),
    (TypeError, r"^tree_attention: tree_lens: expected type Optional\[Tensor\], got list: \[7, 4\]$",
     lambda: pt.tree_attention(ROWS, KEYS, KEYS, TABLE, LENS, OFFSETS, tree_lens=[7, 4])),
    (TypeError, r"got list: \[0, 1, 2, .{67}\.\.\.$",  # cut to 80 letters
     lambda: pt.tree_attention(ROWS, KEYS, KEYS, TABLE, LENS, OFFSETS, tree_lens=list(range(100)))),
    (TypeError, r"^merge_states: out_a: expected a Tensor, got None$", lambda: pt.merge_states(None, None, None, None)),
    (ValueError, "verify_greedy: logits: expected 2 rows, one for each node of the trees, got 1 rows",
     lambda: pt.verify_greedy(torch.zeros(1, 8), SLOTS, TREES)),
    # A constructor, a class method, and one with the argument behind a public one without it.
    (ValueError, r"^DraftTree: parents: expected parents\[0\] == -1 \(the root\), got 0$", lambda: pt.DraftTree([0])),
    (ValueError, r"^DraftTree.from_paths: paths: expected each path once", lambda: pt.DraftTree.from_paths([[0], [0]])),
    (ValueError, "^verify_typical: params: expected presence_penalty 0, got 1.0$",
     lambda: pt.verify_typical(torch.zeros(2, 8), SLOTS, TREES, pt.SamplingParams(presence_penalty=1.0))),
    (TypeError, "^anything: expected a Tensor, got int$", lambda: expect_type("anything", 0, torch.Tensor)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "call"), MESSAGES)
def test_messages(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.compile(message)):
        call()
