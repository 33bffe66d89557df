"""The benchmarks' peers for GPUs, on a CPU: pagedtree's adapters and torch stand in for the packages' functions."""

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

    fails = False

    def flashinfer_plan_bytes(self) -> int:
        return 8

    def flashinfer_last_error(self) -> bytes:
        return b"no such thing"

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
        return int(self.fails)

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
        rows_of(probs, rows, vocab).copy_(SAMPLING.softmax(rows_of(logits, rows, vocab), temperature.value))
        return 0

    def flashinfer_from_logits(self, logits, tokens, rows, vocab, seed, stream) -> int:
        return tell(tokens, draw(rows_of(logits, rows, vocab).softmax(1)))

    def flashinfer_from_logits_bf16(self, logits, tokens, rows, vocab, seed, stream) -> int:
        return tell(tokens, draw(rows_of(logits, rows, vocab, ctypes.c_int16).float().softmax(1)))

    def flashinfer_top_p(self, probs, tokens, valid, rows, vocab, top_p, seed, stream) -> int:
        kept = SAMPLING.top_p_sampling_from_probs(rows_of(probs, rows, vocab), top_p.value)
        return tell(tokens, kept)

    def flashinfer_top_k_top_p(self, probs, tokens, valid, rows, vocab, top_k, top_p, seed, stream) -> int:
        kept = SAMPLING.top_k_top_p_sampling_from_probs(rows_of(probs, rows, vocab), top_k, top_p.value)
        return tell(tokens, kept)


def rows_of(pointer, rows, vocab, ctype=ctypes.c_float) -> Tensor:
    return at(pointer, ctype, rows * vocab).view(rows, vocab)


def tell(tokens, drawn) -> int:
    at(tokens, ctypes.c_int32, drawn.numel()).copy_(drawn)
    return 0


def gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting) -> Tensor:
    assert apply_temperature and not is_drafting and seed.unique().numel() == logits.shape[0]
    return draw((logits.float() / temperature[expanded_idx_mapping, None]).softmax(1)).long()


class FlashMla:
    """DeepSeek's functions: a schedule for one number of rows, and causal attention over rows of 576 in pages of 64."""

    @staticmethod
    def get_mla_metadata(cache_seqlens, rows, kv_heads):
        assert kv_heads == 1
        return ("for", rows), cache_seqlens.clone()

    @staticmethod
    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal
    ):
        batch, n, heads, _ = q.shape
        assert causal and k_cache.shape[1:] == (64, 1, 576) and head_dim_v == 512
        assert tile_scheduler_metadata == ("for", n * heads) and torch.equal(num_splits, cache_seqlens)
        out = q.new_empty(batch * n, heads, head_dim_v)
        offsets = torch.arange(0, batch * n + 1, n)
        unified_attention(
            q=q.flatten(0, 1), k=k_cache, v=k_cache[..., :512], out=out, cu_seqlens_q=offsets, seqused_k=cache_seqlens,
            softmax_scale=softmax_scale, causal=True, block_table=block_table, qq_bias=None, window_size=(-1, -1),
            softcap=0.0,
        )  # fmt: skip
        return out.view(batch, n, heads, head_dim_v), None


class FlashInferMla:
    """FlashInfer's wrapper: compressed and rotated parts as tensors of their own."""

    def __init__(self, workspace: Tensor) -> None:
        pass

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, heads, ckv, kpe, page_size, causal, scale, q, kv):
        assert causal and (ckv, kpe) == (512, 64) and kv_indices.shape == (int(kv_indptr[-1]),)
        self.pages = torch.nn.utils.rnn.pad_sequence(kv_indices.split(kv_indptr.diff().tolist()), batch_first=True)
        self.lengths = {"cu_seqlens_q": qo_indptr, "seqused_k": kv_len_arr, "softmax_scale": scale}

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache):
        out = torch.empty_like(q_nope)
        rows = torch.cat([ckv_cache, kpe_cache], dim=-1).unsqueeze(2)
        unified_attention(
            q=torch.cat([q_nope, q_pe], dim=-1), k=rows, v=rows[..., :512], out=out, causal=True,
            block_table=self.pages, qq_bias=None, window_size=(-1, -1), softcap=0.0, **self.lengths,
        )  # fmt: skip
        return out


@pytest.fixture
def benchmarks(monkeypatch):
    """Imports a file of the benchmarks, with the packages in place."""
    package = ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    package.BatchDecodeWithPagedKVCacheWrapper = Decode
    package.sampling = SAMPLING
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", SimpleNamespace(BatchMLAPagedAttentionWrapper=FlashInferMla))
    monkeypatch.setitem(sys.modules, "flash_mla", FlashMla)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn)
    monkeypatch.setitem(sys.modules, GUMBEL, SimpleNamespace(gumbel_sample=gumbel_sample))
    monkeypatch.setitem(sys.modules, UNIFIED, SimpleNamespace(unified_attention=unified_attention))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(importlib.import_module("flashinfer_kernel"), "library", KernelLibrary)
    monkeypatch.setattr(importlib.import_module("gpu_attention_peers"), "flash_attention_3", lambda: flash_attn)
    monkeypatch.setattr(importlib.import_module("sampling_peers"), "library", SamplingLibrary)
    return importlib.import_module


def attention_problem(benchmarks, **change):
    attention_peers = benchmarks("attention_peers")
    shape = attention_peers.OP.base | {"batch": 3, "length": 300, "heads": "4/2", "head_dim": 128, "tree": "binary 16"}
    return attention_peers, attention_peers.problem_of(shape | change, torch.device("cpu"))


PEERS = [
    "FlashInferTree", "FlashInferCausal", "FlashInferDecode", "FlashInferKernelTree", "FlashInferKernelCausal",
    "FlashAttention", "FlashAttention3", "TritonUnified",
]  # fmt: skip


@pytest.mark.each_value
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


@pytest.mark.parametrize("change", [{"cache": "fp8"}, {"head_dim": 64}, {"dtype": "float16"}], ids=str)
@pytest.mark.parametrize("name", ["FlashInferKernelTree", "FlashAttention3"])
def test_the_compiled_kernels_say_what_they_are_compiled_for(benchmarks, name, change):
    _, problem = attention_problem(benchmarks, **change)
    with pytest.raises(ValueError, match="head size 128 and bfloat16"):
        getattr(benchmarks("gpu_attention_peers"), name)(problem)


def test_errors_of_the_compiled_kernel_are_told(benchmarks, monkeypatch):
    _, problem = attention_problem(benchmarks)
    monkeypatch.setattr(KernelLibrary, "fails", True)
    with pytest.raises(RuntimeError, match="flashinfer_plan: no such thing"):
        benchmarks("gpu_attention_peers").FlashInferKernelTree(problem)


def test_torchs_flash_attention_takes_prompts_without_a_prefix(benchmarks, monkeypatch):
    peers = benchmarks("gpu_attention_peers")
    attention_peers, problem = attention_problem(benchmarks, tree="prefill 64", length=64)
    attention_peers.check(problem, attention_peers.PagedTree(problem), peers.TorchFlashAttention(problem))
    _, problem = attention_problem(benchmarks, tree="prefill 64", length=65)
    with pytest.raises(ValueError, match="without a prefix"):
        peers.TorchFlashAttention(problem)


def test_flashinfer_reads_fp8_caches(benchmarks):
    attention_peers, problem = attention_problem(benchmarks, cache="fp8")
    peers = benchmarks("gpu_attention_peers")
    attention_peers.check(problem, attention_peers.PagedTree(problem), peers.FlashInferTree(problem))


def latent_problem(benchmarks, **change):
    peers = benchmarks("latent_peers")
    shape = peers.OP.base | {"batch": 3, "length": 150, "heads": "4/1", "dtype": "float32"}
    return peers, peers.problem_of(shape | change, torch.device("cpu"))


@pytest.mark.each_value
@pytest.mark.parametrize(
    "change", [{}, {"lengths": "ragged"}, {"tree": "chain 1", "dtype": "bfloat16"}, {"tree": "prefill 70"}], ids=str
)
@pytest.mark.parametrize("name", ["SdpaOnExpandedHeads", "SdpaOnGatheredRows", "FlashMla", "FlashInferMla"])
def test_latent_peers_give_the_ops_result(benchmarks, name, change):
    peers, problem = latent_problem(benchmarks, **change)
    ours, theirs = peers.PagedTree(problem), getattr(peers, name)(problem)
    peers.check(problem, ours, theirs)
    if "tree" not in change:
        theirs.mask = {"tree": "causal", "causal": "tree"}[theirs.mask]
        with pytest.raises(benchmarks("suite").Mismatch):
            peers.check(problem, ours, theirs)


def test_latent_peers_say_what_they_cannot_read(benchmarks, monkeypatch):
    peers, problem = latent_problem(benchmarks, page_size=16)
    with pytest.raises(ValueError, match="pages of 64"):
        peers.FlashMla(problem)
    monkeypatch.setattr(peers, "lacking_memory", lambda needed, device: f"takes {needed}")
    with pytest.raises(ValueError, match="takes"):
        peers.SdpaOnExpandedHeads(problem)
    _, problem = latent_problem(benchmarks, cache="fp8", dtype="bfloat16")
    with pytest.raises(ValueError, match="dtype"):
        peers.FlashMla(problem)
    peers.check(problem, peers.PagedTree(problem), peers.SdpaOnGatheredRows(problem))


def test_latent_rows_count_once(benchmarks):
    _, problem = latent_problem(benchmarks, tree="chain 2", dtype="bfloat16")
    keys, queries = 3 * 150, 3 * 2
    assert problem.v[0].data_ptr() == problem.k[0].data_ptr() and problem.v[0].stride() == problem.k[0].stride()
    assert problem.bytes == keys * 576 * 2 + queries * 4 * (576 + 512) * 2
    assert problem.flops == 2 * 4 * (576 + 512) * 3 * (149 + 150)


def verification(benchmarks, name, **change):
    bench_ops = benchmarks("bench_ops")
    op = next(op for op in bench_ops.OPS if op.name == name)
    return op.problem(op.base | {"batch": 2, "vocab": 500} | change, torch.device("cpu"))


@pytest.mark.parametrize("variant", ["temperature 0.8", "top-p 0.9", "top-k 50, top-p 0.9"])
@pytest.mark.parametrize(
    "module, name",
    [
        ("verify_peers", "FlashInferSampling"),
        ("sampling_peers", "FlashInferSamplingKernels"),
        ("sampling_peers", "VllmGumbel"),
    ],
)
def test_sampling_is_compared_by_its_distribution(benchmarks, module, name, variant):
    torch.manual_seed(0)
    problem = verification(benchmarks, "sample", variant=variant, tree="chain 4")
    peer_of = getattr(benchmarks(module), name)
    if name == "VllmGumbel" and variant != "temperature 0.8":
        with pytest.raises(ValueError, match="temperature only"):
            peer_of(problem)
        return
    peer = peer_of(problem)
    assert peer.run(0).shape == (8,)
    peer.check()
    if name == "FlashInferSampling":
        peer.params = peer.params | {"temperature": 1.0}
    else:
        peer.temperature = 1.0
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
    for change in ({"tree": "binary 5"}, {"tree": "chain 8", "variant": "onehot"}):
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
