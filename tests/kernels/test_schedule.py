"""attention_plan; tree_attention with fitting, stale and garbage plans."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from support.attention import Target, check, once_per_backend, random_tree

from pagedtree import DraftTree, attention_plan, tree_attention
from pagedtree.check.cases.attention import plan_of

KV_TILE, PIECE_COST = 64, 1
FEW_ROWS = {"cpu": 8, "simt": 0, "cuda": 0}
ALL, SMALL, LARGE = range(3)  # lists
SMALL_ROWS = 32


def ranges_of(plan: torch.Tensor, which: int = ALL) -> list[tuple[int, int, int]]:
    entries = plan.view(3, 1025, -1)[which]
    return [tuple(entry[:3].tolist()) for entry in entries[1 : 1 + int(entries[0, 0])]]


def sharers_of(plan: torch.Tensor, which: int = ALL) -> int:
    return int(plan.view(3, 1025, -1)[which, 0, 1])


def visible_tiles(queries: int, keys: int, tree_len: int, window: int, rows: range) -> range:
    """Returns KV tiles visible to some of these rows of two heads."""
    if tree_len < 0:
        ends = [keys - queries + row // 2 + 1 for row in (rows[0], rows[-1])]
        low, high = ends[0] - window, ends[1]
    else:
        low, high = keys - tree_len - window, keys
    first = max(low, 0) // KV_TILE if window else 0
    first = min(first, max(-(-keys // KV_TILE) - 1, 0))
    return range(first, max(-(-max(high, 0) // KV_TILE), first + 1))


def check_balance(starts: list[tuple[int, int, int]], queries: list[int], keys: list[int], m_tile: int, *,
                  trees: list[int] | None = None, window: int = 0, few_rows: int = 0,
                  which: int = ALL) -> None:  # fmt: skip
    """Checks equal costs: two KV heads of two query heads share a row tile up to `few_rows` rows."""
    listed = [n if which == ALL or (2 * n <= SMALL_ROWS) == (which == SMALL) else 0 for n in queries]
    first = next(b for b, n in enumerate(listed) if n > 0)
    assert starts[0] == (first, 0, 0) and starts == sorted(starts)
    cuts = [start for start in starts if start[2] > 0]
    assert len(cuts) == len(set(cuts))  # only empty ranges may share a start
    begin, begins, tiles = 0, {}, {}
    for b, n in enumerate(listed):
        heads = 2 if n * 2 <= few_rows else 1
        m_tiles = [range(row, min(row + m_tile, 2 * n)) for row in range(0, 2 * n, m_tile)]
        for row, rows in enumerate(m_tiles * (2 // heads)):
            begins[b, row] = begin, heads
            tiles[b, row] = visible_tiles(n, keys[b], -1 if trees is None else trees[b], window, rows)
            begin += (len(tiles[b, row]) + PIECE_COST) * heads
        begins[b, 2 // heads * len(m_tiles)] = begin, heads  # the next sequence

    def cost_before(start: tuple[int, int, int]) -> int:
        b, row, kv = start
        before, heads = begins[b, row]
        return before + (kv - tiles[b, row].start) * heads if kv > 0 else before

    costs = [cost_before(start) for start in starts]
    sizes = np.diff([*costs, begin])
    mean, min_piece = begin / len(starts), 4 if few_rows else 2
    assert all(abs(size - mean) <= 2 * (4 + PIECE_COST + 1) for size in sizes), sizes
    for b, row, kv in starts:
        assert kv == 0 or tiles[b, row].start + min_piece <= kv <= tiles[b, row].stop - min_piece


def mixed(target: Target, *prefixes: int) -> dict:
    kinds = [DraftTree.chain(4), "causal", random_tree(np.random.default_rng(1), 70), "causal"]
    return target.case([*prefixes], kinds, heads=(4, 2), causal_queries=3).build()


@pytest.fixture
def case(target: Target) -> dict:
    return mixed(target, *((900, 70, 1100, 2600) if target.backend == "simt" else (9000, 70, 5000, 13000)))


@pytest.mark.each_value
@pytest.mark.parametrize("window", [0, 300, 1500])
@pytest.mark.parametrize(
    ("max_seqlen_q", "which", "m_tile"), [(8, ALL, 16), (71, ALL, 128), (71, SMALL, 32), (71, LARGE, 128)]
)
def test_ranges_cover_equal_costs(
    target: Target, case: dict, max_seqlen_q: int, which: int, m_tile: int, window: int
) -> None:
    if target.backend == "cpu" and which != ALL:
        pytest.skip("the cpu backend has one list")
    plan = plan_of(case, max_seqlen_q, window)
    starts = ranges_of(plan, which)
    queries, keys = case["cu_seqlens_q"].diff().tolist(), case["seq_lens"].tolist()
    sharers = sharers_of(plan, which)
    assert len(starts) * sharers >= (2 if window else 4)
    m_tile, few_rows = (128, FEW_ROWS["cpu"]) if target.backend == "cpu" else (m_tile, 0)
    m_tile *= sharers
    trees = case["tree_lens"].tolist()
    check_balance(starts, queries, keys, m_tile, trees=trees, window=window, few_rows=few_rows, which=which)


def plan_of_lengths(queries: list[int], keys: list[int], window: int = 0) -> torch.Tensor:
    """Plans two KV heads of two query heads."""
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 128, "page_size": 16, "max_seqlen_q": max(queries)}
    cu = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32)
    return attention_plan(torch.tensor(keys, dtype=torch.int32), cu, **sizes, window=window)


def test_a_million_keys(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "132:227:8")
    queries, keys = [1, 500, 0, 16, 1, 1], [2**20, 2**20 - 1, 7, 2**20 + 63, 2**31 - 1, 0]
    plan = plan_of_lengths(queries, keys)
    few_rows = FEW_ROWS[target.backend]
    for which, m_tile in [(ALL, 128)] if few_rows else [(ALL, 128), (SMALL, 32), (LARGE, 128)]:
        starts, sharers = ranges_of(plan, which), sharers_of(plan, which)
        assert sharers == (8 if which == LARGE else 1)  # 500 queries fill 8 row tiles
        assert len(starts) * sharers >= 128
        check_balance(starts, queries, keys, m_tile * sharers, few_rows=few_rows, which=which)


@pytest.mark.each_value
@pytest.mark.parametrize("window", [0, 100, 4096])
@pytest.mark.parametrize(("queries", "keys"), [(8192, 8192), (2048, 10_000), (500, 500), (3000, 2000)])
def test_prompts(target: Target, monkeypatch: pytest.MonkeyPatch, queries: int, keys: int, window: int) -> None:
    """First rows see few keys, or none if queries outnumber keys."""
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "132:227:8")
    starts = ranges_of(plan_of_lengths([queries], [keys], window))
    check_balance(starts, [queries], [keys], 128, window=window)


@pytest.mark.parametrize(
    ("queries", "keys", "sharers"),
    [
        ([64] * 8, [8192] * 8, 1),  # 2 x 8 x 128 tiles: twice the capacity of 132 SMs
        ([64] * 9, [8192] * 9, 1),  # one row tile per head
        ([100] * 9, [8192] * 9, 2),
        ([129] * 9, [8192] * 9, 3),
        ([512] * 9, [8192] * 9, 8),
        ([513] * 9, [8192] * 9, 3),  # 9 row tiles
        ([700] * 9, [8192] * 9, 1),  # 11 row tiles: one of 2 x 6 is empty
        ([1000] * 9, [8192] * 9, 8),
        ([100] * 8 + [60], [8192] * 9, 1),  # one of two would idle
        ([100] * 40 + [60], [8192] * 41, 2),
        ([2048] * 9, [2048] * 9, 1),  # neighbours see too unequal ranges
        ([2048], [130_000], 8),
    ],
)
def test_row_tiles_are_shared_where_keys_are_many(
    target: Target, monkeypatch: pytest.MonkeyPatch, queries: list[int], keys: list[int], sharers: int
) -> None:
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "132:227:8")
    plan = plan_of_lengths(queries, keys)
    if target.backend == "cpu":
        assert sharers_of(plan) == 1
    elif target.backend == "simt":  # GPUs differ in SMs
        assert sharers_of(plan) == sharers
        starts = ranges_of(plan)
        ctas = 132 if target.variant == "wgmma" else 264
        assert 0.95 * ctas < len(starts) * sharers <= ctas
        check_balance(starts, queries, keys, 128 * sharers)


@once_per_backend
def test_plans_for_other_calls_give_right_results(target: Target) -> None:
    """Plans for other lengths, heads, tiles, windows, or without ranges only unbalance work."""
    case = mixed(target, 150, 70, 260, 560)
    plan = plan_of(case, 8)
    call = dict(case, max_seqlen_q=8)
    dense = torch.zeros_like(plan).view(3, 1025, -1)  # 200 splits of one sequence
    dense[:, 0, 0] = 256
    dense[:, 1:257, 2] = torch.arange(256) // 2
    dense[2, 1:257, 0] = 2
    lens, cu = case["seq_lens"], case["cu_seqlens_q"]
    one_more = (torch.arange(len(lens)) == 2).int().to(lens.device)
    planned_for = [
        *(dict(seq_lens=other.int()) for other in (lens.flip(0), lens + one_more, lens * 0)),
        *(dict(cu_seqlens_q=other.int()) for other in (cu[-1] - cu.flip(0), cu // 2)),
        dict(k_cache=case["k_cache"][:, :, :1], q=case["q"][:, :2]),
    ]
    plans = [plan_of({**case, "tree_lens": None, **other}, 8) for other in planned_for]
    plans += [plan, dense.view(-1), plan_of(case, 71)]
    for value in (0, 2**31 - 1):
        plans.append(torch.zeros_like(plan))
        plans[-1].view(3 * 1025, -1)[:, :14] = value  # later words are 0 between calls
    for other in plans:
        check(dict(call, plan=other))
    check(dict(call, plan=plan, window=100))  # planned without a window
    check(dict(call, plan=plan_of(case, 8, 300), window=300))


@once_per_backend
def test_hostile_plans_come_to_an_end(target: Target) -> None:
    """Garbage plans stay in bounds; only the CPU then guarantees results."""
    case = mixed(target, 150, 70, 260, 560)
    plan = plan_of(case, 8)
    generator = torch.Generator().manual_seed(0)
    shuffled, shifted = plan.clone(), plan.clone()
    for entries in shuffled.view(3, 1025, -1):
        count = int(entries[0, 0])
        order = torch.randperm(count, generator=generator, device="cpu")
        entries[1 : 1 + count] = entries[1 : 1 + count][order]
    shifted.view(3 * 1025, -1)[1:, 2] += 1  # splits anywhere
    garbage = torch.randint(-(2**31), 2**31, plan.shape, generator=generator, device="cpu").int().to(plan.device)
    plans = [shuffled, shifted, garbage]
    words = 3 if target.backend == "cpu" else 16  # number of words read
    for word, value in product(range(words), (-1, 2**31 - 1)):
        plans.append(plan.clone())
        plans[-1].view(3 * 1025, -1)[:, word] = value
    for hostile in plans:
        if target.backend == "cpu":
            check(dict(case, plan=hostile))
        else:
            tree_attention(**case, plan=hostile, max_seqlen_q=8)


def check_sharing(target: Target, case: dict, plan: torch.Tensor) -> None:
    """Checks that results ignore the number of CTAs per range; most plans are for other calls."""
    alone = plan.clone()
    alone.view(3, 1025, -1)[:, 0, 1] = 1
    expected = tree_attention(**case, plan=alone, return_lse=True)
    check(dict(case, plan=plan))
    shared = plan.clone()
    shared.view(3, 1025, -1)[:, 0, 1] = 8
    result = tree_attention(**case, plan=shared, return_lse=True)
    torch.testing.assert_close(result[0], expected[0], **target.tolerance)
    torch.testing.assert_close(result[1], expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_shared_row_tiles(target: Target, monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """Three CTAs share split tiles of 3 x 128 rows."""
    if target.backend == "cpu":
        pytest.skip("on the CPU nobody shares")
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "7:227:8")
    nodes = 140
    kinds = ["causal"] * 2 if causal else [random_tree(np.random.default_rng(2), nodes) for _ in range(2)]
    case = target.case([600, 800], kinds, heads=(4, 2), head_dim=64, causal_queries=nodes).build()
    case["max_seqlen_q"] = nodes
    plan = plan_of(case, nodes)
    if target.backend == "simt":  # causal queries see too unequal ranges
        assert sharers_of(plan) == (1 if causal else 3)
    assert any(kv > 0 for _, _, kv in ranges_of(plan))
    check_sharing(target, case, plan)


def test_shared_wide_row_tiles(target: Target) -> None:
    """144 rows in tiles of 32, by wgmma 64, leave some last CTAs empty."""
    if target.backend == "cpu":
        pytest.skip("on the CPU nobody shares")
    tree = random_tree(np.random.default_rng(3), 9)
    case = target.case([300], [tree], heads=(16, 1), head_dim=576, head_dim_v=512, latent=True).build()
    case["max_seqlen_q"] = 9
    check_sharing(target, case, plan_of(case, 9))


# Prefixes; kinds of at most two row tiles; splits; sharers; the hint.
MANY_PIECES = {
    "20": ([1200, 70, 300], [DraftTree.chain(4), "causal", "causal"], 2, 1, 4, {}),
    "20 of 64 rows": ([1200, 70, 300], [DraftTree.chain(4), "causal", "causal"], 2, 1, 32, {}),
    "81": ([5100], [DraftTree.chain(20)], 1, 1, 21, {"head_dim": 64}),
    "fp8": ([700, 70], [DraftTree.chain(20), "causal"], 2, 1, 21, {"cache_dtype": torch.float8_e4m3fn}),
    "shared": ([700, 300], [DraftTree.chain(60), "causal"], 1, 2, 21, {}),
    "latent": ([500], [DraftTree.chain(3)], 2, 1, 4,
               {"heads": (16, 1), "head_dim": 576, "head_dim_v": 512, "latent": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", MANY_PIECES)
def test_many_pieces(target: Target, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A split before every KV tile: up to three steps combine partial results; calls restore the plan."""
    if target.backend != "simt":
        pytest.skip("simt only: elsewhere the number of ranges is not ours to choose")
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "100:227:8")
    prefixes, kinds, cut, sharers, hint, options = MANY_PIECES[name]
    case = target.case(prefixes, kinds, **{"heads": (4, 2), **options}).build(max_seqlen_q=hint)
    expected = tree_attention(**case, return_lse=True)
    tiles = [-(-int(s) // KV_TILE) for s in case["seq_lens"]]
    cuts = [(b, row, tiles[b] if row < cut else 1) for b in range(len(tiles)) for row in range(2)]
    starts = [(b, row, kv) for b, row, count in cuts for kv in range(count)]
    without_third = [s for s in starts if s[2] != 3]
    for keep, order in ((starts, "random:3"), (starts[::2], "reverse"), (without_third, "forward")):
        plan = torch.zeros_like(plan_of(case)).view(3, 1025, -1)
        plan[ALL, 0, :2] = torch.tensor([len(keep), sharers])
        plan[ALL, 1 : 1 + len(keep), :3] = torch.tensor(keep)
        before = plan.clone()
        result = tree_attention(**case, plan=plan.view(-1), return_lse=True)
        monkeypatch.setenv("PAGEDTREE_SIMT_ORDER", order)
        again = tree_attention(**case, plan=plan.view(-1), return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True))
        assert torch.equal(plan, before)
        torch.testing.assert_close(result[0], expected[0], **target.tolerance)
        torch.testing.assert_close(result[1], expected[1], atol=1e-5, rtol=1e-5)


@once_per_backend
@pytest.mark.parametrize(("kilobytes", "m_tile"), [(99, 16), (163, 32), (227, 32)])
def test_wide_tiles(target: Target, kilobytes: int, m_tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and calls choose one tile for the device's shared memory."""
    if target.backend != "simt" or (target.variant == "wgmma" and kilobytes < 227):
        pytest.skip("simt only: elsewhere the shared memory is not ours to choose; wgmma needs all of Hopper's")
    m_tile = 64 if target.variant == "wgmma" else m_tile
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", f"100:{kilobytes}:8")
    case = target.case([90], [DraftTree.chain(8)], heads=(16, 1), head_dim=576, head_dim_v=512, latent=True).build()
    expected = tree_attention(**case)
    check(case)
    plan, rows = plan_of(case, 9), 64 if target.variant == "wgmma" else m_tile
    assert {row for _, row, _ in ranges_of(plan)} == set(range(-(-144 // rows)))
    assert torch.equal(tree_attention(**case, plan=plan), expected)


def test_empty_batches(target: Target) -> None:
    for kinds in ([], ["causal"]):
        built = target.case([0] * len(kinds), kinds, causal_queries=0, padding=2).build()
        plan = plan_of(built)
        assert ranges_of(plan) == [(0, 0, 0)]
        check(dict(built, plan=plan))


def test_bad_lengths(target: Target) -> None:
    """Nonsensical lengths still yield a plan."""
    lens = torch.tensor([2**31 - 1, -5, 2**31 - 1], dtype=torch.int32)
    cu = torch.tensor([5, 2**31 - 1, -(2**31), 2**31 - 1], dtype=torch.int32)
    plan = attention_plan(lens, cu, num_q_heads=128, num_kv_heads=64, head_dim=64, page_size=1, max_seqlen_q=0)
    assert 1 <= int(plan[0]) <= 1024
