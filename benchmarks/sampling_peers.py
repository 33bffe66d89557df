"""What users of a GPU call to sample a token for each row of logits, with the packages or without (carried.py).

Peers of `sample`: FlashInfer and its kernels through ctypes, vLLM's Gumbel sampler in Triton.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch
from carried import carried, loaded_by
from suite import package
from torch import Tensor

if TYPE_CHECKING:
    from verify_peers import Verification

SEED = 1
SOFTMAX_SLICE, SOFTMAX_SLICE_BYTES = 8192, 8  # what FlashInfer's softmax notes of a part of a row


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(carried("flashinfer_sampling.so")))


class RowSampler:
    """A way to sample every row; `draw` gives a token for each."""

    owner: str

    def __init__(self, verification: Verification) -> None:
        self.rule, self.problem = verification.rule, verification.problem
        if (params := self.rule.params) is None:
            raise ValueError(f"{self.owner} sampler is not for greedy")
        self.temperature = params.get("temperature", 1.0)
        self.top_k, self.top_p = params.get("top_k", 0), params.get("top_p", 1.0)

    def draw(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def run(self, copy: int) -> Tensor:
        return self.draw(self.problem.logits[copy])

    def check(self) -> None:
        self.rule.check(self.problem, lambda logits, row: self.draw(logits.contiguous()), self.owner)


class FlashInferSampling(RowSampler):
    """FlashInfer's sampling of every row, from probabilities, which its softmax makes first."""

    name, owner = "FlashInfer", "FlashInfer's"
    absent = staticmethod(package("flashinfer", "cuda"))

    def draw(self, logits: Tensor) -> Tensor:
        sampling = importlib.import_module("flashinfer").sampling
        probs = sampling.softmax(logits.contiguous(), temperature=self.temperature)
        if self.top_k:
            return sampling.top_k_top_p_sampling_from_probs(probs, self.top_k, self.top_p)
        if self.top_p < 1:
            return sampling.top_p_sampling_from_probs(probs, self.top_p)
        return sampling.sampling_from_probs(probs)


class FlashInferSamplingKernels(RowSampler):
    """FlashInfer's Gumbel race over logits; under a filter its softmax, then a draw from probabilities by rejection."""

    name, owner = "FlashInfer's sampling kernels", "FlashInfer's"
    absent = staticmethod(loaded_by(library))

    def __init__(self, verification: Verification) -> None:
        super().__init__(verification)
        if self.top_k and self.top_p == 1:
            raise ValueError("top-k is compiled beside top-p only")
        self.library = library()

    def draw(self, logits: Tensor) -> Tensor:
        tokens = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        if self.top_p < 1:
            self.draw_filtered(self.probabilities(logits), tokens)
        elif self.temperature == 1 and logits.dtype == torch.bfloat16:
            self.call("from_logits_bf16", logits, tokens, *logits.shape, ctypes.c_uint64(SEED))
        else:  # its kernel knows no temperature
            scaled = torch.empty(logits.shape, device=logits.device)
            torch.div(logits, self.temperature, out=scaled)
            self.call("from_logits", scaled, tokens, *logits.shape, ctypes.c_uint64(SEED))
        return tokens

    def probabilities(self, logits: Tensor) -> Tensor:
        rows, vocab = logits.shape
        work_bytes = rows * -(-vocab // SOFTMAX_SLICE) * SOFTMAX_SLICE_BYTES + 256
        work = torch.empty(work_bytes, dtype=torch.uint8, device=logits.device)
        probs = torch.empty(logits.shape, device=logits.device)
        temperature, size = ctypes.c_float(self.temperature), ctypes.c_uint64(work_bytes)
        self.call("softmax", logits.float(), probs, rows, vocab, temperature, work, size)
        return probs

    def draw_filtered(self, probs: Tensor, tokens: Tensor) -> None:
        valid = torch.empty(tokens.shape, dtype=torch.bool, device=tokens.device)
        top_p, seed = ctypes.c_float(self.top_p), ctypes.c_uint64(SEED)
        if self.top_k:
            self.call("top_k_top_p", probs, tokens, valid, *probs.shape, self.top_k, top_p, seed)
        else:
            self.call("top_p", probs, tokens, valid, *probs.shape, top_p, seed)

    def call(self, name: str, *arguments: Any) -> None:
        passed = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
        stream = torch.cuda.current_stream().cuda_stream if self.problem.device.type == "cuda" else 0
        status = getattr(self.library, f"flashinfer_{name}")(*passed, ctypes.c_void_p(stream))
        if status:
            raise RuntimeError(f"flashinfer_{name}: cudaError_t {status}")


class VllmGumbel(RowSampler):
    """vLLM's sampler of model runner V2, which has no filter."""

    name, owner = "vLLM's Gumbel sampler (Triton)", "vLLM's"
    absent = staticmethod(package("vllm", "cuda"))

    def __init__(self, verification: Verification) -> None:
        super().__init__(verification)
        if self.top_k or self.top_p < 1:
            raise ValueError("temperature only")
        self.sample = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel").gumbel_sample

    def draw(self, logits: Tensor) -> Tensor:
        rows = torch.arange(logits.shape[0], device=logits.device)
        temperatures = torch.full(rows.shape, self.temperature, device=logits.device)
        return self.sample(logits, rows, temperatures, seed=rows, pos=rows, apply_temperature=True, is_drafting=False)


PEERS = [FlashInferSampling, FlashInferSamplingKernels, VllmGumbel]
