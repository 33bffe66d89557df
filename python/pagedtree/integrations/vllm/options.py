"""What the requests of a vLLM batch ask for, in the tensors that pagedtree's ops take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingType

from pagedtree import RequestOptions, SamplingParams
from pagedtree.integrations.vllm.limits import min_p_of

__all__ = ["BatchOptions", "BatchSampling", "is_penalized", "known_ids", "option_lists", "params_of"]


class BatchSampling(NamedTuple):
    """How the tokens of a batch are chosen in one step.

    Attributes:
        params: tensors [B]; temperature 0 where a request is greedy.
        options: None where no request has any.
        is_plain: every request takes the argmax of the logits as they are.
    """

    params: SamplingParams
    options: RequestOptions | None
    is_plain: bool


@dataclass
class _Batch:
    """What stays as it is while the batch has the same requests in the same order.

    Attributes:
        key: what tells one such batch from another.
        sampling: all but what changes with the output.
        penalized: rows of requests with a penalty.
        counted: how many tokens of each request's output are in output_counts.
        worded: rows of requests with bad words.
        tail: the tokens of an output that bad words are compared with, at most.
    """

    key: list[tuple[Any, ...]]
    sampling: BatchSampling
    penalized: list[int]
    counted: list[int]
    worded: list[int]
    tail: int


class BatchOptions:
    """Follows vLLM's batch. Only what requests use is built, and what stays the same is built once per batch.

    vLLM's own tensors of these options are for chains, and some of them it does not keep where there is speculation.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._batch: _Batch | None = None

    def step(self, requests: Sequence[Any]) -> BatchSampling:
        """Returns the sampling and options behind the requests' outputs so far, the roots included.

        requests: vLLM's `CachedRequestState` of each row of the batch.
        """
        # The parameters themselves stand for what is in them: vLLM replaces them where a request gets others.
        key = [(request.req_id, request.sampling_params, request.num_prompt_tokens) for request in requests]
        batch = self._batch
        if batch is None or not _is_same(batch.key, key) or _lost_tokens(batch, requests):
            batch = self._batch = self._begin(key, requests)
        options = batch.sampling.options
        if options is None:
            return batch.sampling
        if options.output_counts is not None:
            self._count(batch, requests, options.output_counts)
        if batch.tail:
            history = np.zeros((len(requests), batch.tail), dtype=np.int64)
            lens = np.zeros(len(requests), dtype=np.int32)
            for row in batch.worded:
                tail = requests[row].output_token_ids[-batch.tail :]
                history[row, : len(tail)], lens[row] = tail, len(tail)
            options = replace(options, history=self._put(history), history_lens=self._put(lens))
        return batch.sampling._replace(options=options)

    def _begin(self, key: list[tuple[Any, ...]], requests: Sequence[Any]) -> _Batch:
        given = [request.sampling_params for request in requests]
        lists = option_lists(given, [request.num_prompt_tokens for request in requests], self.vocab_size)
        penalized = [row for row, params in enumerate(given) if is_penalized(params)]
        options = RequestOptions.from_lists(self.vocab_size, **lists, device=self.device) if lists else None
        if penalized:
            prompts: list[list[int]] = [[] for _ in given]
            for row in penalized:
                prompts[row] = known_ids(requests[row].prompt_token_ids, self.vocab_size)
            options = replace(
                options or RequestOptions(),
                prompt_mask=RequestOptions.from_lists(self.vocab_size, prompts=prompts, device=self.device).prompt_mask,
                output_counts=torch.zeros((len(given), self.vocab_size), dtype=torch.int32, device=self.device),
            )
        worded = [row for row, params in enumerate(given) if params.bad_words_token_ids]
        longest = max((len(word) for row in worded for word in given[row].bad_words_token_ids), default=1)
        is_plain = options is None and all(_is_greedy(params) for params in given)
        sampling = BatchSampling(params_of(given, self.device), options, is_plain)
        return _Batch(key, sampling, penalized, [0] * len(given), worded, longest - 1)

    def _count(self, batch: _Batch, requests: Sequence[Any], counts: Tensor) -> None:
        """Adds what was generated since the last step."""
        rows: list[int] = []
        tokens: list[int] = []
        for row in batch.penalized:
            new = requests[row].output_token_ids[batch.counted[row] :]
            rows += [row] * len(new)
            tokens += new
            batch.counted[row] += len(new)
        if rows:
            index = self._put(np.array([rows, tokens], dtype=np.int64))
            counts.index_put_((index[0], index[1]), counts.new_ones(len(rows)), accumulate=True)

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def params_of(given: Sequence[Any], device: torch.device, *, greedy_temperature: float = 0.0) -> SamplingParams:
    """pagedtree's parameters, tensors [R], of R of vLLM's. Penalties only where a request has one."""
    columns: dict[str, tuple[torch.dtype, list[float]]] = {
        "temperature": (
            torch.float32, [greedy_temperature if _is_greedy(params) else params.temperature for params in given]
        ),
        "top_k": (torch.int32, [max(params.top_k, 0) for params in given]),
        "top_p": (torch.float32, [params.top_p for params in given]),
        "min_p": (torch.float32, [min_p_of(params) for params in given]),
    }  # fmt: skip
    if any(is_penalized(params) for params in given):
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            columns[name] = torch.float32, [getattr(params, name) for params in given]
    tensors: dict[str, Any] = {
        name: torch.tensor(values, dtype=dtype).to(device) for name, (dtype, values) in columns.items()
    }
    return SamplingParams(**tensors)


def option_lists(given: Sequence[Any], prompt_lens: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """All of R requests' options but those that need their texts, as arguments of `RequestOptions.from_lists`.

    vLLM has checked the ids. Those that its tokenizer knows and the model does not are left out.
    """
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
    """A prompt's tokens without those that stand for something else, such as images."""
    return [token for token in tokens or () if 0 <= token < vocab_size]


def is_penalized(params: Any) -> bool:
    """Tells whether vLLM's parameters have a penalty that depends on the text."""
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def _is_greedy(params: Any) -> bool:
    return bool(params.sampling_type == SamplingType.GREEDY)


def _is_same(old: list[tuple[Any, ...]], new: list[tuple[Any, ...]]) -> bool:
    return len(old) == len(new) and all(
        a[0] == b[0] and a[1] is b[1] and a[2] == b[2] for a, b in zip(old, new, strict=True)
    )


def _lost_tokens(batch: _Batch, requests: Sequence[Any]) -> bool:
    """Tells whether vLLM took back output that has been counted."""
    return any(len(requests[row].output_token_ids) < batch.counted[row] for row in batch.penalized)
