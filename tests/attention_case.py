"""Random batches for tests of tree_attention, and the tolerance that the contract names."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from device_case import made_on, to_device
from torch import Tensor

from pagedtree import _C, DraftTree, PreparedAttention, reference, tree_attention
from pagedtree.check.case import Place
from pagedtree.check.cases import instructions_sm90
from pagedtree.testing import backends

CPU = torch.device("cpu")
LAYER_ARGUMENTS = ("q", "k_cache", "v_cache", "sinks", "k_scale", "v_scale", "out")
LAYOUTS = ("nhd", "hnd", "stacked", "packed", "padded", "sparse")


def random_tree(rng: np.random.Generator, num_nodes: int) -> DraftTree:
    return DraftTree([-1, *(int(rng.integers(max(0, i - 5), i)) for i in range(1, num_nodes))])


def mask_words(mask: np.ndarray, words: int) -> Tensor:
    """bool [n, m] -> int32 [n, words]."""
    bits = np.zeros((mask.shape[0], words * 32), dtype=bool)
    bits[:, : mask.shape[1]] = mask
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32).copy())


def paged_cache(pages: int, page_size: int, heads: int, head_dim: int, layout: str) -> Tensor:
    """[pages, page_size, heads, head_dim], a view of `layout`'s memory; "stacked" and "packed" leave room for two."""
    if layout == "nhd":
        return torch.zeros(pages, page_size, heads, head_dim)
    if layout == "hnd":
        return torch.zeros(pages, heads, page_size, head_dim).transpose(1, 2)
    if layout == "stacked":  # vLLM: K and V of a page side by side
        return torch.zeros(pages, 2, page_size, heads, head_dim)[:, 0]
    if layout == "packed":  # vLLM: K and V of a row side by side
        return torch.zeros(pages, page_size, heads, 2 * head_dim)[..., :head_dim]
    front, back = (16, 16) if layout == "padded" else (2, 1)  # "sparse": odd strides
    return torch.zeros(pages, page_size + 1, heads + 2, front + head_dim + back)[:, 1:, 1:-1, front:-back]


def paged_caches(
    pages: int, page_size: int, heads: int, head_dim: int, head_dim_v: int, layout: str
) -> tuple[Tensor, Tensor]:
    """K and V, of one memory where they are alike and `layout` says so."""
    if head_dim != head_dim_v:
        return tuple(paged_cache(pages, page_size, heads, size, layout) for size in (head_dim, head_dim_v))
    k = paged_cache(pages, page_size, heads, head_dim, layout)
    if layout not in ("stacked", "packed"):
        return k, paged_cache(pages, page_size, heads, head_dim, layout)
    offset = page_size * heads * head_dim if layout == "stacked" else head_dim
    return k, k.as_strided(k.shape, k.stride(), offset)


@dataclass
class Case:
    """Arguments of one call; `kinds`: a DraftTree, "causal", or (DraftTree, n) for its last n rows (rectangular)."""

    prefixes: list[int]
    kinds: list[Any]
    page_size: int = 16
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    head_dim_v: int | None = None
    latent: bool = False
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    layout: str = "nhd"
    causal_queries: int = 7
    words: int | None = None
    poison: float | None = None
    padding: int = 0
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def build(self, **options: Any) -> dict[str, Any]:
        with made_on(CPU):
            case = {**self._build(), **options}
        tensors = {name: value for name, value in case.items() if isinstance(value, Tensor)}
        return {**case, **dict(zip(tensors, to_device(tensors.values(), self.device), strict=True))}

    def _build(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed)
        rng = np.random.default_rng(self.seed)
        queries, trees, rows = [], [], []
        for kind in self.kinds:
            if kind == "causal":
                n, tree_len, mask = self.causal_queries, -1, rng.random((self.causal_queries, 32)) < 0.5
            else:
                tree, n = kind if isinstance(kind, tuple) else (kind, kind.num_nodes)
                tree_len, mask = tree.num_nodes, tree.mask[tree.num_nodes - n :]
            queries.append(n)
            trees.append(tree_len)
            rows.append(mask)
        seq_lens = [p + (n if t < 0 else t) for p, n, t in zip(self.prefixes, queries, trees, strict=True)]
        used = [-(-s // self.page_size) for s in seq_lens]
        order = torch.randperm(sum(used) + 3, generator=generator).int()
        page_table = torch.full((len(seq_lens), max(used, default=0) + 2), -7, dtype=torch.int32)
        for b, count in enumerate(used):
            page_table[b, :count] = order[sum(used[:b]) : sum(used[:b]) + count]

        heads, kv_heads = self.heads
        head_dim_v = self.head_dim_v or self.head_dim
        total = sum(queries) + self.padding
        q = torch.randn(total, heads, self.head_dim, generator=generator).to(self.dtype)
        stored = self.cache_dtype or self.dtype
        k_cache, v_cache = (
            view.to(stored) if self.layout == "nhd" else _cast_view(view, stored)
            for view in paged_caches(len(order), self.page_size, kv_heads, self.head_dim, head_dim_v, self.layout)
        )
        if self.latent:
            v_cache = k_cache[..., :head_dim_v]
        for cache in (k_cache,) if self.latent else (k_cache, v_cache):
            values = torch.randn(cache.shape, generator=generator)
            if self.poison is not None:
                values[self._free_slots(values.shape[:2], page_table, seq_lens)] = self.poison
            cache.copy_(values.to(stored))
        words = self.words or max(1, *(-(-max(t, 32) // 32) for t in (*trees, 1)))
        mask = torch.zeros(total, words, dtype=torch.int32)
        if rows:
            mask[: sum(queries)] = torch.cat([mask_words(m[:, : words * 32], words) for m in rows])
        cu = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32)
        return {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "page_table": page_table,
            "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
            "cu_seqlens_q": cu,
            "tree_mask": mask,
            "tree_lens": torch.tensor(trees, dtype=torch.int32),
        }

    def _free_slots(self, shape: torch.Size, page_table: Tensor, seq_lens: list[int]) -> Tensor:
        """bool [pages, page_size]: the slots that no sequence holds."""
        free = torch.ones(shape, dtype=torch.bool)
        for b, s in enumerate(seq_lens):
            positions = torch.arange(s)
            free[page_table[b].long()[positions // self.page_size], positions % self.page_size] = False
        return free


def _cast_view(view: Tensor, dtype: torch.dtype) -> Tensor:
    """The view in another dtype with the same strides."""
    size = sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True)) + 1
    return torch.zeros(size, dtype=dtype).as_strided(view.shape, view.stride(), 0)


TARGETS = [("cpu", isa) for isa in _C.available_isas()]
TARGETS += [("simt", ""), ("simt", "wgmma"), ("cuda", "")]
if "HOST_CUDA" not in os.environ and instructions_sm90.absent(Place(torch.device("cuda"), "cuda")) is None:
    TARGETS += [("cuda", "wgmma")]
TARGETS = [target for target in TARGETS if target[0] in backends()]


def target_id(target: tuple[str, str]) -> str:
    return "-".join(filter(None, target))


_BEST = {backend: (backend, variant) for backend, variant in TARGETS if variant != "wgmma"}.values()
# For what hardly depends on instructions: in the core suite `target` has the CPU's best set and the default engine.
once_per_backend = pytest.mark.parametrize(
    "target",
    [pytest.param(target, marks=[] if target in _BEST else pytest.mark.slow) for target in TARGETS],
    ids=target_id,
    indirect=True,
)


@dataclass(frozen=True)
class Target:
    """What a test of attention runs on: a backend with one of its instruction sets, or with an engine."""

    backend: str
    variant: str
    device: torch.device

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        halves = (torch.float16, torch.bfloat16)
        return (torch.float32, *halves) if self.backend == "cpu" else halves

    @property
    def layouts(self) -> tuple[str, ...]:
        return LAYOUTS if self.backend == "cpu" else LAYOUTS[:-1]

    @property
    def tolerance(self) -> dict[str, float]:
        """The tolerance between two ways to the same result in `dtypes[0]`."""
        return {"atol": 1e-6, "rtol": 1e-5} if self.backend == "cpu" else {"atol": 1e-3, "rtol": 2e-3}

    def case(self, prefixes: list[int], kinds: list[Any], **options: Any) -> Case:
        """A Case for this target. Skips the test where the target does not take the dtype or the layout."""
        dtype = options.setdefault("dtype", self.dtypes[0])
        if dtype not in self.dtypes or options.get("layout", "nhd") not in self.layouts:
            pytest.skip(f"{self.backend} does not take {dtype}, layout {options.get('layout')}")
        if self.variant == "wgmma":  # which is for more than 32 rows; these heads give tiles of 64 and of 128
            options.setdefault("heads", (10, 2) if dtype == torch.float16 else (22, 2))
        return Case(prefixes, kinds, device=self.device, **options)


def rms(x: Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt()) if x.numel() else 0.0


def sdpa_error(case: dict[str, Any], expected: Tensor) -> float:
    """RMS error of torch SDPA on gathered K and V in the same dtype, each sequence by itself."""
    out = case["q"].new_zeros((*case["q"].shape[:2], case["v_cache"].shape[3]))
    page_size, group = case["k_cache"].shape[1], case["q"].shape[1] // case["k_cache"].shape[2]
    offsets = case["cu_seqlens_q"].tolist()
    for b, s in enumerate(case["seq_lens"].tolist()):
        begin, end = offsets[b], offsets[b + 1]
        if s == 0 or begin == end:
            continue
        words = None if case["tree_mask"] is None else case["tree_mask"][begin:end]
        tree_len = end - begin if case["tree_lens"] is None else int(case["tree_lens"][b])
        seen = reference.visible_keys(s, end - begin, tree_len, words, case.get("window", 0))
        positions = torch.arange(s)
        slots = case["page_table"][b].long()[positions // page_size], positions % page_size
        k, v = (case[c][slots].repeat_interleave(group, 1).transpose(0, 1)[None] for c in ("k_cache", "v_cache"))
        k[:, :, ~seen.any(0)] = v[:, :, ~seen.any(0)] = 0
        query = case["q"][begin:end].transpose(0, 1)[None]
        result = torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=seen)[0].transpose(0, 1)
        out[begin:end] = result.nan_to_num()
    return rms(out - expected)


def on_host(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in case.items()}


def prepared_attention(case: dict[str, Any]) -> Tensor:
    """The call by way of `PreparedAttention`."""
    layer = {name: case[name] for name in LAYER_ARGUMENTS if name in case}
    q, k_cache, v_cache = (layer.pop(name) for name in LAYER_ARGUMENTS[:3])
    step = PreparedAttention(**{name: value for name, value in case.items() if name not in LAYER_ARGUMENTS})
    with torch.inference_mode():
        return step(q, k_cache, v_cache, **layer)


def check(case: dict[str, Any], *, factor: float = 2.0) -> None:
    """tree_attention against the reference: RMS error within `factor` times SDPA's, lse close; both forms the same."""
    out, lse = tree_attention(**case, return_lse=True)
    assert torch.equal(prepared_attention(case), out)
    plain = on_host({k: v for k, v in case.items() if k not in ("plan", "max_seqlen_q")})
    with made_on(CPU):
        _check(out.cpu(), lse.cpu(), plain, factor)


def _digest(plain: dict[str, Any]) -> bytes:
    """Of all that a call is given."""
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
_expected: OrderedDict[bytes, Expected] = OrderedDict()  # the last 128 calls of the reference


def _has_own_tolerance(plain: dict[str, Any]) -> bool:
    """SDPA has no such option, so that it cannot say how exact the result may be."""
    return any(plain.get(name) is not None for name in ("sinks", "k_scale", "v_scale")) or bool(plain.get("softcap"))


def _expectation(plain: dict[str, Any]) -> Expected:
    """What the reference gives, and how far SDPA is off it. Kept: each target is asked for the same."""
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
