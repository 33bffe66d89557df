"""Ten headline calls: time, bandwidth and rate, next to this machine's measured copy and matmul rates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from pagedtree import (
    DraftTree,
    SamplingParams,
    TreeBatch,
    append_kv,
    attention_plan,
    compact_kv,
    sample,
    tree_attention,
    verify_greedy,
    verify_rejection,
    verify_sampled,
)
from pagedtree.check.case import Measurement, Place

PAGE_SIZE, HEADS, KV_HEADS, DIM, DTYPE = 16, 32, 8, 128, torch.bfloat16


@dataclass(frozen=True)
class Scale:
    batch: int
    keys: int
    prompt: int
    vocab: int
    layers: int
    copied: int  # bytes
    matmul: int
    calls: int  # between two looks at the clock


GPU, HOST = Scale(32, 4096, 2048, 128_256, 32, 1 << 30, 8192, 10), Scale(2, 256, 64, 8000, 2, 1 << 26, 512, 2)


@dataclass(frozen=True)
class Work:
    """A call, with its minimum bytes and flops."""

    call: Callable[[], Any]
    bytes: float
    flops: float = 0.0


def scale_of(place: Place) -> Scale:
    return GPU if place.device.type == "cuda" else HOST


def seconds_of(place: Place, call: Callable[[], Any], calls: int) -> float:
    """Returns a call's time: the median of five runs of `calls` calls, after a warm-up run."""
    call()
    times = []
    for _ in range(5):
        if place.device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(place.device)
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            torch.cuda.synchronize(place.device)
            times.append(begin.elapsed_time(end) / 1e3 / calls)
        else:
            start = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


@lru_cache
def floor_of(place: Place) -> tuple[float, float]:
    """Returns this machine's bytes per second of a copy (read and written) and flops per second of a matmul."""
    scale = scale_of(place)
    source = torch.zeros(scale.copied, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    bandwidth = 2 * scale.copied / seconds_of(place, lambda: target.copy_(source), scale.calls)
    n = scale.matmul
    a = torch.randn(n, n, device=place.device, dtype=torch.float32).to(DTYPE)
    return bandwidth, 2.0 * n**3 / seconds_of(place, lambda: a @ a, scale.calls)


def measurements() -> Iterator[Measurement]:
    yield Measurement("rates/floor", _floor, backends=("cpu", "cuda"))
    for name, make in CALLS.items():
        yield Measurement(f"rates/{name}", partial(_measure, make), backends=("cpu", "cuda"))


def _floor(place: Place) -> tuple[dict[str, float], str]:
    bandwidth, rate = floor_of(place)
    numbers = {"bytes_per_second": bandwidth, "flops_per_second": rate}
    return numbers, f"a copy moves {bandwidth / 1e9:.4g} GB/s, a matmul does {rate / 1e12:.4g} Tflop/s"


def _measure(make: Callable[[Place, Scale], Work], place: Place) -> tuple[dict[str, float], str]:
    bandwidth, rate = floor_of(place)
    scale = scale_of(place)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        work = make(place, scale)
    seconds = seconds_of(place, work.call, scale.calls)
    floor = max(work.bytes / bandwidth, work.flops / rate)
    numbers = {
        "seconds": seconds,
        "bytes": work.bytes,
        "flops": work.flops,
        "bytes_per_second": work.bytes / seconds,
        "flops_per_second": work.flops / seconds,
        "floor_seconds": floor,
        "of_floor": floor / seconds,
    }
    text = f"{seconds * 1e3:.4g} ms, {work.bytes / seconds / 1e9:.4g} GB/s"
    if work.flops:
        text += f", {work.flops / seconds / 1e12:.4g} Tflop/s"
    if place.device.type == "cuda":  # on the host the calls are small, and most of their memory is in caches
        text += f"; the floor of {floor * 1e3:.4g} ms is {floor / seconds:.0%} of it"
    return numbers, text


# The calls ------------------------------------------------------------------------------------------------------------


def _attention(queries: str, *, fp8: bool = False) -> Callable[[Place, Scale], Work]:
    """queries: "decode", "tree" (64 nodes) or "prompt" (causal, without a prefix)."""

    def make(place: Place, scale: Scale) -> Work:
        device, batch, keys = place.device, scale.batch, scale.keys
        tree = DraftTree.full([3, 2, 2, 2, 1]) if queries == "tree" else None
        n = tree.num_nodes if tree else 1
        if queries == "prompt":
            batch, keys, n = 1, scale.prompt, scale.prompt
        pages = -(-keys // PAGE_SIZE)
        cache_dtype = torch.float8_e4m3fn if fp8 else DTYPE
        shape = (batch * pages, PAGE_SIZE, KV_HEADS, DIM)
        k_cache, v_cache = (torch.randn(shape, device=device, dtype=torch.float32).to(cache_dtype) for _ in range(2))
        table = torch.randperm(batch * pages).int().view(batch, pages).to(device)
        seq_lens = torch.full((batch,), keys, dtype=torch.int32, device=device)
        cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=device) * n
        mask = None if tree is None else TreeBatch.from_trees([tree] * batch, device=device).mask
        q = torch.randn(batch * n, HEADS, DIM, device=device, dtype=torch.float32).to(DTYPE)
        plan = attention_plan(
            seq_lens, cu_seqlens_q, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE_SIZE,
            max_seqlen_q=n,
        )  # fmt: skip
        out = torch.empty_like(q)

        def call() -> None:
            tree_attention(q, k_cache, v_cache, table, seq_lens, cu_seqlens_q, mask, max_seqlen_q=n, plan=plan, out=out)

        keys_seen = n * (n + 1) / 2 if queries == "prompt" else n * keys
        moved = 2 * batch * keys * KV_HEADS * DIM * cache_dtype.itemsize + 2 * q.numel() * q.element_size()
        return Work(call, moved, 4.0 * batch * keys_seen * HEADS * DIM)

    return make


def _caches(place: Place, scale: Scale, rows: int, layers: int) -> list[Tensor]:
    shape = (-(-rows // PAGE_SIZE), PAGE_SIZE, KV_HEADS, DIM)
    return [torch.zeros(shape, dtype=DTYPE, device=place.device) for _ in range(2 * layers)]


def _append(place: Place, scale: Scale) -> Work:
    rows = scale.batch * scale.keys // 4
    k_cache, v_cache = _caches(place, scale, rows, 1)
    new = torch.randn(rows, KV_HEADS, DIM, device=place.device, dtype=torch.float32).to(DTYPE)
    slots = torch.randperm(rows).to(place.device)
    return Work(lambda: append_kv(new, new, k_cache, v_cache, slots), 4.0 * new.numel() * new.element_size())


def _compact(place: Place, scale: Scale) -> Work:
    """Compacts 8 accepted of 64 nodes per sequence, in all layers."""
    batch, nodes, device = scale.batch, 64, place.device
    caches = _caches(place, scale, batch * nodes, scale.layers)
    table = torch.arange(batch * nodes // PAGE_SIZE, dtype=torch.int32, device=device).view(batch, -1)
    start = torch.zeros(batch, dtype=torch.int32, device=device)
    path = (torch.arange(9, dtype=torch.int32, device=device) * 7).repeat(batch, 1)
    accepted = torch.full((batch,), 8, dtype=torch.int32, device=device)
    moved = 2.0 * len(caches) * batch * 8 * KV_HEADS * DIM * DTYPE.itemsize
    return Work(lambda: compact_kv(caches, table, start, path, accepted), moved)


def _verification(verify: Callable[..., Any]) -> Callable[[Place, Scale], Work]:
    """Greedy verification of chains of 8 nodes that are all accepted; the bytes count all rows."""

    def make(place: Place, scale: Scale) -> Work:
        batch, nodes, device = scale.batch, 8, place.device
        trees = TreeBatch.from_trees([DraftTree.chain(nodes - 1)] * batch, device=device)
        logits = torch.randn(batch * nodes, scale.vocab, device=device, dtype=torch.float32).to(DTYPE)
        drafts = torch.randint(scale.vocab, (batch * nodes,)).to(device)
        best = logits.argmax(1).view(batch, nodes)
        drafts.view(batch, nodes)[:, 1:] = best[:, :-1]
        at = torch.arange(batch, device=device, dtype=torch.int64)
        given: dict[str, Any] = {}
        if verify is not verify_greedy:
            params = SamplingParams(temperature=0.05, top_k=50, top_p=0.95)
            given = {"params": params, "seeds": at, "positions": at}
        if verify is verify_rejection:
            given |= {"draft_law": "iid", "draft_probs": logits.float().softmax(-1).to(DTYPE)}
        return Work(lambda: verify(logits, drafts, trees, **given), logits.nbytes * (1 + ("draft_probs" in given)))

    return make


def _sample(place: Place, scale: Scale) -> Work:
    rows = scale.batch * 8
    logits = torch.randn(rows, scale.vocab, device=place.device, dtype=torch.float32).to(DTYPE)
    at = torch.arange(rows, device=place.device, dtype=torch.int64)
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
    return Work(lambda: sample(logits, params, seeds=at, positions=at), float(logits.numel() * logits.element_size()))


CALLS: dict[str, Callable[[Place, Scale], Work]] = {
    "attention, decode": _attention("decode"),
    "attention, decode, fp8 cache": _attention("decode", fp8=True),
    "attention, trees": _attention("tree"),
    "attention, a prompt": _attention("prompt"),
    "append_kv": _append,
    "compact_kv, all layers": _compact,
    "verify_greedy": _verification(verify_greedy),
    "verify_sampled, top-k and top-p": _verification(verify_sampled),
    "verify_rejection, top-k and top-p": _verification(verify_rejection),
    "sample, top-k and top-p": _sample,
}
