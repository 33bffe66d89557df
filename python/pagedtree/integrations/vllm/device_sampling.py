"""The sampling options of a batch's requests, from the state that runner V2 keeps on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from pagedtree import RequestOptions, SamplingParams, Verdict
from pagedtree.bits import unpacked
from pagedtree.integrations.vllm.options import PENALTIES, is_same_batch, option_rows
from pagedtree.options import OptionRows


class DeviceSampling:
    """Sampling, options and log-probabilities from the state of vLLM's sampler, without reading from the device."""

    def __init__(self, sampler: Any, device: torch.device) -> None:
        self.sampler, self.device = sampler, device
        self.vocab_size: int = sampler.sampling_states.vocab_size
        self._given: dict[int, Any] = {}  # by slot, vLLM's SamplingParams
        self._batch: list[tuple[Any, ...]] | None = None
        self._rows: OptionRows
        self._options: RequestOptions | None = None  # text-independent ones

    def add_request(self, slot: int, params: Any) -> None:
        self._given[slot] = params

    def seeds(self, batch: Any) -> Tensor:
        """Returns int64 [R]; vLLM has assigned seeds to requests without one."""
        return self.sampler.sampling_states.seeds.gpu.index_select(0, batch.idx_mapping)

    def step(self, batch: Any) -> tuple[SamplingParams | None, RequestOptions | None]:
        """As `options.BatchOptions.step` does. batch: vLLM's InputBatch."""
        states, penalties = self.sampler.sampling_states, self.sampler.penalties_state
        slots, slots_np = batch.idx_mapping, batch.idx_mapping_np
        has_penalties = bool(penalties.use_penalty[slots_np].any())
        self._follow(slots_np)
        options = self._options
        if options is None and not has_penalties and not states.temperature.np[slots_np].any():
            return None, None

        def of_batch(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, slots)

        top_k = of_batch(states.top_k.gpu)
        params: dict[str, Any] = {
            name: of_batch(getattr(states, name).gpu) for name in ("temperature", "top_p", "min_p")
        }
        if has_penalties:
            params |= {name: of_batch(getattr(penalties, name).gpu) for name in PENALTIES}
            options = replace(
                options or RequestOptions(),
                prompt_mask=of_batch(penalties.prompt_bin_mask),
                output_counts=of_batch(penalties.output_bin_counts),
            )
        if options is not None and self._rows.tail:
            options = self._rows.with_text(options, *self._tails(slots, self._rows.tail))
        # vLLM's top_k is the vocabulary where a request has none.
        return SamplingParams(top_k=top_k.masked_fill(top_k == self.vocab_size, 0), **params), options

    def _follow(self, slots: np.ndarray) -> None:
        prompt_lens = self.sampler.req_states.prompt_len.np[slots].tolist()
        batch = [(self._given[slot], length) for slot, length in zip(slots.tolist(), prompt_lens, strict=True)]
        if not is_same_batch(self._batch, batch):
            self._batch, self._rows = batch, option_rows(batch, self.vocab_size, self.device)
            self._options = self._rows.select(range(len(batch))) if self._rows.is_used else None

    def _tails(self, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Returns each output's last tokens, at most `length`: int64 [R, length], and int32 [R], how many."""
        req_states = self.sampler.req_states
        texts, ends = req_states.all_token_ids.gpu, req_states.total_len.gpu[slots]
        lens = (ends - req_states.prompt_len.gpu[slots]).clamp(0, length)
        index = (ends - lens)[:, None] + torch.arange(length, device=self.device, dtype=torch.int64)
        return texts[slots[:, None], index.clamp(max=texts.shape[1] - 1)].long(), lens.int()

    def logprobs(
        self, logits: Tensor, batch: Any, verdict: Verdict, grammar_mask: Tensor | None
    ) -> LogprobsTensors | None:
        """Returns the new tokens' log-probabilities, as vLLM's samplers do; None if not requested. vLLM's functions see
        an accepted path as a chain from the request's first row on."""
        dims = self.sampler.get_logprobs_dims(batch.idx_mapping_np, include_token_ids=False)
        if dims is None:
            return None
        local, offsets = batch.expanded_local_pos.long(), batch.cu_num_logits
        counts = offsets[1:] - offsets[:-1]
        request = torch.arange(batch.num_reqs, device=self.device, dtype=torch.int64)
        request = request.repeat_interleave(counts, output_size=logits.shape[0])
        step = local.clamp(max=verdict.tokens.shape[1] - 1)
        tokens = verdict.tokens[request, step].clamp(min=0)
        rows = offsets[request] + verdict.accept_index[request, step].clamp(min=0)
        scores = logits[rows]
        if grammar_mask is not None:
            scores.masked_fill_(~unpacked(grammar_mask[rows], self.vocab_size), -torch.inf)
        mode = self.sampler.logprobs_mode
        if mode in PROCESSED_LOGPROBS_MODES:
            queries = batch.logits_indices[rows]
            slots = batch.expanded_idx_mapping, batch.idx_mapping, batch.idx_mapping_np
            texts = batch.positions[queries], batch.input_ids[queries], batch.expanded_local_pos
            lens = batch.seq_lens_cpu_upper_bound.numpy()
            scores = self.sampler.apply_sampling_params(scores, *slots, *texts, lens)
        is_tree = logits.shape[0] != batch.num_reqs
        return compute_topk_scores(
            scores,
            dims[0],
            tokens,
            offsets.clone() if is_tree else None,
            logits_mode=mode in ("raw_logits", "processed_logits"),
        )
