"""Random batches for tree_attention, the contract's tolerance; dense attention in float32 for adapters."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedtree import _C, DraftTree, PreparedAttention, reference, tree_attention
from pagedtree.check.case import Place
from pagedtree.check.cases import inputs, instructions_sm90
from pagedtree.check.cases.attention import Batch
from pagedtree.testing import backends
from support.devices import made_on, placed, to_device

CPU = torch.device("cpu")
*_FIRST, _LAST = dict.fromkeys(str(k) for k, _ in _C.HEAD_DIMS)
HEAD_SIZES = f"{', '.join(_FIRST)} or {_LAST}"  # as in messages
LAYER_ARGUMENTS = ("q", "k_cache", "v_cache", "sinks", "k_scale", "v_scale", "out")
LAYOUTS = (*inputs.LAYOUTS, "sparse")
_NAMES = {dtype: name for name, dtype in inputs.DTYPES.items()}


def random_tree(rng: np.random.Generator, num_nodes: int) -> DraftTree:
    return DraftTree([-1, *(int(rng.integers(max(0, i - 5), i)) for i in range(1, num_nodes))])


@dataclass(frozen=True)
class Case:
    """A call's arguments at a place."""

    batch: Batch
    place: Place

    def build(self, **options: Any) -> dict[str, Any]:
        with made_on(CPU):
            return {**self.batch.build(self.place), **self.place.put(options)}


TARGETS = [("cpu", isa) for isa in _C.available_isas()]
TARGETS += [("simt", ""), ("simt", "wgmma"), ("cuda", "")]
if "HOST_CUDA" not in os.environ and instructions_sm90.absent(Place(torch.device("cuda"), "cuda")) is None:
    TARGETS += [("cuda", "wgmma")]
TARGETS = [target for target in TARGETS if target[0] in backends()]


def target_id(target: tuple[str, str]) -> str:
    return "-".join(filter(None, target))


_BEST = {backend: (backend, variant) for backend, variant in TARGETS if variant != "wgmma"}.values()
# Tests that hardly depend on instructions: the core suite uses the CPU's best set and the default engine.
once_per_backend = pytest.mark.parametrize(
    "target",
    [pytest.param(target, marks=[] if target in _BEST else pytest.mark.slow) for target in TARGETS],
    ids=target_id,
    indirect=True,
)


@dataclass(frozen=True)
class Target:
    """A backend with an instruction set or an engine."""

    backend: str
    variant: str
    device: torch.device

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """fp32 has no engine."""
        halves = (torch.float16, torch.bfloat16)
        if self.backend == "cpu":
            return (torch.float32, *halves)
        return halves if self.variant else (*halves, torch.float32)

    @property
    def layouts(self) -> tuple[str, ...]:
        return LAYOUTS if self.backend == "cpu" else LAYOUTS[:-1]

    @property
    def tolerance(self) -> dict[str, float]:
        """Bounds two computations' difference in `dtypes[0]`."""
        return {"atol": 1e-6, "rtol": 1e-5} if self.backend == "cpu" else {"atol": 1e-3, "rtol": 2e-3}

    def case(
        self, prefixes: list[int], kinds: list[Any], *, dtype: torch.dtype | None = None,
        cache_dtype: torch.dtype | None = None, causal_queries: int = 7, **options: Any,
    ) -> Case:  # fmt: skip
        """Builds a check batch; kind "causal" has `causal_queries` queries and no tree.

        Skips unsupported dtypes and layouts.
        """
        dtype = dtype or self.dtypes[0]
        if dtype not in self.dtypes or options.get("layout", "nhd") not in self.layouts:
            pytest.skip(f"{self.backend} does not take {dtype}, layout {options.get('layout')}")
        if self.variant == "wgmma":  # needs 33 rows; these fill tiles of 64 and 128
            options.setdefault("heads", (10, 2) if dtype == torch.float16 else (22, 2))
        queries = [causal_queries if kind == "causal" else kind for kind in kinds]
        cache = "" if cache_dtype is None else _NAMES[cache_dtype]
        batch = Batch(queries, prefixes, _NAMES[dtype], cache, **options)
        return Case(batch, Place(self.device, self.backend))


def rms(x: Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt()) if x.numel() else 0.0


def sdpa_error(case: dict[str, Any], expected: Tensor) -> float:
    """Returns torch SDPA's RMS error on each sequence's gathered K and V, in the same dtype."""
    out = case["q"].new_zeros((*case["q"].shape[:2], case["v_cache"].shape[3]))
    page_size, group = case["k_cache"].shape[1], case["q"].shape[1] // case["k_cache"].shape[2]
    offsets = case["cu_seqlens_q"].tolist()
    for b, s in enumerate(case["seq_lens"].tolist()):
        begin, end = offsets[b], offsets[b + 1]
        if s == 0 or begin == end:
            continue
        words = None if case["tree_mask"] is None else case["tree_mask"][begin:end]
        tree_len = end - begin if case["tree_lens"] is None else int(case["tree_lens"][b])
        mask = reference.visible_keys(s, end - begin, tree_len, words, case.get("window", 0))
        positions = torch.arange(s)
        slots = case["page_table"][b].long()[positions // page_size], positions % page_size
        k, v = (case[c][slots].repeat_interleave(group, 1).transpose(0, 1)[None] for c in ("k_cache", "v_cache"))
        k[:, :, ~mask.any(0)] = v[:, :, ~mask.any(0)] = 0
        query = case["q"][begin:end].transpose(0, 1)[None]
        result = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=mask)[0].transpose(0, 1)
        out[begin:end] = result.nan_to_num()
    return rms(out - expected)


def on_host(case: dict[str, Any]) -> dict[str, Any]:
    """Copies the case to the CPU; a V that is a view of K stays one."""
    names = [name for name, value in case.items() if isinstance(value, Tensor)]
    return {**case, **dict(zip(names, to_device([case[name] for name in names], CPU), strict=True))}


def prepared_attention(case: dict[str, Any]) -> Tensor:
    layer = {name: case[name] for name in LAYER_ARGUMENTS if name in case}
    q, k_cache, v_cache = (layer.pop(name) for name in LAYER_ARGUMENTS[:3])
    step = PreparedAttention(**{name: value for name, value in case.items() if name not in LAYER_ARGUMENTS})
    with torch.inference_mode():
        return step(q, k_cache, v_cache, **layer)


def check(case: dict[str, Any], *, factor: float = 2.0) -> None:
    """Asserts RMS error within `factor` of SDPA's, close lse, equal prepared calls."""
    out, lse = tree_attention(**case, return_lse=True)
    assert torch.equal(prepared_attention(case), out)
    plain = on_host({k: v for k, v in case.items() if k not in ("plan", "max_seqlen_q")})
    with made_on(CPU):
        _check(out.cpu(), lse.cpu(), plain, factor)


def _digest(plain: dict[str, Any]) -> bytes:
    digest = hashlib.sha1()
    for name, value in sorted(plain.items()):
        digest.update(name.encode())
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {value.shape}".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy())
        else:
            digest.update(repr(value).encode())
    return digest.digest()


Expected = tuple[Tensor, Tensor, float | None]
_expected: OrderedDict[bytes, Expected] = OrderedDict()  # the reference's last 128 calls


def _has_own_tolerance(plain: dict[str, Any]) -> bool:
    """SDPA lacks these options, so bounds no error."""
    return any(plain.get(name) is not None for name in ("sinks", "k_scale", "v_scale")) or bool(plain.get("softcap"))


def _expectation(plain: dict[str, Any]) -> Expected:
    """Returns the reference's result and SDPA's error, cached for all targets."""
    key = _digest(plain)
    if key not in _expected:
        out, lse = reference.tree_attention(**plain)
        _expected[key] = out, lse, None if _has_own_tolerance(plain) else sdpa_error(plain, out)
    _expected.move_to_end(key)
    if len(_expected) > 128:
        _expected.popitem(last=False)
    return _expected[key]


def _check(out: Tensor, lse: Tensor, plain: dict[str, Any], factor: float) -> None:
    expected, expected_lse, allowed = _expectation(plain)
    assert out.dtype == plain["q"].dtype and out.shape == (*plain["q"].shape[:2], plain["v_cache"].shape[3])
    assert lse.dtype == torch.float32
    assert not out.isnan().any() and not lse.isnan().any()
    finite = expected_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, finite)
    assert not out[~finite].any()
    torch.testing.assert_close(lse.double()[finite], expected_lse[finite], atol=2e-5, rtol=2e-5)
    error = rms(out - expected)
    if allowed is None:
        unit = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[out.dtype]
        assert error <= unit * max(rms(expected), 1e-6), (error, rms(expected))
    else:
        assert error <= factor * allowed + 1e-9, (error, allowed)
    gap = float((out.double() - expected).abs().max()) if out.numel() else 0.0
    scale = float(expected.abs().max()) if out.numel() else 1.0
    assert gap <= {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[out.dtype] * max(scale, 1e-3), gap


# ---- adapters


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float = 0.0, softcap: float = 0.0, sinks: Any = None
) -> tuple[Tensor, Tensor]:
    """Returns out [n, H, D], lse [n, H] in float32: q [n, H, D], k and v [s, Hkv, D], seen bool [n, s]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * (scale or q.shape[2] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, q.shape[0], 1)], -1)
    weights = scores.softmax(-1).nan_to_num()[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1).T


def causal_mask(n: int, s: int, window: int = 0) -> Tensor:
    """Returns bool [n, s]: the last n of s positions see at most `window` keys up to themselves."""
    query, key = torch.arange(s - n, s)[:, None], torch.arange(s)
    return (key <= query) & (key > query - window if window else torch.ones(1, dtype=torch.bool))


def tree_sees(tree: DraftTree, prefix: int) -> Tensor:
    """Returns bool [n, prefix + n]: nodes see the prefix and their ancestors."""
    ones = torch.ones(tree.num_nodes, prefix, dtype=torch.bool)
    return torch.cat([ones, placed(torch.from_numpy(tree.mask))], 1)


def random_trees(sizes: list[int], seed: int = 0) -> list[DraftTree]:
    rng = np.random.default_rng(seed)
    return [random_tree(rng, n) for n in sizes]


@dataclass
class Pages:
    """Random K and V, whole and in shuffled pages."""

    k: list[Tensor]  # [s, Hkv, D]
    v: list[Tensor]  # [s, Hkv, Dv]
    k_cache: Tensor  # [pages, page_size, Hkv, D]; NaN elsewhere
    v_cache: Tensor
    pages: list[list[int]]

    @classmethod
    def random(
        cls, lens: list[int], page_size: int, heads: int, dim: int, dtype: torch.dtype, dim_v: int | None = None
    ) -> Pages:
        with torch.device("cpu"):
            k, v, k_cache, v_cache, pages = cls._random(lens, page_size, heads, (dim, dim_v or dim), dtype)
        return cls([placed(x) for x in k], [placed(x) for x in v], placed(k_cache), placed(v_cache), pages)

    @staticmethod
    def _random(lens: list[int], page_size: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> tuple:
        generator = torch.Generator().manual_seed(0)
        counts = [-(-s // page_size) for s in lens]
        order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        caches = [torch.full((len(order), page_size, heads, dim), torch.nan, dtype=dtype) for dim in dims]
        rows: list[list[Tensor]] = [[], []]
        pages = []
        for s, count in zip(lens, counts, strict=True):
            pages.append([order.pop() for _ in range(count)])
            for side in range(2):
                values = torch.randn(s, heads, dims[side], generator=generator).to(dtype)
                rows[side].append(values)
                positions = torch.arange(s)
                caches[side][
                    torch.tensor(pages[-1], dtype=torch.int64)[positions // page_size], positions % page_size
                ] = values
        return *rows, *caches, pages

    def table(self) -> Tensor:
        """Returns int32 [B, max_pages], padded with invalid pages."""
        table = torch.full((len(self.pages), max(map(len, self.pages), default=0) + 1), -7, dtype=torch.int32)
        for b, pages in enumerate(self.pages):
            table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return table


def close(out: Tensor, expected: Tensor) -> None:
    """Asserts closeness within `out`'s precision."""
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[out.dtype]
    torch.testing.assert_close(out.float(), expected.to(out.device), atol=tolerance, rtol=tolerance)
