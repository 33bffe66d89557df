"""The benchmarks' peers for GPUs, on a CPU: pagedtree's adapters and torch stand in for the packages' functions."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from pagedtree.integrations import flash_attn, flashinfer

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
UNIFIED = "vllm.v1.attention.ops.triton_unified_attention"


class Decode(flashinfer.BatchPrefillWithPagedKVCacheWrapper):
    """FlashInfer's decoding: one query a sequence, no offsets of them."""

    def plan(self, indptr: Tensor, *form, **options) -> None:
        super().plan(torch.arange(indptr.shape[0], dtype=torch.int32), indptr, *form, causal=True, **options)


def top_k_renorm_probs(probs: Tensor, top_k: int) -> Tensor:
    kept = probs.masked_fill(probs < probs.topk(top_k).values[:, -1:], 0)
    return kept / kept.sum(1, keepdim=True)


def top_p_renorm_probs(probs: Tensor, top_p: float) -> Tensor:
    ordered, ids = probs.sort(dim=1, descending=True, stable=True)
    ordered[ordered.cumsum(1) - ordered >= top_p] = 0
    kept = torch.zeros_like(probs).scatter_(1, ids, ordered)
    return kept / kept.sum(1, keepdim=True)


def draw(probs: Tensor) -> Tensor:
    assert probs.is_contiguous()
    return torch.multinomial(probs, 1)[:, 0].int()


SAMPLING = SimpleNamespace(
    softmax=lambda logits, temperature: (logits.float() / temperature).softmax(1),
    top_k_renorm_probs=top_k_renorm_probs,
    top_p_renorm_probs=top_p_renorm_probs,
    sampling_from_probs=draw,
    top_p_sampling_from_probs=lambda probs, top_p: draw(top_p_renorm_probs(probs, top_p)),
    top_k_top_p_sampling_from_probs=lambda probs, top_k, top_p: draw(
        top_p_renorm_probs(top_k_renorm_probs(probs, top_k), top_p)
    ),
    chain_speculative_sampling=flashinfer.chain_speculative_sampling,
)


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


@pytest.fixture
def benchmarks(monkeypatch):
    """Imports a file of the benchmarks, with the packages in place."""
    package = ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    package.BatchDecodeWithPagedKVCacheWrapper = Decode
    package.sampling = SAMPLING
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setitem(sys.modules, UNIFIED, SimpleNamespace(unified_attention=unified_attention))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def attention_problem(benchmarks, **change):
    attention_peers = benchmarks("attention_peers")
    shape = attention_peers.OP.base | {"batch": 3, "length": 300, "heads": "4/2", "head_dim": 64, "tree": "binary 16"}
    return attention_peers, attention_peers.problem_of(shape | change, torch.device("cpu"))


PEERS = ["FlashInferTree", "FlashInferCausal", "FlashInferDecode", "FlashAttention", "TritonUnified"]


@pytest.mark.parametrize(
    "change",
    [{}, {"lengths": "ragged"}, {"page_size": 256}, {"page_size": 1, "tree": "chain 1"}, {"tree": "prefill 128"}],
    ids=str,
)
@pytest.mark.parametrize("name", PEERS)
def test_attention_peers_give_the_ops_result(benchmarks, name, change):
    attention_peers, problem = attention_problem(benchmarks, **change)
    peer_of = getattr(benchmarks("gpu_attention_peers"), name)
    if name == "FlashInferDecode" and change.get("tree") != "chain 1":
        with pytest.raises(ValueError, match="one query"):
            peer_of(problem)
        return
    ours, theirs = attention_peers.PagedTree(problem), peer_of(problem)
    attention_peers.check(problem, ours, theirs)
    # Rows of a tree see less than causal ones do: a peer with the wrong mask would be noticed.
    if "tree" not in change:
        theirs.mask = {"tree": "causal", "causal": "tree"}[theirs.mask]
        with pytest.raises(benchmarks("suite").Mismatch):
            attention_peers.check(problem, ours, theirs)


@pytest.mark.parametrize("name", ["FlashAttention", "TritonUnified"])
def test_peers_without_fp8_caches_say_so(benchmarks, name):
    _, problem = attention_problem(benchmarks, cache="fp8")
    with pytest.raises(ValueError, match="dtype"):
        getattr(benchmarks("gpu_attention_peers"), name)(problem)


def test_flashinfer_reads_fp8_caches(benchmarks):
    attention_peers, problem = attention_problem(benchmarks, cache="fp8")
    peers = benchmarks("gpu_attention_peers")
    attention_peers.check(problem, attention_peers.PagedTree(problem), peers.FlashInferTree(problem))


def verification(benchmarks, name, **change):
    bench_ops = benchmarks("bench_ops")
    op = next(op for op in bench_ops.OPS if op.name == name)
    return op.problem(op.base | {"batch": 2, "vocab": 500} | change, torch.device("cpu"))


@pytest.mark.parametrize("law", ["temperature 0.8", "top-p 0.9", "top-k 50, top-p 0.9"])
def test_sampling_is_compared_by_its_law(benchmarks, monkeypatch, law):
    torch.manual_seed(0)
    problem = verification(benchmarks, "sample", law=law, tree="chain 4")
    peer = benchmarks("verify_peers").FlashInferSampling(problem)
    assert peer.run(0).shape == (8,)
    peer.check()
    monkeypatch.setattr(SAMPLING, "softmax", lambda logits, temperature: logits.float().softmax(1))
    with pytest.raises(benchmarks("suite").Mismatch):
        peer.check()


def test_verification_of_chains(benchmarks, monkeypatch):
    torch.manual_seed(0)
    problem = verification(benchmarks, "verify_rejection", tree="chain 8")
    peer = benchmarks("ratio_peers").FlashInferChain(problem)
    assert peer.run(0).shape == (2, 8)
    before = problem.problem.params
    peer.check()
    assert problem.problem.params == before
    honest = peer.verify
    monkeypatch.setattr(peer, "verify", lambda *args: [honest(*args)[0] + 1])
    with pytest.raises(benchmarks("suite").Mismatch):
        peer.check()
    for change in ({"tree": "binary 5"}, {"tree": "chain 8", "law": "onehot"}):
        with pytest.raises(ValueError, match="chains"):
            benchmarks("ratio_peers").FlashInferChain(verification(benchmarks, "verify_rejection", **change))


def test_absence_is_told(benchmarks, monkeypatch):
    package = benchmarks("suite").package
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert package("json", "cuda")() == "measured on machines with a GPU"
    assert package("json", "cpu")() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert package("json", "cpu")() == "measured on machines without a GPU"
    assert package("json", "cuda")() is None
    assert package("no_such_package", "cuda")() == "no_such_package is not installed"
