"""What the requests of a batch ask for, from the sampling state that runner V2 keeps on the device."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.utils import torch_utils
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from pagedtree import RequestOptions, SamplingParams, Verdict
from pagedtree.bits import unpacked
from pagedtree.integrations.vllm.options import BatchSampling, option_lists

__all__ = ["DeviceSampling"]


class DeviceSampling:
    """Sampling, options and log-probabilities of V2's batches. Nothing is read from the device.

    sampler: vLLM's, whose state it shares.
    """

    def __init__(self, sampler: Any, device: torch.device) -> None:
        self.sampler, self.device = sampler, device
        self.vocab_size: int = sampler.sampling_states.vocab_size
        self._given: dict[int, Any] = {}  # by slot, vLLM's SamplingParams
        # The options that do not change with the texts, of which parameters, and the longest bad word.
        self._listed: tuple[list[Any], RequestOptions | None, int] = [], None, 0

    def add_request(self, slot: int, params: Any) -> None:
        self._given[slot] = params

    def seeds(self, batch: Any) -> Tensor:
        """int64 [R]; requests without a seed have got one by vLLM."""
        return self.sampler.sampling_states.seeds.gpu.index_select(0, batch.idx_mapping)

    def step(self, batch: Any) -> BatchSampling:
        """Returns the sampling and options behind the requests' outputs so far, the roots included.

        batch: vLLM's InputBatch.
        """
        states, penalties = self.sampler.sampling_states, self.sampler.penalties_state
        slots, slots_np = batch.idx_mapping, batch.idx_mapping_np
        has_penalties = bool(penalties.use_penalty[slots_np].any())
        options, longest = self._options(slots_np)
        if options is None and not has_penalties and not states.temperature.np[slots_np].any():
            return BatchSampling(SamplingParams(temperature=0.0), None, is_plain=True)

        def of_batch(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, slots)

        top_k = of_batch(states.top_k.gpu)
        params: dict[str, Any] = {
            name: of_batch(getattr(states, name).gpu) for name in ("temperature", "top_p", "min_p")
        }
        if has_penalties:
            names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
            params |= {name: of_batch(getattr(penalties, name).gpu) for name in names}
            options = replace(
                options or RequestOptions(),
                prompt_mask=of_batch(penalties.prompt_bin_mask),
                output_counts=of_batch(penalties.output_bin_counts),
            )
        if longest > 1:
            assert options is not None
            history, lens = self._tails(slots, longest - 1)
            options = replace(options, history=history, history_lens=lens)
        # vLLM's top_k is the vocabulary where a request has none.
        sampling = SamplingParams(top_k=top_k.masked_fill(top_k == self.vocab_size, 0), **params)
        return BatchSampling(sampling, options, is_plain=False)

    def _options(self, slots: np.ndarray) -> tuple[RequestOptions | None, int]:
        """Those that the requests' lists give, and the length of the longest bad word; built once per batch."""
        given = [self._given[slot] for slot in slots.tolist()]
        known, options, longest = self._listed
        if len(known) == len(given) and all(a is b for a, b in zip(known, given, strict=True)):
            return options, longest
        prompt_lens = self.sampler.req_states.prompt_len.np[slots].tolist()
        lists = option_lists(given, prompt_lens, self.vocab_size)
        options = RequestOptions.from_lists(self.vocab_size, **lists) if lists else None
        if options is not None:
            present = {field.name: getattr(options, field.name) for field in fields(options)}
            options = RequestOptions(
                **{
                    name: torch_utils.async_tensor_h2d(tensor, device=self.device)
                    for name, tensor in present.items()
                    if tensor is not None
                }
            )
        words = [word for params in given for word in params.bad_words_token_ids or ()]
        self._listed = given, options, max(map(len, words), default=0)
        return options, self._listed[2]

    def _tails(self, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The last tokens of each output, at most `length`: int64 [R, length], and int32 [R], how many."""
        req_states = self.sampler.req_states
        texts, ends = req_states.all_token_ids.gpu, req_states.total_len.gpu[slots]
        lens = (ends - req_states.prompt_len.gpu[slots]).clamp(0, length)
        index = (ends - lens)[:, None] + torch.arange(length, device=self.device, dtype=torch.int64)
        return texts[slots[:, None], index.clamp(max=texts.shape[1] - 1)].long(), lens.int()

    def logprobs(
        self, logits: Tensor, batch: Any, verdict: Verdict, grammar_mask: Tensor | None
    ) -> LogprobsTensors | None:
        """Those of the tokens that the batch gets, as vLLM's own samplers give them; None where nobody asks.

        An accepted path is a chain. So vLLM's own functions see its rows as those of a chain of drafts, in which they
        look for the tokens of each request from its first row on.
        """
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
            scores = self.sampler.apply_sampling_params(
                scores, batch.expanded_idx_mapping, batch.idx_mapping, batch.idx_mapping_np,
                batch.positions[queries], batch.input_ids[queries], batch.expanded_local_pos,
                batch.seq_lens_cpu_upper_bound.numpy(),
            )  # fmt: skip
        is_tree = logits.shape[0] != batch.num_reqs
        return compute_topk_scores(
            scores,
            dims[0],
            tokens,
            offsets.clone() if is_tree else None,
            logits_mode=mode in ("raw_logits", "processed_logits"),
        )
