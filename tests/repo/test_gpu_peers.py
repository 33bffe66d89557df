"""The calls of the peers that only a GPU can time, on a CPU: a run on a GPU is too short to find them broken.

Our adapters stand for FlashInfer's wrappers and FlashAttention, torch for the compiled kernels and for vLLM's.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from pagedtree.integrations import flash_attn, flashinfer

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
UNIFIED = "vllm.v1.attention.ops.triton_unified_attention"
GUMBEL = "vllm.v1.worker.gpu.sample.gumbel"


class Decode(flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    """FlashInfer's decoding: one query per sequence, no offsets of them."""

    def plan(self, indptr: Tensor, *form, **options) -> None:
        super().plan(torch.arange(indptr.shape[0], dtype=torch.int32), indptr, *form, causal=True, **options)


def drawn(probs: Tensor, top_k: int = 1 << 30, top_p: float = 1.0) -> Tensor:
    ordered, ids = probs.sort(dim=1, descending=True)
    ordered[:, top_k:] = 0
    ordered /= ordered.sum(1, keepdim=True)
    ordered[ordered.cumsum(1) - ordered >= top_p] = 0
    return ids.gather(1, torch.multinomial(ordered, 1))[:, 0]


def unified_attention(*, q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, causal, block_table, qq_bias, **options):
    """As vLLM's, in dense fp32: causal, and qq_bias added to the scores between queries."""
    assert causal and options["window_size"] == (-1, -1) and not options["softcap"]
    for b, length in enumerate(seqused_k.tolist()):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        queries = q[rows].float()
        n, pages = queries.shape[0], block_table[b].long()
        keys, values = (cache[pages].flatten(0, 1)[:length].float() for cache in (k, v))
        share = q.shape[1] // k.shape[2]
        keys, values = (x.repeat_interleave(share, dim=1) for x in (keys, values))
        scores = torch.einsum("nhd,lhd->hnl", queries, keys) * softmax_scale
        scores += torch.full((n, length), -torch.inf).triu(length - n + 1)
        if qq_bias is not None:
            scores[:, :, length - n :] += qq_bias
        out[rows] = torch.einsum("hnl,lhd->nhd", scores.softmax(-1), values).to(out.dtype)


def at(pointer, ctype, count) -> Tensor:
    """The numbers that a call of a C library points at."""
    return torch.frombuffer((ctype * count).from_address(pointer.value), dtype=CTYPES[ctype])


CTYPES = {
    ctypes.c_int32: torch.int32,
    ctypes.c_uint8: torch.uint8,
    ctypes.c_bool: torch.bool,
    ctypes.c_int16: torch.bfloat16,
    ctypes.c_float: torch.float32,
}


class KernelLibrary:
    """The C functions of flashinfer_kernel.cu, in torch on the CPU."""

    def flashinfer_plan_bytes(self) -> int:
        return 8

    def flashinfer_pack_mask(self, shape, mask, packed, mask_indptr, packed_indptr) -> int:
        batch = shape._obj.batch
        bits, places = (at(p, ctypes.c_int32, batch + 1).tolist() for p in (mask_indptr, packed_indptr))
        pairs, target = at(mask, ctypes.c_bool, bits[-1]), at(packed, ctypes.c_uint8, places[-1])
        for b in range(batch):
            mine = pairs[bits[b] : bits[b + 1]]
            mine = torch.nn.functional.pad(mine, (0, -mine.numel() % 8)).view(-1, 8)
            target[places[b] : places[b + 1]] = (mine << torch.arange(8)).sum(1).to(torch.uint8)
        return 0

    def flashinfer_plan(self, shape, query_indptr, page_indptr, plan) -> int:
        plan.raw = int(at(page_indptr, ctypes.c_int32, shape._obj.batch + 1)[-1]).to_bytes(8, "little")
        return 0

    def flashinfer_run(
        self, shape, plan, q, k, v, out, queries, pages, indices, last, packed, packed_indptr, *rest
    ) -> int:
        s, (scale, _) = shape._obj, rest
        queries, pages = (at(p, ctypes.c_int32, s.batch + 1).tolist() for p in (queries, pages))
        assert pages[-1] == int.from_bytes(plan.raw, "little") and queries[-1] == s.num_queries
        indices, last = at(indices, ctypes.c_int32, pages[-1]).long(), at(last, ctypes.c_int32, s.batch).tolist()
        rows = s.num_queries, s.num_heads, 128
        q, out = (at(p, ctypes.c_int16, s.num_queries * s.num_heads * 128).view(rows) for p in (q, out))
        page = s.page_size, s.num_kv_heads, 128
        most = (int(indices.max()) + 1) * s.page_size * s.num_kv_heads * 128
        k, v = (at(p, ctypes.c_int16, most).view(-1, *page) for p in (k, v))
        for b in range(s.batch):
            mine, keys = slice(queries[b], queries[b + 1]), (pages[b + 1] - pages[b] - 1) * s.page_size + last[b]
            n = queries[b + 1] - queries[b]
            if packed.value:
                begin = int(at(packed_indptr, ctypes.c_int32, s.batch + 1)[b])
                words = at(packed, ctypes.c_uint8, begin + -(-n * keys // 8))[begin:]
                seen = (words[:, None] >> torch.arange(8) & 1).flatten()[: n * keys].view(n, keys).bool()
            else:
                seen = torch.ones(n, keys, dtype=torch.bool).tril(keys - n)
            dense = (cache[indices[pages[b] : pages[b + 1]]].flatten(0, 1)[:keys].transpose(0, 1) for cache in (k, v))
            attend = torch.nn.functional.scaled_dot_product_attention
            found = attend(q[mine].transpose(0, 1), *dense, attn_mask=seen, scale=scale.value, enable_gqa=True)
            out[mine] = found.transpose(0, 1)
        return 0


class SamplingLibrary:
    """The C functions of flashinfer_sampling.cu, in torch on the CPU."""

    def flashinfer_softmax(self, logits, probs, rows, vocab, temperature, work, work_bytes, stream) -> int:
        assert work_bytes.value >= rows * 8 * -(-vocab // 8192)
        rows_of(probs, rows, vocab).copy_((rows_of(logits, rows, vocab) / temperature.value).softmax(1))
        return 0

    def flashinfer_from_logits(self, logits, tokens, rows, vocab, seed, stream) -> int:
        return write(tokens, drawn(rows_of(logits, rows, vocab).softmax(1)))

    def flashinfer_from_logits_bf16(self, logits, tokens, rows, vocab, seed, stream) -> int:
        return write(tokens, drawn(rows_of(logits, rows, vocab, ctypes.c_int16).float().softmax(1)))

    def flashinfer_top_p(self, probs, tokens, valid, rows, vocab, top_p, seed, stream) -> int:
        return write(tokens, drawn(rows_of(probs, rows, vocab), top_p=top_p.value))

    def flashinfer_top_k_top_p(self, probs, tokens, valid, rows, vocab, top_k, top_p, seed, stream) -> int:
        return write(tokens, drawn(rows_of(probs, rows, vocab), top_k, top_p.value))


def rows_of(pointer, rows, vocab, ctype=ctypes.c_float) -> Tensor:
    return at(pointer, ctype, rows * vocab).view(rows, vocab)


def write(tokens, values) -> int:
    at(tokens, ctypes.c_int32, values.numel()).copy_(values)
    return 0


def gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting) -> Tensor:
    assert apply_temperature and not is_drafting and seed.unique().numel() == logits.shape[0]
    return drawn((logits.float() / temperature[expanded_idx_mapping, None]).softmax(1))


@pytest.fixture
def benchmarks(monkeypatch):
    """Imports a file of the benchmarks, with the packages in place."""
    package = ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    package.BatchDecodeWithPagedKVCacheWrapper = Decode
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setitem(sys.modules, GUMBEL, SimpleNamespace(gumbel_sample=gumbel_sample))
    monkeypatch.setitem(sys.modules, UNIFIED, SimpleNamespace(unified_attention=unified_attention))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(importlib.import_module("flashinfer_kernel"), "library", KernelLibrary)
    monkeypatch.setattr(importlib.import_module("gpu_attention_peers"), "flash_attention_3", lambda: flash_attn)
    monkeypatch.setattr(importlib.import_module("sampling_peers"), "library", SamplingLibrary)
    return importlib.import_module


WRAPPERS = ["FlashInferTree", "FlashInferCausal", "FlashInferKernelTree", "FlashInferKernelCausal"]


@pytest.mark.parametrize("change", [{"lengths": "ragged"}, {"page_size": 1, "tree": "chain 1"}], ids=str)
@pytest.mark.parametrize("name", [*WRAPPERS, "FlashInferDecode", "FlashAttention", "FlashAttention3", "TritonUnified"])
def test_attention(benchmarks, name, change):
    peers, peer_of = benchmarks("attention_peers"), getattr(benchmarks("gpu_attention_peers"), name)
    shape = peers.OP.base | {"batch": 3, "length": 300, "heads": "4/2", "head_dim": 128, "tree": "binary 16"} | change
    problem = peers.problem_of(shape, torch.device("cpu"))
    if name == "FlashInferDecode" and problem.tree.num_nodes > 1:
        with pytest.raises(ValueError, match="one query"):
            peer_of(problem)
        return
    ours, theirs = peers.PagedTree(problem), peer_of(problem)
    peers.check(problem, ours, theirs)
    if problem.tree.num_nodes > 1:  # a peer with the wrong mask would be noticed
        theirs.mask = {"tree": "causal", "causal": "tree"}[theirs.mask]
        with pytest.raises(benchmarks("suite").Mismatch):
            peers.check(problem, ours, theirs)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("VllmGumbel", "temperature 0.8"),
        ("FlashInferSamplingKernels", "temperature 0.8"),
        ("FlashInferSamplingKernels", "top-p 0.9"),
        ("FlashInferSamplingKernels", "top-k 50, top-p 0.9"),
    ],
)
def test_sampling(benchmarks, name, variant):
    torch.manual_seed(0)
    op = next(op for op in benchmarks("bench_ops").OPS if op.name == "sample")
    shape = op.base | {"batch": 2, "vocab": 500, "variant": variant, "tree": "chain 4"}
    peer = getattr(benchmarks("sampling_peers"), name)(op.problem(shape, torch.device("cpu")))
    assert peer.run(0).shape == (8,)
    peer.check()
    peer.temperature = 1.0
    with pytest.raises(benchmarks("suite").Mismatch):
        peer.check()
