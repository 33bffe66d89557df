"""GPU peers of `sample`: FlashInfer, its kernels through ctypes (carried.py), vLLM's Gumbel sampler in Triton."""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from carried import carried, loaded_by
from suite import Way, package, peer
from torch import Tensor

if TYPE_CHECKING:
    from verify_peers import Verification

SEED = 1
SOFTMAX_SLICE, SOFTMAX_SLICE_BYTES = 8192, 8  # FlashInfer's softmax workspace for a part of a row


class Params(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(carried("flashinfer_sampling.so")))


def row_sampler(verification: Verification, draw: Callable[[Tensor, Params], Tensor], whose: str) -> Way:
    """`draw` returns a token for each row."""
    rule, problem = verification.rule, verification.problem
    if rule.params is None:
        raise ValueError(f"{whose} sampler is not for greedy")
    params = Params(**rule.params)

    def check() -> None:
        rule.check(problem, lambda logits, row: draw(logits.contiguous(), params), whose)

    return Way(lambda copy: draw(problem.logits[copy], params), check=check)


@peer("FlashInfer", when=package("flashinfer", "cuda"))
def flashinfer_sampling(verification: Verification) -> Way:
    sampling = importlib.import_module("flashinfer").sampling

    def draw(logits: Tensor, params: Params) -> Tensor:
        probs = sampling.softmax(logits.contiguous(), temperature=params.temperature)
        if params.top_k:
            return sampling.top_k_top_p_sampling_from_probs(probs, params.top_k, params.top_p)
        if params.top_p < 1:
            return sampling.top_p_sampling_from_probs(probs, params.top_p)
        return sampling.sampling_from_probs(probs)

    return row_sampler(verification, draw, "FlashInfer's")


def call(name: str, *arguments: Any) -> None:
    passed = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
    stream = torch.cuda.current_stream().cuda_stream if arguments[0].is_cuda else 0
    status = getattr(library(), f"flashinfer_{name}")(*passed, ctypes.c_void_p(stream))
    if status:
        raise RuntimeError(f"flashinfer_{name}: cudaError_t {status}")


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    rows, vocab = logits.shape
    work_bytes = rows * -(-vocab // SOFTMAX_SLICE) * SOFTMAX_SLICE_BYTES + 256
    work = torch.empty(work_bytes, dtype=torch.uint8, device=logits.device)
    probs = torch.empty(logits.shape, device=logits.device)
    scale, size = ctypes.c_float(temperature), ctypes.c_uint64(work_bytes)
    call("softmax", logits.float(), probs, rows, vocab, scale, work, size)
    return probs


def draw_by_kernels(logits: Tensor, params: Params) -> Tensor:
    tokens = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    if params.top_p < 1:
        probs = probabilities(logits, params.temperature)
        valid = torch.empty(tokens.shape, dtype=torch.bool, device=tokens.device)
        bounds = ctypes.c_float(params.top_p), ctypes.c_uint64(SEED)
        if params.top_k:
            call("top_k_top_p", probs, tokens, valid, *probs.shape, params.top_k, *bounds)
        else:
            call("top_p", probs, tokens, valid, *probs.shape, *bounds)
    elif params.temperature == 1 and logits.dtype == torch.bfloat16:
        call("from_logits_bf16", logits, tokens, *logits.shape, ctypes.c_uint64(SEED))
    else:  # its kernel has no temperature
        scaled = torch.empty(logits.shape, device=logits.device)
        torch.div(logits, params.temperature, out=scaled)
        call("from_logits", scaled, tokens, *logits.shape, ctypes.c_uint64(SEED))
    return tokens


@peer("FlashInfer's sampling kernels", when=loaded_by(library))
def flashinfer_sampling_kernels(verification: Verification) -> Way:
    """A Gumbel race over logits; with a filter the softmax, then rejection from probabilities."""
    params = verification.rule.params or {}
    if params.get("top_k") and params.get("top_p", 1.0) == 1:
        raise ValueError("top-k is compiled beside top-p only")
    return row_sampler(verification, draw_by_kernels, "FlashInfer's")


@peer("vLLM's Gumbel sampler (Triton)", when=package("vllm", "cuda"))
def vllm_gumbel(verification: Verification) -> Way:
    """Runner V2's sampler; its filters (Qrita, arXiv 2602.01518) read scaled logits."""
    sample = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel").gumbel_sample
    kept = importlib.import_module("vllm.v1.sample.ops.topk_topp_triton").apply_top_k_top_p_triton

    def draw(logits: Tensor, params: Params) -> Tensor:
        rows = torch.arange(logits.shape[0], device=logits.device)
        temperatures = torch.full(rows.shape, params.temperature, device=logits.device)
        is_filtered = params.top_k > 0 or params.top_p < 1
        if is_filtered:
            top_k = torch.full_like(rows, params.top_k, dtype=torch.int32) if params.top_k else None
            top_p = torch.full_like(temperatures, params.top_p) if params.top_p < 1 else None
            logits = kept(logits.float() / params.temperature, top_k, top_p)
        return sample(
            logits, rows, temperatures, seed=rows, pos=rows, apply_temperature=not is_filtered, is_drafting=False
        )

    return row_sampler(verification, draw, "vLLM's")


PEERS = (flashinfer_sampling, flashinfer_sampling_kernels, vllm_gumbel)
