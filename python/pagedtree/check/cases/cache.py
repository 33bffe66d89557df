"""slot_mapping, append_kv, compact_kv."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from pagedtree import PreparedCompaction, append_kv, compact_kv, slot_mapping
from pagedtree.check.case import Case, Place, Results
from pagedtree.check.cases.inputs import (
    DTYPES,
    LAYOUTS,
    PAGE_SIZES,
    float32,
    int32,
    int64,
    normal,
    offsets,
    paged_views,
    path_to,
    random_tree,
    seeded,
    views_of,
)
from pagedtree.reference import kv_cache as loops

FP8 = torch.float8_e4m3fn
Views = Callable[[list[Tensor]], Sequence[Tensor]]


def cases() -> Iterator[Case]:
    yield from _mappings()
    yield from _appends()
    yield from _compactions()


def random_table(seed: int, batch: int, max_pages: int, num_pages: int) -> list[list[int]]:
    order = np.random.default_rng(seed).permutation(num_pages)
    table: list[list[int]] = order[: batch * max_pages].reshape(batch, max_pages).tolist()
    return table


# slot_mapping ---------------------------------------------------------------------------------------------------------


def _mappings() -> Iterator[Case]:
    for page_size in PAGE_SIZES:
        lengths, new = [5, 130, 0, 61, 7], [5, 64, 0, 0, 1]
        table = random_table(page_size, 5, -(-140 // page_size), 5 * -(-140 // page_size))
        yield _mapping(f"page {page_size}", table, lengths, offsets(new).tolist(), page_size, sum(new) + 3)
    yield _mapping("no sequence", [], [], [0], 16, 0)
    yield _mapping("no sequence, padding rows", [], [], [0], 16, 4)
    yield _mapping("past 2^31", [[2**31 - 1]], [64], [0, 64], 64, 64)
    pages = [[3, -2], [5, 6]]
    yield _mapping("a negative page", pages, [4, 4], [0, 4, 6], 2, 7)
    yield _mapping("positions below 0", pages, [1, 4], [0, 3, 5], 2, 5)
    yield _mapping("positions past the table", pages, [6, 6], [0, 2, 4], 2, 4)
    yield _mapping("rows past total_q", pages, [2, 4], [0, 2, 6], 2, 3)


def _mapping(
    name: str, table: list[list[int]], seq_lens: list[int], cu_seqlens_q: list[int], page_size: int, total_q: int
) -> Case:
    width = len(table[0]) if table else 3
    wide = torch.full((len(table), width + 2), -7, dtype=torch.int32)  # rows are strided
    wide[:, :width] = int32(table).view(len(table), width)

    def run(place: Place) -> Results:
        page_table = place.put(wide)[:, :width]
        lengths, new = place.put(int32(seq_lens)), place.put(int32(cu_seqlens_q))
        return {"slots": slot_mapping(page_table, lengths, new, page_size, total_q=total_q)}

    def by_loops() -> Results:
        return {"slots": int64(loops.slot_mapping(table, seq_lens, cu_seqlens_q, page_size, total_q))}

    return Case(f"slot_mapping/{name}", ("slot_mapping",), run, by_loops)


# append_kv ------------------------------------------------------------------------------------------------------------


def _appends() -> Iterator[Case]:
    for page_size, layout in product(PAGE_SIZES, LAYOUTS):
        yield _append(f"page {page_size}/{layout}/bf16", "bf16", "bf16", layout, page_size)
    for dtype in ("fp32", "fp16", "fp8"):
        yield _append(f"page 16/nhd/{dtype}", dtype, dtype, "nhd", 16)
        yield _append(f"page 7/packed/D 5/{dtype}", dtype, dtype, "packed", 7, head_dim=5)
    for dtype, scale in product(("fp32", "fp16", "bf16"), ("no", "scalar", "head")):
        yield _append(f"page 16/hnd/{dtype} to fp8/{scale} scale", dtype, "fp8", "hnd", 16, scale=scale)
    yield _append(
        "one row for all heads, D 3/fp32 to fp8", "fp32", "fp8", "nhd", 7, head_dim=3, scale="head", shared=True
    )
    yield _append("D 1/bf16", "bf16", "bf16", "stacked", 7, heads=1, head_dim=1)
    yield _append("no token", "bf16", "bf16", "nhd", 16, tokens=0)
    yield _append("a token of 576", "bf16", "bf16", "nhd", 16, heads=1, head_dim=576)
    yield _append_pools("latent 576", "bf16", "bf16", 1, [576])
    yield _append_pools("latent 576/fp16 to fp8", "fp16", "fp8", 1, [576])
    yield _append_pools("K 192, V 128", "bf16", "bf16", 3, [192, 128])
    yield _append_pools("K 5, V 64/fp32 to fp8", "fp32", "fp8", 3, [5, 64])


def _hostile_slots(tokens: int, num_slots: int) -> Tensor:
    slots = torch.randperm(num_slots, generator=seeded(2))[:tokens]
    slots[3::7] = -1
    slots[5::11] = num_slots
    slots[7::13] = -(2**62)
    return slots


def _append(
    name: str, dtype: str, cache_dtype: str, layout: str, page_size: int, *, tokens: int = 23, heads: int = 3,
    head_dim: int = 64, scale: str = "no", shared: bool = False,
) -> Case:  # fmt: skip
    pages = -(-64 // page_size)
    storage, _, _ = paged_views(pages, page_size, heads, head_dim, DTYPES[cache_dtype], layout)
    wide = normal(2, tokens, heads + 1, head_dim, seed=1) * 3
    if dtype != "fp8" and tokens:
        wide[0, 0, :, :4] = float32([torch.nan, torch.inf, -torch.inf, 1e4])[:head_dim]
        wide[1, 1, :, :2] = float32([0.0, -0.0])[:head_dim]
    rows = wide.to(DTYPES[dtype])[:, :, 1:]  # strided
    if shared:
        rows = rows[:, :, :1].expand_as(rows)
    of_heads = torch.linspace(0.02, 1.5, heads, dtype=torch.float32)
    factor = {"no": None, "scalar": float32(0.37), "head": of_heads}[scale]
    return _append_case(name, [storage], lambda given: views_of(given[0], layout), [*rows], factor)


def _append_pools(name: str, dtype: str, cache_dtype: str, heads: int, dims: list[int]) -> Case:
    """K, or K and V of another width, each in a separate pool."""
    pools = [normal(7, 9, heads, dim, seed=i).to(DTYPES[cache_dtype]) for i, dim in enumerate(dims)]
    rows = [
        (normal(23, heads + 1, dim, seed=9 + i) * 3).to(DTYPES[dtype])[:, 1:]  # strided
        for i, dim in enumerate(dims)
    ]
    return _append_case(name, pools, tuple, rows, float32([0.37]) if dtype != cache_dtype else None)


def _append_case(
    name: str, storages: list[Tensor], caches_of: Views, rows: list[Tensor], factor: Tensor | None
) -> Case:
    """rows: of K, or of K and V. factor: the scale of K; V's is twice as large."""
    slots = _hostile_slots(len(rows[0]), caches_of(storages)[0].shape[:2].numel())

    def run(place: Place) -> Results:
        targets, new, at, scale = place.put((storages, rows, slots, factor))
        (k, v), (k_cache, v_cache) = ((*pair, None)[:2] for pair in (new, caches_of(targets)))
        append_kv(k, v, k_cache, v_cache, at, k_scale=scale, v_scale=None if v is None or scale is None else 2 * scale)
        return {f"storage {i}": storage for i, storage in enumerate(targets)}

    def by_loops() -> Results:
        targets = [storage.clone() for storage in storages]
        for i, (new, cache) in enumerate(zip(rows, caches_of(targets), strict=True)):
            loops.append_rows(new, cache, slots.tolist(), None if factor is None else factor * (1 + i))
        return {f"storage {i}": storage for i, storage in enumerate(targets)}

    return Case(f"append_kv/{name}", ("append_kv",), run, by_loops)


# compact_kv -----------------------------------------------------------------------------------------------------------


def _compactions() -> Iterator[Case]:
    for page_size in PAGE_SIZES:
        trees = [random_tree(b, n) for b, n in enumerate((39, 64, 1, 17))]
        paths = [path_to(tree.num_nodes - 1, tree.parents) for tree in trees]
        table = random_table(page_size, 4, -(-110 // page_size), 4 * -(-110 // page_size))
        num_accepted = [len(path) - 1 for path in paths]
        yield compaction(f"page {page_size}", table, [3, 40, 7, 0], paths, num_accepted, page_size)
        yield compaction(
            f"page {page_size}/prepared", table, [3, 40, 7, 0], paths, num_accepted, page_size, prepared=True
        )
    table = random_table(0, 2, 65, 130)
    paths = [path_to(999, random_tree(5, 1000, 2).parents), [0, 999]]
    yield compaction("1000 nodes", table, [11, 5], paths, [len(paths[0]) - 1, 1], 16)
    yield compaction("no sequence", [], [], [], [], 16)
    yield compaction("idle", [[0, 1], [2, 3], [4, 5]], [-1, 2, 4], [[0, 2, 3], [-1], [0, 1]], [2, 1, 0], 4)
    bad = [[0, 2, -5, 7, 2**31 - 1], [0, 3, 4], [0, 3, 4]]
    yield compaction("bad ids", [[0, 99], [-3, 1], [2, 3]], [1, 2, 2**31 - 2], bad, [99, 2, 2], 4, pages=4)


def compaction(
    name: str, table: list[list[int]], start: list[int], paths: list[list[int]], num_accepted: list[int],
    page_size: int, pages: int | None = None, prepared: bool = False,
) -> Case:  # fmt: skip
    """Layers of every row format: K and V of each layout, a latent cache, scales, odd strides.

    pages: the pool's size, default as many as the table names. prepared: uses `PreparedCompaction`.
    """
    pages = pages or max((page for row in table for page in row), default=0) + 1
    width = max(map(len, paths), default=1)
    accept_index = [path + [-1] * (width - len(path)) for path in paths]
    dtypes = (torch.bfloat16, torch.float16, FP8, torch.float32, torch.bfloat16)
    storages = [
        paged_views(pages, page_size, 2, 40, dtype, layout, seed=i)[0]
        for i, (layout, dtype) in enumerate(zip(LAYOUTS, dtypes, strict=True))
    ]
    storages.append(normal(pages, page_size, 576, seed=5).bfloat16())
    storages.append(normal(pages, page_size, seed=6))
    for kind, shape in ((torch.int8, (pages, page_size + 2, 5)), (torch.int16, (3, 4, pages, 2, page_size, 6))):
        storages.append(torch.randint(-99, 99, shape, generator=seeded(7)).to(kind))

    def caches_of(given: list[Tensor]) -> list[Tensor]:
        views = [view for storage, layout in zip(given, LAYOUTS, strict=False) for view in views_of(storage, layout)]
        latent, scales, odd, deep = given[len(LAYOUTS) :]
        return [*views, latent, scales, odd[:, 1:-1, ::2], deep.permute(2, 4, 0, 3, 1, 5)[..., :5]]

    def results(seq_lens: Tensor, given: list[Tensor]) -> Results:
        return {"seq_lens": seq_lens, **{f"storage {i}": storage for i, storage in enumerate(given)}}

    def run(place: Place) -> Results:
        copies = place.put(storages)
        page_table = int32([[*row, 0] for row in table]).view(len(table), -1 if table else 2)[:, :-1]  # of longer rows
        paths_ = int32([[*row, 2**31 - 1] for row in accept_index]).view(len(table), width + 1)[:, :-1]
        arguments = place.put((page_table, int32(start), paths_, int32(num_accepted)))
        if prepared:
            with torch.inference_mode():
                return results(PreparedCompaction(caches_of(copies))(*arguments), copies)
        return results(compact_kv(caches_of(copies), *arguments), copies)

    def by_loops() -> Results:
        copies = [storage.clone() for storage in storages]
        return results(int32(loops.compact(caches_of(copies), table, start, accept_index, num_accepted)), copies)

    return Case(f"compact_kv/{name}", () if prepared else ("compact_kv",), run, by_loops)
