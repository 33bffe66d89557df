"""tree_attention: properties, random batches, exact results. Shapes: `test_cases.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from support.attention import CPU, Target, check, on_host, once_per_backend, random_tree
from support.devices import made_on, to_device
from support.doubles import intercepted_launches, simt_library

from pagedtree import DraftTree, attention_plan, reference, tree_attention
from pagedtree.check.cases.inputs import as_words

RNG = np.random.default_rng(7)
CHAIN, BINARY, RANDOM = DraftTree.chain(5), DraftTree.full([2, 2, 2]), random_tree(RNG, 40)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LATENT: dict[str, Any] = {"head_dim": 576, "head_dim_v": 512, "heads": (3, 1), "latent": True}


@pytest.mark.parametrize("head_dim", [pytest.param(128, marks=pytest.mark.slow), 256])
def test_sharp_softmax(target: Target, head_dim: int) -> None:
    """Large scores expose q.k's rounding, as by one long sum."""
    prefixes = [700, 60, 200] if target.backend == "cpu" else [250, 60, 100]
    for dtype in target.dtypes:
        case = target.case(prefixes, ["causal", BINARY, RANDOM], head_dim=head_dim, dtype=dtype).build()
        check(dict(case, q=3 * case["q"]), factor=1.5)


@pytest.mark.parametrize(
    ("layout", "heads", "head_dim"), [("nhd", (18, 9), 128), ("packed", (17, 17), 64), ("sparse", (10, 5), 256)]
)
def test_few_rows_of_many_heads(target: Target, heads: tuple[int, int], head_dim: int, layout: str) -> None:
    """An odd number of KV heads share a row tile, split between and within tiles."""
    if target.backend != "cpu":
        pytest.skip("only the cpu backend has such row tiles")
    kinds = ["causal", DraftTree([-1, 0, 0]), BINARY, "causal", "causal"]
    for dtype, window in ((torch.bfloat16, 0), (torch.float32, 300)):
        case = target.case([400, 250, 70, 0, 800], kinds, heads=heads, head_dim=head_dim, dtype=dtype, layout=layout,
                    causal_queries=1, poison=float("nan"))  # fmt: skip
        check(case.build(window=window))


@pytest.mark.parametrize("kind", ["64", "128", "256", "latent 512", "latent 576"])
def test_bits_do_not_depend_on_pages(target: Target, kind: str) -> None:
    """Page size selects copies of boxes or single rows."""
    length, dtype, head_dim, latent = 300, torch.bfloat16, int(kind.split()[-1]), "latent" in kind
    generator = torch.Generator("cpu").manual_seed(head_dim)
    sides = torch.randn(1 if latent else 2, length, 1, head_dim, generator=generator, device="cpu").to(dtype)
    q = torch.randn(10, 4, head_dim, generator=generator, device="cpu").to(dtype)
    positions, results = torch.arange(length, device="cpu"), []
    for page_size in (128, 24, 16, 7, 1):
        pages = -(-length // page_size)
        table = torch.randperm(pages + 2, generator=generator, device="cpu")[:pages]
        caches = torch.zeros(len(sides), pages + 2, page_size, 1, head_dim, dtype=dtype, device="cpu")
        caches[:, table[positions // page_size], positions % page_size] = sides
        case = q, *caches, table.int()[None], torch.tensor([length]).int(), torch.tensor([0, 10]).int()
        q_there, k_there, *rest = to_device(case, target.device)
        rest = [k_there[..., :512], *rest] if latent else rest
        results.append(tree_attention(q_there, k_there, *rest, return_lse=True))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize(("page_size", "options"), [(1, {}), (7, {}), (7, LATENT)], ids=["1", "7", "latent"])
def test_every_phase_of_the_length(target: Target, page_size: int, options: dict[str, Any]) -> None:
    lengths = {"1": range(55, 67), "7": range(7, 132, 5), "7 latent": [*range(28, 36), *range(58, 68)]}
    sizes = [*lengths[f"{page_size}{' latent' if options else ''}"]]
    trees = [DraftTree([-1, 0, 0, 1, 2, 2]) for _ in sizes]
    options = {"poison": float("nan"), **options, "heads": (2, 1)}
    check(target.case(sizes, trees, page_size=page_size, **options).build())


OVERFLOWS: list[dict[str, Any]] = [
    {"head_dim": 64, "window": 40},
    {"head_dim": 128},
    {"head_dim": 128, "cache_dtype": torch.float8_e4m3fn},
    {**LATENT, "window": 40},
    {**LATENT, "head_dim": 512},
    {"head_dim": 192, "head_dim_v": 128},
    {"head_dim": 256, "softcap": 20.0},
    {**LATENT, "cache_dtype": torch.float8_e4m3fn},
]


@pytest.mark.parametrize(
    "at",
    [*range(5), *(pytest.param(at, marks=pytest.mark.slow) for at in range(5, 8))],
    ids=["64", "128", "fp8", "latent", "latent 512", "192", "256", "latent fp8"],
)
def test_non_finite_keys_change_only_rows_that_see_them(target: Target, at: int) -> None:
    """Other rows keep the bits of zeros in slots of refused drafts and later prompt tokens, behind a window, and in
    nodes that are no ancestors of the newest."""
    whole, none = (0, 512), (0, 0)
    poisons = [  # sequence, key from its end, columns of K and V that overflow
        (0, -2, none, (5, 6)),
        (0, -7, none, whole),
        (1, -5, (7, 8), none),
        (1, -30, none, (9, 11)),
        (2, -1, whole, whole),
        (3, -9, none, (1, 2)),
    ]
    kinds, options = [BINARY, "causal", CHAIN, (RANDOM, 6)], dict(OVERFLOWS[at])
    call = {name: options.pop(name) for name in ("window", "softcap") if name in options}
    dtype, value = target.dtypes[at % len(target.dtypes)], (torch.nan, torch.inf, -torch.inf)[at % 3]
    batch = target.case([130, 100, 20, 70], kinds, dtype=dtype, causal_queries=12, poison=torch.nan, **options)
    clean, case = batch.build(**call), batch.build(**call)
    case["sinks"] = clean["sinks"] = torch.linspace(-2, 2, case["q"].shape[1])
    offsets, lengths = case["cu_seqlens_q"].tolist(), case["seq_lens"].tolist()
    unseeing, masks = torch.ones(offsets[-1], dtype=torch.bool), []
    for b, length in enumerate(lengths):
        words, tree_len = case["tree_mask"][offsets[b] : offsets[b + 1]].cpu(), int(case["tree_lens"][b])
        masks.append(reference.visible_keys(length, len(words), tree_len, words, call.get("window", 0)))
        unseen = torch.nonzero(~masks[b].any(0)).flatten().tolist()
        poisons += [(b, key - length, whole, whole) for key in unseen]
    assert len(poisons) > 20
    for b, key, *columns in poisons:
        key += lengths[b]
        page, slot, rows = case["page_table"][b, key // 16], key % 16, slice(offsets[b], offsets[b + 1])
        for name, (begin, end) in zip(("k_cache", "v_cache"), columns, strict=True):
            clean[name][page, slot] = 0
            case[name][page, slot, :, begin:end] = value
        unseeing[rows] &= ~masks[b][:, key].to(unseeing.device)
    found, expected = (tree_attention(**arguments, return_lse=True) for arguments in (case, clean))
    assert all(torch.equal(a[unseeing], b[unseeing]) for a, b in zip(found, expected, strict=True))
    assert 10 < unseeing.sum() < len(unseeing) - 10
    with made_on(CPU):
        out, lse = reference.tree_attention(**on_host(case))
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found[0].cpu().double(), out, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert torch.equal(found[1].cpu().isfinite(), lse.isfinite())


@pytest.mark.parametrize("head_dim", [512, 576])
def test_latent_fp8(target: Target, head_dim: int) -> None:
    """V's scale defaults to K's."""
    options = {**LATENT, "head_dim": head_dim, "cache_dtype": torch.float8_e4m3fn, "poison": float("nan")}
    dtype = torch.bfloat16 if head_dim == 576 else torch.float16
    case = target.case([100, 61], [RANDOM, "causal"], dtype=dtype, **options).build()
    k_scale, v_scale = torch.tensor([0.5, 2.0])
    check({**case, "k_scale": k_scale})
    check({**case, "k_scale": k_scale, "v_scale": v_scale})
    out = tree_attention(**case, k_scale=k_scale)
    assert torch.equal(out, tree_attention(**case, k_scale=k_scale, v_scale=k_scale))


@once_per_backend
def test_views_that_are_not_latent(target: Target) -> None:
    """V in other columns of K's memory, or another head, is read separately and may have a softcap."""
    case = target.case([70, 20], [RANDOM, "causal"], head_dim=192, head_dim_v=128, heads=(4, 1)).build()
    check({**case, "v_cache": case["k_cache"][..., 64:], "softcap": 20.0})
    two = target.case([70, 20], [RANDOM, "causal"], head_dim=192, head_dim_v=128, heads=(4, 2)).build()
    check({**two, "v_cache": two["k_cache"][..., :128], "softcap": 20.0})


def test_fp8_codes_are_exact(target: Target) -> None:
    """With one key the output is its V row."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    cache = codes.view(torch.float8_e4m3fn)[None, None, None]
    table, one = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    cu = torch.tensor([0, 1], dtype=torch.int32)
    for dtype in target.dtypes:
        out = tree_attention(torch.zeros(1, 1, 256, dtype=dtype), cache, cache, table, one, cu)
        assert torch.equal(out.float()[0, 0], cache.float()[0, 0, 0])


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_rows_of_any_magnitude(target: Target, cache_dtype: torch.dtype) -> None:
    """One tile's queries differ widely in size; scores exceed 2^100."""
    scale = torch.tensor(1.0) if cache_dtype == torch.float8_e4m3fn else None
    case = target.case([200, 3], [BINARY, CHAIN], dtype=torch.bfloat16, cache_dtype=cache_dtype)
    case = case.build(k_scale=scale, v_scale=scale)
    powers = torch.tensor([0.0, 60.0, -60.0, 1.0, 110.0, -126.0, 8.0])
    case["q"] *= torch.exp2(powers[torch.arange(case["q"].shape[0]) % 7])[:, None, None].to(case["q"])
    check(case)
    plain = tree_attention(**case)
    case["q"][5, 1, 7] = torch.inf
    found = tree_attention(**case)
    other = torch.ones(found.shape[:2], dtype=torch.bool)
    other[5, 1] = False
    assert torch.equal(found[other], plain[other]) and not found[5, 1].isfinite().all()


def test_half_values_are_exact(target: Target) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for start in range(0, 65536, 8192):
            words = torch.arange(start, start + 8192, dtype=torch.int32).to(torch.int16).view(32, 1, 256)
            values = words.view(dtype).nan_to_num(0, 0, 0)
            case = (torch.zeros(1, 32, 256, dtype=dtype), values.transpose(0, 1)[None], values.transpose(0, 1)[None])
            table, one = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
            out = tree_attention(*case, table, one, torch.tensor([0, 1], dtype=torch.int32))
            normal = values[:, 0].float().abs() >= 2.0**-126  # AVX-512's conversion to bf16 flushes fp32 subnormals
            assert torch.equal(out[0][normal], values[:, 0][normal])


def test_a_mask_without_words(target: Target) -> None:
    """Missing words count as 0."""
    case = target.case([20, 3, 9], [BINARY, CHAIN, "causal"]).build()
    for tree_lens in (case["tree_lens"], torch.zeros_like(case["seq_lens"])):
        blank = dict(case, tree_lens=tree_lens, tree_mask=torch.zeros_like(case["tree_mask"]))
        out = tree_attention(**dict(blank, tree_mask=case["tree_mask"].new_zeros(case["q"].shape[0], 0)))
        assert torch.equal(out, tree_attention(**blank))


@pytest.mark.parametrize(
    "device", ["1:99:1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("3:163:8", "40:99:1"))]
)
def test_device_does_not_matter(target: Target, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other splits, stages and CTAs per SM agree within rounding, each repeating its bits."""
    if target.backend != "simt":
        pytest.skip("simt only")
    if target.variant == "wgmma":  # Hopper only
        device = re.sub(":[0-9]+:", ":227:", device)
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", device)
    for head_dim, stored in ((64, None), (128, torch.float8_e4m3fn), (256, None)):
        kinds, options = [BINARY, RANDOM, "causal"], {"head_dim": head_dim, "cache_dtype": stored}
        case = target.case([400, 17, 150], kinds, heads=(2, 1), poison=float("nan"), **options).build()
        case["v_scale"] = None if stored is None else torch.tensor(1.0)
        for hint in (8, 64):
            first = tree_attention(**case, max_seqlen_q=hint, return_lse=True)
            again = tree_attention(**case, max_seqlen_q=hint, return_lse=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            check(dict(case, max_seqlen_q=hint))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_million_keys_in_a_window(target: Target, dtype: torch.dtype) -> None:
    """2^20 keys before the window change only splits, and so rounding."""
    distance, page_size = 2**20, 16
    case = target.case([330, 215, 260], [BINARY, "causal", (RANDOM, 6)], dtype=dtype, poison=float("nan")).build()
    near = tree_attention(**case, window=200, return_lse=True)
    pages = torch.full((3, distance // page_size), -1, dtype=torch.int32)
    case["page_table"] = torch.cat([pages, case["page_table"]], 1)
    case["seq_lens"] = case["seq_lens"] + distance
    far = tree_attention(**case, window=200, return_lse=True)
    tolerance = target.tolerance if dtype != torch.bfloat16 else {**target.tolerance, "rtol": 2**-7}
    for a, b in zip(far, near, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_reference_on_a_known_tree() -> None:
    """By hand: root 0; 1, 2 below it; 3 below 1."""
    words = as_words(DraftTree([-1, 0, 0, 1]).mask, 1)
    mask = reference.visible_keys(6, 4, 4, words, 0)
    assert mask.int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1]]
    mask = reference.visible_keys(6, 4, 4, words, 3)
    assert mask.int().tolist() == [[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 0, 1]]
    mask = reference.visible_keys(5, 2, -1, words, 2)
    assert mask.int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


# ---- prefill chunks, draft trees, plain decode and idle slots in one call

IDLE = (DraftTree([-1]), 0)  # no queries


@pytest.fixture
def mixed(target: Target) -> dict:
    """Decode rows, trees, 32 and 34 rows per head, a chunk of 300 queries, idle slots with keys, padding."""
    decode, limit, tree = DraftTree([-1]), DraftTree.chain(15), random_tree(np.random.default_rng(2), 60)
    kinds = [decode, IDLE, tree, "causal", decode, limit, IDLE, (tree, 20), decode, DraftTree.chain(16)]
    prefixes = [300, 40, 100, 90, 0, 515, 0, 64, 129, 70]
    case = target.case(prefixes, kinds, heads=(4, 2), causal_queries=300, padding=6, poison=float("nan")).build()
    case["page_table"][1] = -7  # left by a finished sequence
    return case


@contextmanager
def counted_launches() -> Iterator[list[tuple[int, int]]]:
    """Records simt's grid and block sizes."""
    launches: list[tuple[int, int]] = []

    def note(kernel, grid, block, *rest) -> int:
        launches.append((grid[0], block[0]))
        return 0

    library = simt_library()
    assert library is not None
    with intercepted_launches(library, note):
        yield launches


@pytest.mark.parametrize("max_seqlen_q", [None, 300])
def test_mixed_batch(target: Target, mixed: dict, max_seqlen_q: int | None) -> None:
    """One or two lists give equal results within rounding."""
    check(dict(mixed, max_seqlen_q=max_seqlen_q))


def test_mixed_batch_repeats_its_bits(target: Target, mixed: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results have the same bits with any plan and any order of threads and CTAs."""
    if target.backend == "cpu":
        pytest.skip("the cpu backend has one list")
    plan = attention_plan(mixed["seq_lens"], mixed["cu_seqlens_q"], num_q_heads=4, num_kv_heads=2, head_dim=64,
                          page_size=16, max_seqlen_q=300)  # fmt: skip
    expected = tree_attention(**mixed, max_seqlen_q=300, return_lse=True)
    for order in ("forward", "reverse", "random:5"):
        monkeypatch.setenv("PAGEDTREE_SIMT_ORDER", order)
        result = tree_attention(**mixed, max_seqlen_q=300, plan=plan, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)), order


def test_launches_follow_from_the_host_s_integers(target: Target, mixed: dict) -> None:
    """Launches ignore lengths, so graphs may be replayed with others."""
    if target.backend != "simt":
        pytest.skip("simt only")
    with counted_launches() as launches:
        tree_attention(**mixed, max_seqlen_q=300)
        first = launches.copy()
        large = 384 if target.variant == "wgmma" else 128
        assert [block for _, block in first[1:]] == [128, large]  # plan, small tiles, large tiles
        assert first[0][0] == 3
        launches.clear()
        lengths = torch.zeros_like(mixed["cu_seqlens_q"])
        tree_attention(**dict(mixed, cu_seqlens_q=lengths), max_seqlen_q=300)
        assert launches == first
        launches.clear()
        tree_attention(**mixed, max_seqlen_q=8)
        assert len(launches) == 2


def test_idle_slots_are_not_read(target: Target, mixed: dict) -> None:
    """Idle slots' lengths, masks and pages may be stale."""
    expected = tree_attention(**mixed, max_seqlen_q=300)
    stale = dict(mixed, seq_lens=mixed["seq_lens"].clone(), tree_lens=mixed["tree_lens"].clone())
    stale["seq_lens"][[1, 6]] = torch.tensor([2**31 - 1, 77], dtype=torch.int32)
    stale["tree_lens"][[1, 6]] = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)
    stale["page_table"] = mixed["page_table"].clone()
    stale["page_table"][[1, 6]] = 2**31 - 1
    torch.testing.assert_close(tree_attention(**stale, max_seqlen_q=300), expected, **target.tolerance)
