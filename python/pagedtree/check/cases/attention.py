"""tree_attention, attention_plan, merge_states.

The CPU backend in fp32 is compared with float64 loops, other backends with the CPU backend in fp32, on the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedtree import _C, DraftTree, attention_plan, merge_states, reference, tree_attention
from pagedtree.check.case import CPU, Case, Difference, Place, Results, environment, relative, within
from pagedtree.check.cases import instructions_sm90
from pagedtree.check.cases.inputs import (
    DTYPES,
    LAYOUTS,
    PAGE_SIZES,
    as_words,
    float32,
    int32,
    normal,
    offsets,
    paged_views,
    random_tree,
    seeded,
    views_of,
)

Sizes = tuple[int, int]  # of the heads of K and V
# Heights of the tiles that the CUDA kernels for mma.sync and wgmma work in.
TILES: dict[Sizes, tuple[int, ...]] = _C.attention_tiles("mma.sync")
WGMMA_TILES: dict[Sizes, tuple[int, ...]] = _C.attention_tiles("wgmma")
# Tolerances: of an output row, relative to its length, and of its log-sum-exp, absolute and relative.
ROW_LIMITS = {"fp32": 5e-6, "fp16": 1e-3, "bf16": 8e-3}
LSE = within(5e-5, 1e-5)
HALF = ("simt", "cuda")
MMA_SYNC, WGMMA = "mma.sync", "wgmma"


@dataclass(frozen=True)
class Batch:
    """Arguments of a call.

    Attributes:
        kinds: the queries of each sequence: a DraftTree, a number (causal), or (DraftTree, n) for its last n rows.
        head_dim_v: V's head size, default `head_dim`.
        latent: V is the first columns of K.
        prefixes: keys before the tree or the queries.
        poison: the contents of slots that belong to no sequence.
        options: the call's options; tensors among them are on the CPU.
    """

    kinds: Sequence[Any]
    prefixes: Sequence[int]
    dtype: str = "bf16"
    cache: str = ""  # the cache's dtype, default `dtype`
    head_dim: int = 64
    heads: tuple[int, int] = (4, 2)
    page_size: int = 16
    layout: str = "nhd"
    padding: int = 0
    poison: float | None = None
    words: int | None = None  # words of a mask row
    head_dim_v: int | None = None
    latent: bool = False
    seed: int = 0

    def build(self, place: Place, *, wide: bool = False) -> dict[str, Any]:
        """Returns the arguments at a place; wide: in fp32, with the same values."""
        rng = np.random.default_rng(self.seed + len(self.kinds))
        queries, tree_lens, rows = [], [], []
        for kind in self.kinds:
            if isinstance(kind, int):
                n, tree_len, mask = kind, -1, rng.random((kind, 32)) < 0.5  # must not be read
            else:
                tree, n = kind if isinstance(kind, tuple) else (kind, kind.num_nodes)
                tree_len, mask = tree.num_nodes, tree.mask[tree.num_nodes - n :]
            queries.append(n)
            tree_lens.append(tree_len)
            rows.append(mask)
        seq_lens = [p + (n if t < 0 else t) for p, n, t in zip(self.prefixes, queries, tree_lens, strict=True)]
        total = sum(queries) + self.padding
        words = self.words or max([1, *(-(-t // 32) for t in tree_lens)])
        mask_words = torch.zeros(total, words, dtype=torch.int32)
        if sum(queries):
            mask_words[: sum(queries)] = torch.cat([as_words(mask, words) for mask in rows])
        q = normal(total, self.heads[0], self.head_dim, seed=self.seed + 1).to(DTYPES[self.dtype])
        page_table, storage = self._cache(seq_lens)
        k_cache, v_cache = views_of(place.put(storage), self.layout)
        if wide and not self.cache:
            k_cache, v_cache = k_cache.float(), v_cache.float()
        v_cache = (k_cache if self.latent else v_cache)[..., : self.head_dim_v]
        return {
            "q": place.put(q.float() if wide else q),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "page_table": place.put(page_table),
            "seq_lens": place.put(int32(seq_lens)),
            "cu_seqlens_q": place.put(offsets(queries)),
            "tree_mask": place.put(mask_words),
            "tree_lens": place.put(int32(tree_lens)),
        }

    def _cache(self, seq_lens: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the page table, with entries past each sequence that must not be read, and the cache's storage."""
        page_counts = [-(-s // self.page_size) for s in seq_lens]
        order = torch.randperm(sum(page_counts) + 3, generator=seeded(self.seed + 2)).int()
        page_table = torch.full((len(seq_lens), max(page_counts, default=0) + 2), -7, dtype=torch.int32)
        for b, count in enumerate(page_counts):
            page_table[b, :count] = order[sum(page_counts[:b]) : sum(page_counts[:b]) + count]
        storage, k_cache, v_cache = paged_views(
            len(order), self.page_size, self.heads[1], self.head_dim, DTYPES[self.cache or self.dtype], self.layout
        )
        if self.poison is not None:
            free = torch.ones(len(order), self.page_size, dtype=torch.bool)
            for b, s in enumerate(seq_lens):
                positions = torch.arange(s, dtype=torch.int64)
                free[page_table[b].long()[positions // self.page_size], positions % self.page_size] = False
            for cache in (k_cache, v_cache):
                if cache.dtype.itemsize == 1:
                    cache.view(torch.uint8)[free] = 0x7F  # e4m3's NaN
                else:
                    cache[free] = self.poison
        return page_table, storage


# A tree, plain decode, a chunk of a prompt, the newest level of a tree, nothing.
MIXED = Batch([random_tree(3, 21), 1, 9, (random_tree(4, 40), 6), 0], [130, 45, 0, 17, 12], padding=3)
# One KV head, whose rows are K and V; NaN where nobody may look.
LATENT = replace(MIXED, head_dim=576, head_dim_v=512, latent=True, heads=(3, 1), page_size=7, poison=float("nan"))
SINKS = float32([0.0, 5.0, -torch.inf, 1.0])  # of four heads
OPTIONS: dict[str, Any] = {"window": 40, "softcap": 20.0}


def cases() -> Iterator[Case]:
    for sizes, tiles in TILES.items():
        for tile, dtype, cache in product(tiles, ("fp16", "bf16"), ("", "fp8")):
            yield tile_case(sizes, tile, dtype, cache)
    for sizes in _C.HEAD_DIMS:
        for dtype, cache in product(ROW_LIMITS if sizes[0] < 64 else ("fp32",), ("", "fp8")):
            batch = Batch([random_tree(1, 9), 2], [70, 3], dtype, cache, sizes[0], heads=(2, 1), head_dim_v=sizes[1])
            yield _attention(f"{_types(dtype, cache)}/{_sizes(sizes)}", batch)
    yield from _latent()
    yield from _shapes()
    yield from _values()
    yield from _options()
    yield from wgmma_cases()
    yield from _plans()
    yield from _merges()


def _sinks(heads: int) -> Tensor:
    return torch.linspace(-2, 4, heads, dtype=torch.float32)


def _types(dtype: str, cache: str) -> str:
    return f"{dtype} on {cache}" if cache else dtype


def _sizes(sizes: Sizes) -> str:
    return f"D {sizes[0]}" if sizes[0] == sizes[1] else f"D {sizes[0]}x{sizes[1]}"


def tile_case(sizes: Sizes, tile: int, dtype: str, cache: str, engine: str = MMA_SYNC) -> Case:
    n = tile // 4
    batch = Batch([random_tree(n, n), n], [70, 3], dtype, cache, sizes[0], heads=(8, 2), head_dim_v=sizes[1])
    name = f"tile {tile}/{_types(dtype, cache)}/{_sizes(sizes)}"
    return _attention(name, batch, engine=engine, max_seqlen_q=n)


def _latent() -> Iterator[Case]:
    def case(name: str, sizes: Sizes, dtype: str, layout: str = "nhd", page_size: int = 7, **more: Any) -> Case:
        of_sizes = replace(LATENT, dtype=dtype, head_dim=sizes[0], head_dim_v=sizes[1])
        batch = replace(of_sizes, layout=layout, page_size=page_size)
        return _attention(f"latent/{name}/{dtype}/{_sizes(sizes)}", batch, **more)

    for sizes in ((512, 512), (576, 512)):
        yield case("3 heads", sizes, "fp32")
    for sizes in ((64, 64), (192, 128)):
        yield case("narrow", sizes, "bf16")
    for layout, page_size in zip(LAYOUTS[1:], (1, 16, 61, 7), strict=True):
        yield case(f"strided {layout}, page {page_size}", (576, 512), "bf16", layout, page_size)
    many = Batch([DraftTree([-1, 0, 0]), 1], [100, 5], "bf16", "", 576, (128, 1), head_dim_v=512, latent=True)
    yield _attention("latent/128 heads/bf16/D 576x512", many)
    for sizes, dtype, cache in product(((512, 512), (576, 512)), ("fp16", "bf16"), ("", "fp8")):
        for heads, padding in ((3, 3), (16, 0)):
            batch = replace(LATENT, dtype=dtype, cache=cache, head_dim=sizes[0], heads=(heads, 1), padding=padding)
            name = f"latent/{heads} heads/{_types(dtype, cache)}/{_sizes(sizes)}"
            yield _attention(name, batch, window=40 if heads == 3 else 0, sinks=_sinks(heads))


def _shapes() -> Iterator[Case]:
    for page_size, dtype, head_dim in product(PAGE_SIZES, ("bf16", "fp16"), (64, 128)):
        name = f"page {page_size}/{dtype}/D {head_dim}"
        yield _attention(name, replace(MIXED, page_size=page_size, dtype=dtype, head_dim=head_dim))
    for layout, cache in product(LAYOUTS[1:], ("", "fp8")):
        name = f"strided {layout}/{_types('bf16', cache)}"
        yield _attention(name, replace(MIXED, layout=layout, cache=cache, page_size=7))
        yield _attention(f"{name}/D 256", replace(MIXED, layout=layout, cache=cache, page_size=7, head_dim=256))
    for heads in ((3, 3), (16, 1), (5, 1), (12, 4)):
        yield _attention(f"heads {heads[0]} of {heads[1]}", replace(MIXED, heads=heads))
    yield _attention("heads 71 of 1", Batch([random_tree(8, 15), 1], [100, 5], heads=(71, 1)))
    yield _attention("heads of 512 apart", replace(MIXED, head_dim=512))
    yield _attention(
        "short and long sequences", replace(MIXED, heads=(8, 1), kinds=[*MIXED.kinds[:4], 70]), max_seqlen_q=70
    )
    yield _attention("a wrong hint", MIXED, max_seqlen_q=1)
    yield _attention("empty prefixes", Batch([random_tree(5, 33), 5, DraftTree.chain(0)], [0, 0, 0]))
    yield _attention("no sequence", Batch([], []))
    yield _attention("no sequence, padding rows", Batch([], [], padding=4))
    prompt = Batch([150], [0])
    yield _attention("more queries than keys", prompt, change=lambda given: given.update(seq_lens=int32([100])))
    yield _attention("no query", Batch([0, 0], [20, 0]))
    yield _attention("padding rows", Batch([3], [5], padding=130))
    yield _attention("300 sequences", Batch([1] * 300, [i % 40 for i in range(300)], heads=(2, 1)))
    for dtype in ("bf16", "fp16"):
        yield _attention(f"long prefix/{dtype}", Batch([random_tree(6, 12), 1], [3000, 1500], dtype))
    yield _attention("1000 nodes", Batch([random_tree(7, 1000, 60)], [40], heads=(1, 1)))
    yield _attention("newest of 1000 nodes", Batch([(random_tree(7, 1000, 60), 20)], [40], heads=(2, 2)))


def _values() -> Iterator[Case]:
    for dtype, cache, poison in product(("bf16", "fp16"), ("", "fp8"), (float("nan"), float("inf"))):
        if cache and poison == float("inf"):
            continue  # e4m3 has none
        name = f"{poison} where nobody may look/{_types(dtype, cache)}"
        yield _attention(name, replace(MIXED, dtype=dtype, cache=cache, poison=poison, page_size=7))

    def pages(given: dict[str, Any]) -> None:
        given["page_table"][0, 1], given["page_table"][0, 3], given["page_table"][2, 0] = 10_000, -1, -(2**31)

    def lengths(given: dict[str, Any]) -> None:
        given["seq_lens"][0], given["seq_lens"][2] = 2**31 - 1, -5

    def trees(given: dict[str, Any]) -> None:
        given["tree_lens"][0], given["tree_lens"][3] = 2**31 - 1, -(2**31)

    def masks(given: dict[str, Any]) -> None:
        mask = given["tree_mask"]
        mask.copy_(torch.randint(-(2**31), 2**31, mask.shape, generator=seeded(9)).int())

    def blind(given: dict[str, Any]) -> None:
        given["tree_mask"].zero_()
        given["tree_lens"][0] = given["seq_lens"][0]

    yield _attention("bad page ids", MIXED, change=pages)
    yield _attention("bad lengths", replace(MIXED, page_size=61), change=lengths)
    yield _attention("bad tree lengths", MIXED, change=trees)
    yield _attention("any mask", MIXED, change=masks)
    for window in (2**31, 2**63 - 1):
        yield _attention(f"window {window}", MIXED, window=window)
    yield _attention("any mask/window 7", MIXED, change=masks, window=7)
    yield _attention("rows that see nothing", MIXED, change=blind)
    yield _attention("rows that see nothing/sinks", MIXED, change=blind, sinks=float32([-1, 1 / 3, 5 / 3, 3]))
    yield _attention("a narrow mask", replace(MIXED, words=1, kinds=[random_tree(3, 50), *MIXED.kinds[1:]]))
    yield _attention("a wide mask", replace(MIXED, words=5))


def _options() -> Iterator[Case]:
    for dtype in ("bf16", "fp16"):
        for window in (1, 5, 64):
            yield _attention(f"window {window}/{dtype}", replace(MIXED, dtype=dtype), window=window)
        yield _attention(f"softcap/{dtype}", replace(MIXED, dtype=dtype), softcap=3.0)
        yield _attention(f"sinks/{dtype}", replace(MIXED, dtype=dtype), sinks=SINKS)
        wide = replace(MIXED, dtype=dtype, head_dim=128)
        yield _attention(f"all options/{dtype}", wide, scale=-0.2, sinks=_sinks(4), **OPTIONS)
        for kind, scale in (("scalar", float32(0.4)), ("vector", float32([0.4])), ("head", float32([0.3, 1.7]))):
            batch = replace(MIXED, dtype=dtype, cache="fp8", head_dim=128)
            yield _attention(f"fp8 scale a {kind}/{dtype}", batch, k_scale=scale, v_scale=scale * 3)
    single = replace(MIXED, dtype="fp32")
    yield _attention("all options/fp32", single, scale=-0.2, sinks=SINKS, **OPTIONS)
    of_heads: dict[str, Any] = {"k_scale": float32([0.3, 1.7]), "v_scale": float32([0.9, 5.1])}
    yield _attention("all options/fp32 on fp8", replace(single, cache="fp8"), window=7, **of_heads)
    yield _attention("into a given tensor/fp32", replace(single, head_dim=32, padding=5), into=True)
    yield _attention("causal", MIXED, change=lambda given: given.update(tree_mask=None))
    two_trees = Batch([random_tree(1, 9), random_tree(2, 30)], [8, 70])
    yield _attention("no tree lengths", two_trees, change=lambda given: given.update(tree_lens=None))
    for dtype in ("bf16", "fp16"):
        yield _attention(f"into a given tensor/{dtype}", replace(MIXED, dtype=dtype), into=True)
        yield _attention(f"without lse/{dtype}", replace(MIXED, dtype=dtype), lse=False)
    yield _attention("into a given tensor/latent", LATENT, into=True)


def wgmma_cases() -> Iterator[Case]:
    """More than 32 rows per KV head, for tiles of 64 (11 to 40 nodes with 4 heads) and of 128."""
    for sizes, tiles in WGMMA_TILES.items():
        for tile, dtype, cache in product(tiles, ("fp16", "bf16"), ("", "fp8")):
            yield tile_case(sizes, tile, dtype, cache, WGMMA)
    for heads in ((8, 2), (24, 2)):
        for page_size, head_dim in ((1, 128), (7, 64), (16, 256), (128, 128)):
            batch = replace(MIXED, head_dim=head_dim, heads=heads, page_size=page_size)
            name = f"{heads[0]} heads/page {page_size}/D {head_dim}"
            yield _attention(name, replace(batch, poison=float("nan")), engine=WGMMA)
            yield _attention(f"{name}/fp8", replace(batch, cache="fp8", poison=float("nan")), engine=WGMMA)
            yield _attention(f"{name}/options", batch, engine=WGMMA, scale=-0.2, sinks=_sinks(heads[0]), **OPTIONS)
        batch = Batch([random_tree(6, 12), 1, 30], [3000, 1500, 900], "bf16", "", 128, heads, layout="packed")
        yield _attention(f"{heads[0]} heads/long prefix", batch, engine=WGMMA)
    for size, dtype, cache, (page, padding) in product((512, 576), ("fp16", "bf16"), ("", "fp8"), ((7, 3), (64, 0))):
        # Without padding, AddressSanitizer sees a read beyond the last row's columns.
        batch = replace(LATENT, dtype=dtype, cache=cache, head_dim=size, heads=(16, 1), page_size=page, padding=padding)
        yield _attention(f"latent/page {page}/{_types(dtype, cache)}/{_sizes((size, 512))}", batch, engine=WGMMA)


def _attention(
    name: str, batch: Batch, *, change: Any = None, into: bool = False, lse: bool = True, plan: Any = None,
    engine: str = "", backends: tuple[str, ...] | None = None, **options: Any,
) -> Case:  # fmt: skip
    """change(arguments) edits them in place; plan(arguments) makes one; into: writes the result to a strided `out`.

    The engine "wgmma" applies where code for 9.0a runs; with "" the environment chooses the engine.
    """

    def arguments(place: Place, wide: bool) -> dict[str, Any]:
        inputs = {**batch.build(CPU, wide=wide), **options}
        if change is not None:
            change(inputs)
        inputs = place.put(inputs)
        if batch.latent:  # a view, which copies of both would not be
            inputs["v_cache"] = inputs["k_cache"][..., : batch.head_dim_v]
        return inputs

    def call(place: Place, wide: bool = False) -> Results:
        if not engine or place.backend == "cpu":
            return call_on_engine(place, wide)
        if engine == WGMMA:
            instructions_sm90.check_applies(place)
        with environment("PAGEDTREE_ENGINE", engine):
            return call_on_engine(place, wide)

    def call_on_engine(place: Place, wide: bool) -> Results:
        inputs = arguments(place, wide)
        q = inputs["q"]
        if plan is not None:
            inputs["plan"] = plan(inputs)
        if into:
            space = q.new_full((q.shape[0], q.shape[1] + 1, inputs["v_cache"].shape[3] + 8), 7.0)
            out, of_rows = tree_attention(**inputs, out=space[:, 1:, :-8], return_lse=True)
            return {"out": out, "lse": of_rows, "around": torch.cat([space[:, 0].flatten(), space[..., -8:].flatten()])}
        result = tree_attention(**inputs, return_lse=lse)
        return {"out": result} if isinstance(result, Tensor) else dict(zip(("out", "lse"), result, strict=True))

    def by_loops() -> Results:
        inputs = arguments(CPU, False)
        inputs.pop("max_seqlen_q", None)
        out, of_rows = reference.tree_attention(**inputs)
        around = torch.full((out.shape[0] * (out.shape[2] + 16 + 8 * out.shape[1]),), 7.0, dtype=torch.float32)
        return {"out": out, **({"lse": of_rows} if lse else {}), **({"around": around} if into else {})}

    if engine == WGMMA:
        backends = HALF
    compare: dict[str, Difference] = {"out": relative(ROW_LIMITS[batch.dtype]), "lse": LSE, "around": within(0)}
    ops = ("tree_attention.out" if into else "tree_attention" if lse else "tree_attention.without_lse",)
    prefix = "tree_attention/wgmma" if engine == WGMMA else "tree_attention"
    return Case(
        f"{prefix}/{name}", (*ops, "attention_plan") if plan else ops, call, by_loops,
        lambda: call(CPU, wide=True), compare=compare, backends=backends,
    )  # fmt: skip


# Plans ----------------------------------------------------------------------------------------------------------------


def plan_of(given: dict[str, Any], max_seqlen_q: int = 21, window: int = 0, segment: int | None = None) -> Tensor:
    k_cache, v_cache = given["k_cache"], given["v_cache"]
    (_, heads, head_dim), (_, page_size, kv_heads, _) = given["q"].shape, k_cache.shape
    return attention_plan(
        given["seq_lens"], given["cu_seqlens_q"], num_q_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        head_dim_v=v_cache.shape[3], latent=k_cache.data_ptr() == v_cache.data_ptr(), page_size=page_size,
        max_seqlen_q=max_seqlen_q, tree_lens=given["tree_lens"], window=window, segment=segment,
    )  # fmt: skip


def _plans() -> Iterator[Case]:
    batch = replace(MIXED, kinds=[*MIXED.kinds, 1], prefixes=[130, 2000, 0, 17, 12, 900])

    def stale(given: dict[str, Any]) -> Tensor:
        return plan_of({**given, "seq_lens": given["seq_lens"].flip(0)}, 1)

    def garbage(given: dict[str, Any]) -> Tensor:
        plan = plan_of(given)
        records = plan.view(-1, 16)[:, 3:14]  # between the starts of ranges and the tickets of CTAs
        words = torch.randint(-(2**31), 2**31, records.shape, generator=seeded(3)).int()
        records.copy_(words.to(plan.device))
        return plan

    yield _attention("its own plan", batch, plan=plan_of)
    yield _attention("a stale plan", batch, plan=stale)
    for dtype in ("fp16", "bf16"):
        yield _attention(f"segments/{dtype}", replace(batch, dtype=dtype), plan=partial(plan_of, segment=128))
    yield _attention("garbage for a plan's records", batch, plan=garbage)
    latent = replace(batch, head_dim=576, head_dim_v=512, latent=True, heads=(3, 1))
    yield _attention("a latent cache's plan", latent, plan=plan_of)
    batches = {"mixed": batch, "latent": latent, "no sequence": Batch([], []), "no query": Batch([0, 0], [20, 0])}
    for name, plan_batch in batches.items():
        yield _plan(name, plan_batch)
    yield _plan("window", Batch([5, 300], [4000, 2500]), window=700)
    yield _plan("segments", Batch([5, 300], [4000, 2500]), segment=192)


TRUTHS = [
    "cuts where keys are seen",
    "has room for three lists",
    "cuts at segments",
    "cuts in order",
    "cuts the batch",
    "begins with the first query",
]


def _plan(name: str, batch: Batch, window: int = 0, segment: int | None = None) -> Case:
    """The number of ranges depends on the device; on every device they must partition all of the work, in order."""

    def run(place: Place) -> Results:
        inputs = batch.build(place)
        plan = plan_of(inputs, window=window, segment=segment).cpu()
        entries_of = plan[: 3 * 16 * 1025].view(3, 1025, -1).tolist()
        lists = [[tuple(entry[:3]) for entry in entries[1 : 1 + entries[0][0]]] for entries in entries_of]
        queries = inputs["cu_seqlens_q"].diff().tolist()
        first = next((b for b, n in enumerate(queries) if n), 0)
        ends = [(64 * kv, int(inputs["seq_lens"][b])) for starts in lists for b, _, kv in starts if kv > 0]
        truths = [
            all(key < s and (window == 0 or key > s - 300 - window) for key, s in ends),
            plan.numel() == 3 * 16 * 1025 + (segment or 0) // 64,
            all(key % (segment or 64) == 0 for key, _ in ends),
            all(starts == sorted(starts) and len(starts) <= 1024 for starts in lists),
            all(min(x) >= 0 and x[0] <= len(queries) for starts in lists for x in starts),
            (first, 0, 0) in [starts[0] for starts in lists if starts],
        ]
        return {text: torch.tensor(truth, dtype=torch.bool) for text, truth in zip(TRUTHS, truths, strict=True)}

    def by_loops() -> Results:
        return {text: torch.ones((), dtype=torch.bool) for text in TRUTHS}

    return Case(
        f"attention_plan/{name}", ("attention_plan",), run, by_loops, always_loops=True, against="what a plan is"
    )


# merge_states ---------------------------------------------------------------------------------------------------------


def _merges() -> Iterator[Case]:
    for dtype, head_dim in product(("fp32", "fp16", "bf16"), (1, 5, 64, 130, 512)):
        yield _merge(f"{dtype}/D {head_dim}", dtype, 30, head_dim)
    yield _merge("no token", "bf16", 0, 64)


def _merge(name: str, dtype: str, tokens: int, head_dim: int) -> Case:
    def sides(place: Place) -> tuple[Tensor, ...]:
        wide = normal(2, tokens, 7, head_dim + 3, seed=head_dim).to(DTYPES[dtype])
        lse = 10 * normal(2, 5, tokens, seed=1)
        lse[0, :, :5], lse[1, :, 3:8] = -torch.inf, -torch.inf
        wide[0, :5], wide[1, 3:8] = torch.nan, torch.inf
        wide, lse = place.put((wide, lse))
        out_a, out_b = wide[0, :, 1:6, 2 : 2 + head_dim], wide[1, :, 1:6, 1 : 1 + head_dim]
        return out_a, lse[0].T, out_b, lse[1].T

    def run(place: Place) -> Results:
        return dict(zip(("out", "lse"), merge_states(*sides(place)), strict=True))

    def by_loops() -> Results:
        out_a, lse_a, out_b, lse_b = sides(CPU)
        clean = [out.nan_to_num(0, 0, 0) for out in (out_a, out_b)]
        return dict(zip(("out", "lse"), reference.merge_states(clean[0], lse_a, clean[1], lse_b), strict=True))

    unit = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 8e-3}[dtype]
    compare = {"out": within(unit, unit), "lse": within(2e-6, 2e-6)}
    return Case(f"merge_states/{name}", ("merge_states",), run, by_loops, compare=compare)
