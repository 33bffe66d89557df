"""rope_append: every combination that selects a code path, on strided rows, hostile numbers and places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedtree import rope_append
from pagedtree.check.case import Case, Place, Results
from pagedtree.check.cases.inputs import DTYPES, LAYOUTS, float32, normal, paged_views, seeded, uniform, views_of
from pagedtree.reference import kv_cache as loops

PAGES, PAGE_SIZE, POSITIONS = 5, 7, 40


@dataclass
class Rope:
    """The parameters of a row. start: the first rotary column; layout "latent": no V, else one of LAYOUTS.

    scale: of a cache that is fp8, "no", "scalar" or "head". in_place: q_out is q.
    """

    dtype: str = "bf16"
    cache_dtype: str = "bf16"
    angles: str = "fp32"
    head_dim: int = 64
    rotary_dim: int = 64
    start: int = 0
    interleaved: bool = False
    layout: str = "nhd"
    tokens: int = 13
    heads: int = 5
    kv_heads: int = 2
    scale: str = "no"
    in_place: bool = False

    @property
    def name(self) -> str:
        columns = f"D {self.head_dim}/{self.rotary_dim} from {self.start}, {self.heads} and {self.kv_heads} heads"
        kind = "pairs" if self.interleaved else "halves"
        types = f"{self.dtype} to {self.cache_dtype}, {self.scale} scale, {self.angles} angles"
        where = "in place" if self.in_place else "anew"
        return f"rope_append/{columns}/{kind}/{types}/{self.layout}/{self.tokens} tokens, {where}"


def cases() -> Iterator[Case]:
    for interleaved in (False, True):
        for dtype in ("fp32", "fp16", "bf16"):
            for angles in dict.fromkeys(("fp32", dtype)):
                yield rope_case(Rope(dtype, dtype, angles, interleaved=interleaved))
                yield rope_case(Rope(dtype, "fp8", angles, 96, 24, 8, interleaved, scale="head", in_place=True))
            # Neither rows nor columns come in pieces of 16 bytes.
            yield rope_case(Rope(dtype, dtype, dtype, 10, 6, 3, interleaved, "packed", in_place=True))
            yield rope_case(Rope(dtype, "fp8", "fp32", 9, 8, 1, interleaved, "padded", scale="scalar"))
        yield rope_case(
            Rope(head_dim=576, rotary_dim=64, start=512, interleaved=interleaved, layout="latent", kv_heads=1)
        )
        small = Rope(
            "fp16", "fp8", "fp32", 72, 16, 56, interleaved, "latent", kv_heads=1, scale="scalar", in_place=True
        )
        yield rope_case(small)
    for layout in LAYOUTS:
        yield rope_case(Rope(head_dim=80, rotary_dim=32, layout=layout))
    yield rope_case(Rope("fp16", "fp16", head_dim=256, rotary_dim=128, heads=9))
    yield rope_case(Rope(rotary_dim=0))
    yield rope_case(Rope(rotary_dim=0, cache_dtype="fp8", in_place=True))
    yield rope_case(Rope(head_dim=2, rotary_dim=2, heads=1, kv_heads=1))
    yield rope_case(Rope(tokens=0))
    yield rope_case(Rope(heads=0))
    yield rope_case(Rope(kv_heads=0))


def rope_case(rope: Rope) -> Case:
    dtype, latent = DTYPES[rope.dtype], rope.layout == "latent"
    kv_heads, dim, tokens = rope.kv_heads, rope.head_dim, rope.tokens
    shape = (kv_heads, dim, DTYPES[rope.cache_dtype])
    if latent:
        storage = normal(PAGES, PAGE_SIZE, kv_heads, dim, seed=0).to(shape[2])
    else:
        storage = paged_views(PAGES, PAGE_SIZE, *shape, rope.layout)[0]
    # Q, K and V side by side, with a head between them: strided rows.
    rows = normal(tokens, rope.heads + 2 * kv_heads + 2, dim, seed=1) * 3
    for t, column, value in ((0, 0, torch.nan), (1, 1, torch.inf), (2, dim - 1, -torch.inf), (3, 0, 3e4), (4, 1, -0.0)):
        if t < tokens:
            rows[t, :, column] = value
    rows[5:6], rows[6:7] = rows[5:6] * 1e-7, rows[6:7].to(dtype).float() * 1e-39  # subnormal in fp16, in bf16 and fp32
    rows = rows.to(dtype)
    angles = uniform(POSITIONS, rope.rotary_dim // 2, seed=2) * 6.3
    # Of rows that are further apart than they are long.
    wide = torch.full((POSITIONS, rope.rotary_dim + 16), torch.nan, dtype=torch.float32)
    wide[:, : rope.rotary_dim] = torch.cat([angles.cos(), angles.sin()], dim=1) * 1.3
    wide = wide.to(DTYPES[rope.angles])
    positions = torch.randint(-3, POSITIONS + 3, (tokens,), generator=seeded(3))
    positions[4:5], positions[5:6] = 2**62, -(2**63)
    slots = torch.randperm(PAGES * PAGE_SIZE, generator=seeded(4))[:tokens]
    slots[3:4], slots[5:6], slots[7:8] = -1, PAGES * PAGE_SIZE, -(2**62)
    of_heads = torch.linspace(0.02, 1.5, kv_heads, dtype=torch.float32)
    scale = {"no": None, "scalar": float32(0.37), "head": of_heads}[rope.scale]

    def parts(given: Tensor) -> list[Tensor]:
        return [part[:, :-1] for part in given.split([rope.heads + 1, kv_heads + 1, kv_heads], dim=1)[:2]] + [
            given[:, given.shape[1] - kv_heads :]
        ]

    def caches_of(given: Tensor) -> list[Tensor]:
        return [given] if latent else [*views_of(given, rope.layout)]

    def run(place: Place) -> Results:
        target, projections, table, at, where, factor = place.put((storage, rows, wide, positions, slots, scale))
        q, k, v = parts(projections)
        k_cache, *v_cache = caches_of(target)
        out = rope_append(
            q, k, None if latent else v, at, table[:, : rope.rotary_dim], k_cache, v_cache[0] if v_cache else None,
            where, interleaved=rope.interleaved, rotary_start=rope.start, q_out=q if rope.in_place else None,
            k_scale=factor, v_scale=None if factor is None or latent else factor * 2,
        )  # fmt: skip
        return {"q_out": out, "rows": projections, "storage": target}

    def by_loops() -> Results:
        target, projections = storage.clone(), rows.clone()
        q, k, v = parts(projections)
        form = (wide[:, : rope.rotary_dim], rope.interleaved, rope.start)
        rotated = [loops.rotated(x, positions.tolist(), *form) for x in (q, k)]
        for i, (cache, new) in enumerate(zip(caches_of(target), (rotated[1], v), strict=False)):
            loops.append_rows(new, cache, slots.tolist(), None if scale is None else scale * (1 + i))
        if rope.in_place:
            q.copy_(rotated[0])
        return {"q_out": rotated[0], "rows": projections, "storage": target}

    op = "rope_append.out" if rope.in_place else "rope_append"
    return Case(rope.name, (op,), run, by_loops)
