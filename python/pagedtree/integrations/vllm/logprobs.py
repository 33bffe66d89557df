"""Log-probabilities of a step's sampled tokens, in vLLM's form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from pagedtree import RequestOptions, SamplingParams, token_logprobs
from pagedtree.bits import unpacked
from pagedtree.integrations.vllm.limits import MAX_TOP_N
from pagedtree.integrations.vllm.options import is_penalized, known_ids, option_lists, params_of


def sampled_logprobs(
    logits: Tensor,
    tokens: Tensor,
    rows: Tensor,
    top_n: int,
    *,
    mode: str,
    grammar_mask: Tensor | None,
    requests: Sequence[Any],
) -> LogprobsTensors:
    """Returns the sampled tokens' log-probabilities and ranks, and the top_n likeliest tokens of their rows.

    logits: [N, V]. tokens: [B, S], each request's new tokens, then -1. rows: [B, S], each one's row of logits. mode:
    "raw_logprobs", "raw_logits" or "processed_logprobs"; as in vLLM a grammar counts in all, the other options in
    processed ones only. grammar_mask: int32 [N, ceil(V / 32)] or None. requests: vLLM's `CachedRequestState` of the B
    requests.

    Returns vLLM's tensors with B * S rows, 0 for absent tokens.
    """
    present = (tokens.flatten() >= 0).nonzero()[:, 0]
    chosen, chosen_rows = tokens.flatten()[present], rows.flatten()[present]
    mask = grammar_mask[chosen_rows] if grammar_mask is not None else None
    if mode == "raw_logits" or top_n > MAX_TOP_N:
        scores = logits[chosen_rows].float()
        if mask is not None:
            scores.masked_fill_(~unpacked(mask, scores.shape[1]), -math.inf)
        if mode != "raw_logits":
            scores = Sampler.compute_logprobs(scores)
        tensors = Sampler.gather_logprobs(scores, top_n, chosen)
        parts = tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks
    else:
        params, options = None, RequestOptions(allowed_mask=mask)
        if mode == "processed_logprobs":
            params, options = _processed(tokens, present, requests, logits, mask)
        chosen_logprobs, ranks, top, top_values = token_logprobs(
            logits, chosen, rows=chosen_rows, params=params, options=options, top_n=top_n
        )
        _name_forbidden(top)
        ids = torch.cat([chosen[:, None], top], dim=1).int()
        parts = ids, torch.cat([chosen_logprobs[:, None], top_values], dim=1), ranks
    if present.shape[0] < tokens.numel():
        filled = tuple(part.new_zeros((tokens.numel(), *part.shape[1:])) for part in parts)
        for all_rows, part in zip(filled, parts, strict=True):
            all_rows[present] = part
        parts = filled
    return LogprobsTensors(*parts)


def _name_forbidden(top: Tensor) -> None:
    """Pads with forbidden tokens of the lowest ids, as vLLM does, where fewer are allowed than were requested."""
    for row in (top < 0).any(dim=1).nonzero()[:, 0].tolist():
        allowed = set(top[row].tolist())
        forbidden = [token for token in range(top.shape[1]) if token not in allowed]
        absent = top[row] < 0
        top[row, absent] = top.new_tensor(forbidden[: int(absent.sum())])


def _processed(
    tokens: Tensor, present: Tensor, requests: Sequence[Any], logits: Tensor, grammar_mask: Tensor | None
) -> tuple[SamplingParams, RequestOptions]:
    """Returns parameters and options of each token's row, as if each were a sequence with the text before it."""
    vocab, device = logits.shape[1], logits.device
    texts = tokens.tolist()
    row_params, prompts, outputs, chosen = [], [], [], []
    for row, step in ((index // tokens.shape[1], index % tokens.shape[1]) for index in present.tolist()):
        row_params.append(requests[row].sampling_params)
        prompts.append(known_ids(requests[row].prompt_token_ids, vocab))
        outputs.append(requests[row].output_token_ids + texts[row][:step])
        chosen.append(texts[row][step])
    lists = option_lists(row_params, [0] * len(row_params), vocab)
    # token_logprobs has no positions by which stop tokens would be forbidden. A bias does it. One that was chosen all
    # the same was the only token left.
    if lists.pop("min_positions", None) is not None:
        lists.setdefault("bias", [{}] * len(row_params))
        for n, (params, stops) in enumerate(zip(row_params, lists.pop("stop_ids"), strict=True)):
            if len(outputs[n]) < params.min_tokens and chosen[n] not in stops:
                lists["bias"][n] = lists["bias"][n] | dict.fromkeys(stops, -math.inf)
    if "bad_words" in lists or any(is_penalized(params) for params in row_params):
        lists |= {"prompts": prompts, "outputs": outputs, "match_prompts": False}
    options = RequestOptions.from_lists(vocab, **lists, device=device) if lists else RequestOptions()
    if grammar_mask is not None:
        mask = grammar_mask if options.allowed_mask is None else options.allowed_mask & grammar_mask
        options = replace(options, allowed_mask=mask)
    return params_of(row_params, device, greedy_temperature=1.0), options
