"""The options of a vLLM batch's requests, as tensors for pagedtree's ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingType

from pagedtree import RequestOptions, SamplingParams
from pagedtree.integrations.vllm.limits import min_p_of
from pagedtree.integrations.vllm.proposals import padded
from pagedtree.options import OptionRows

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class BatchOptions:
    """Follows vLLM's batch on runner V1. Static options are built once per batch."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self._batch: list[tuple[Any, ...]] | None = None
        self._rows: OptionRows
        self._options: RequestOptions | None = None
        self._params: SamplingParams | None = None
        self._counted: list[int] = []  # how many tokens of each request's output are in output_counts

    def step(self, requests: Sequence[Any]) -> tuple[SamplingParams | None, RequestOptions | None]:
        """Returns parameters and options after the outputs so far, roots included, of vLLM's `CachedRequestState`s.

        The parameters are tensors [B], temperature 0 for greedy requests; None: all take the unmodified argmax.
        """
        batch = [(request.sampling_params, request.num_prompt_tokens, request.req_id) for request in requests]
        texts = [request.output_token_ids for request in requests]
        has_lost = any(len(text) < count for text, count in zip(texts, self._counted, strict=False))
        if has_lost or not is_same_batch(self._batch, batch):
            self._begin(batch, requests)
        options = self._options
        if options is not None and options.output_counts is not None:
            is_counted = [is_penalized(params) for params, *_ in batch]
            new = [text[n:] if on else [] for text, n, on in zip(texts, self._counted, is_counted, strict=True)]
            self._counted = [len(text) if on else 0 for text, on in zip(texts, is_counted, strict=True)]
            history, lengths = padded(new, self.device)
            self._rows.count(options, history, torch.zeros_like(lengths), lengths)
        if options is not None and self._rows.tail:
            tails = [text[-self._rows.tail :] for text in texts]
            options = self._rows.with_text(options, *padded(tails, self.device))
        return self._params, options

    def _begin(self, batch: list[tuple[Any, ...]], requests: Sequence[Any]) -> None:
        batch_params = [params for params, *_ in batch]
        prompts = None
        if any(map(is_penalized, batch_params)):
            prompts = [
                known_ids(request.prompt_token_ids, self.vocab_size) if is_penalized(params) else []
                for request, params in zip(requests, batch_params, strict=True)
            ]
        self._rows = option_rows(batch, self.vocab_size, self.device, prompts)
        self._options = self._rows.select(range(len(batch))) if self._rows.is_used else None
        is_plain = self._options is None and all(map(_is_greedy, batch_params))
        self._params = None if is_plain else params_of(batch_params, self.device)
        self._batch, self._counted = batch, [0] * len(batch)


def is_same_batch(old: Sequence[tuple[Any, ...]] | None, new: Sequence[tuple[Any, ...]]) -> bool:
    """Returns whether these are the same requests in the same order. Parameters are compared by identity."""
    if old is None or len(old) != len(new):
        return False
    return all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(old, new, strict=True))


def option_rows(
    batch: Sequence[tuple[Any, ...]],
    vocab_size: int,
    device: torch.device,
    prompts: Sequence[Sequence[int]] | None = None,
) -> OptionRows:
    """Returns the options of requests given as (parameters, length of the prompt, ...). prompts: the tokens that
    penalties count; None where nothing is counted here."""
    prompt_lens = [length for _, length, *_ in batch]
    lists = option_lists([params for params, *_ in batch], prompt_lens, vocab_size)
    if prompts is not None:
        lists["prompts"] = prompts
    return OptionRows(vocab_size, lists, prompt_lens, has_counts=prompts is not None, device=device)


def params_of(given: Sequence[Any], device: torch.device, *, greedy_temperature: float = 0.0) -> SamplingParams:
    """Returns pagedtree's parameters, tensors [R]; penalties only if some request has one."""
    columns: dict[str, list[float]] = {
        "temperature": [greedy_temperature if _is_greedy(params) else params.temperature for params in given],
        "top_p": [params.top_p for params in given],
        "min_p": [min_p_of(params) for params in given],
    }
    if any(map(is_penalized, given)):
        for name in PENALTIES:
            columns[name] = [getattr(params, name) for params in given]
    tensors: dict[str, Any] = {
        name: torch.tensor(values, dtype=torch.float32).to(device) for name, values in columns.items()
    }
    top_k = torch.tensor([max(params.top_k, 0) for params in given], dtype=torch.int32)
    return SamplingParams(top_k=top_k.to(device), **tensors)


def option_lists(given: Sequence[Any], prompt_lens: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """Returns R requests' text-independent options as arguments of `RequestOptions.from_lists`, without unknown ids."""
    lists: dict[str, Any] = {}
    if any(params.allowed_token_ids for params in given):
        lists["allowed"] = [params.allowed_token_ids or None for params in given]
    if any(params.logit_bias for params in given):
        lists["bias"] = [params.logit_bias or {} for params in given]
    if any(params.bad_words_token_ids for params in given):
        lists["bad_words"] = [
            [word for word in params.bad_words_token_ids or () if word and max(word) < vocab_size] for params in given
        ]
    if any(params.min_tokens for params in given):
        lists["stop_ids"] = [
            [token for token in params.all_stop_token_ids if token < vocab_size] if params.min_tokens else []
            for params in given
        ]
        lists["min_positions"] = [length + params.min_tokens for params, length in zip(given, prompt_lens, strict=True)]
    return lists


def known_ids(tokens: Sequence[int] | None, vocab_size: int) -> list[int]:
    """Returns a prompt's tokens without placeholders, such as for images."""
    return [token for token in tokens or () if 0 <= token < vocab_size]


def is_penalized(params: Any) -> bool:
    return [getattr(params, name) for name in PENALTIES] != [1.0, 0.0, 0.0]


def _is_greedy(params: Any) -> bool:
    return bool(params.sampling_type == SamplingType.GREEDY)
