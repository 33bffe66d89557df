"""The tokens that sequences of `generate` may have, and the `RequestOptions` of the sequences in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedtree import RequestOptions, SamplingParams
from pagedtree.generation.scheduler import GeneratedSequence

__all__ = ["RequestRows", "TokenOptions"]

# One row for each sequence; the others are lists of different lengths, one behind the other.
ROWS = ("prompt_mask", "allowed_mask", "stop_ids", "min_position")


@dataclass(frozen=True)
class TokenOptions:
    """Restricts the tokens that the outcomes of a prompt may have. The penalties are in `SamplingParams`.

    Attributes:
        bias: what is added to the logits of tokens, before penalties and temperature; -inf forbids a token.
        allowed_tokens: the only tokens that may come, EOS tokens included; None = all.
        bad_words: lists of token ids that may not occur; one may also begin in the prompt, as in transformers.
        begin_suppress_tokens: tokens that may not come first.
        penalize_prompt: whether repetition_penalty counts the tokens of the prompt, too.
    """

    bias: Mapping[int, float] | None = None
    allowed_tokens: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    penalize_prompt: bool = True


class RequestRows:
    """The `RequestOptions` of any of the sequences of a call.

    Only what some sequence uses is made. The options of a selection are made when it differs from the one before, its
    counts from the text so far; then `commit` advances them. So a step costs nothing more while the same sequences go
    on, and what an eviction or another kind of step did in between needs no care.

    Args:
        sequences: of the call, with their prompts as tokens.
        options: one for each sequence.
        stop_ids, min_new_tokens: tokens that may not come among the first min_new_tokens, which has one entry per
            sequence.
        params: of the call; its penalties say what has to be counted.
        vocab: columns of the target's logits, of all ranks together.
        device: where the options are made.

    Raises ValueError for ids outside the vocabulary and for what one sequence cannot have together.
    """

    def __init__(
        self,
        sequences: Sequence[GeneratedSequence],
        options: Sequence[TokenOptions],
        stop_ids: Sequence[int],
        min_new_tokens: Sequence[int],
        params: SamplingParams | None,
        vocab: int,
        device: torch.device,
    ) -> None:
        self.vocab, self.device = vocab, device
        self.idle_row = len(sequences)  # of captured steps: asks for nothing
        penalties = _penalties_of(params)
        self._has_counts = bool(penalties)
        self._prompt_lens = torch.tensor([*(len(s.tokens) for s in sequences), 0], device=device, dtype=torch.int64)
        lists: dict[str, Any] = {}
        if "repetition_penalty" in penalties and any(each.penalize_prompt for each in options):
            texts = [s.tokens if each.penalize_prompt else [] for s, each in zip(sequences, options, strict=True)]
            # Some models read more tokens than they predict.
            lists["prompts"] = [[token for token in text if token < vocab] for text in texts] + [[]]
        for name, field in (("allowed", "allowed_tokens"), ("bias", "bias"), ("bad_words", "bad_words")):
            values = [getattr(each, field) for each in options]
            if any(value is not None for value in values):
                lists[name] = [*values, None]
        stop_ids = [token for token in stop_ids if 0 <= token < vocab]
        firsts = [_forbidden_first(each, stop_ids, least) for each, least in zip(options, min_new_tokens, strict=True)]
        if any(least for _, least in firsts):
            lists["stop_ids"] = [*(ids for ids, _ in firsts), None]
            free = [len(s.tokens) + least for s, (_, least) in zip(sequences, firsts, strict=True)]
            lists["min_positions"] = [*free, 0]
        self.is_used = bool(lists) or self._has_counts
        try:
            words = lists.pop("bad_words", None)
            every = RequestOptions.from_lists(vocab, **lists) if lists else RequestOptions()
            bad = RequestOptions.from_lists(vocab, bad_words=words) if words is not None else RequestOptions()
        except (TypeError, ValueError) as error:
            raise type(error)(f"options: {error}") from None
        self._rows = {
            name: value.to(device) for name, value in every.tensors().items() if name in ROWS and value is not None
        }
        self._bias = _numpy(every, "bias_tokens", "bias_values", "cu_bias")
        self._bad_words = _numpy(bad, "bad_tokens", "cu_bad_words", "cu_bad_seqs")
        self._current: tuple[RequestOptions | None, list[int]] | None = None
        self._selected = RequestOptions()

    def of(self, rows: list[int], history: Tensor, lengths: Tensor) -> RequestOptions | None:
        """Returns the options of the sequences with these numbers; None where no sequence has any.

        history: int64 [B, capacity], the text of each. lengths: int32 [B], how much of it there is.
        """
        if not self.is_used:
            return None
        if self._current != (None, rows):
            self._selected, self._current = self._select(rows, history, lengths), (None, rows)
        return self.with_text(self._selected, history, lengths)

    def with_text(self, options: RequestOptions, history: Tensor, lengths: Tensor) -> RequestOptions:
        """Returns `options` with the text that bad words are looked for in."""
        return options if self._bad_words is None else replace(options, history=history, history_lens=lengths)

    def buffers(self, batch_size: int) -> RequestOptions | None:
        """Options of idle rows whose tensors have room for any `batch_size` sequences, for captured steps."""
        if not self.is_used:
            return None
        nothing = torch.zeros((batch_size, 1), dtype=torch.int64, device=self.device)
        made = self._select([self.idle_row] * batch_size, nothing, nothing[:, 0])
        room = {
            name: torch.from_numpy(np.zeros_like(values)).to(self.device)
            for names, lists in ((_BIAS, self._bias), (_BAD_WORDS, self._bad_words))
            for name, values in zip(names[:2], (lists or ())[:2], strict=False)
        }
        return replace(made, **room)

    def refresh(self, buffers: RequestOptions, rows: list[int], history: Tensor, lengths: list[int]) -> None:
        """Writes the options of these sequences into `buffers`, unless they are there.

        rows: one for each row of the buffers, `idle_row` for idle ones. history: int64 [sequences + 1, capacity].
        """
        if self._current is not None and self._current[0] is buffers and self._current[1] == rows:
            return
        known = torch.tensor(lengths, dtype=torch.int32).to(self.device)
        made = self._select(rows, history[torch.tensor(rows, dtype=torch.int64).to(self.device)], known).tensors()
        for name, into in buffers.tensors().items():
            value = made[name]
            if into is not None and value is not None:
                into[: value.shape[0]].copy_(value)
        self._current = buffers, rows

    def _select(self, rows: list[int], history: Tensor, lengths: Tensor) -> RequestOptions:
        index = torch.tensor(rows, dtype=torch.int64).to(self.device)
        made = {name: value[index] for name, value in self._rows.items()}
        if self._has_counts:
            made["output_counts"] = self._count(self._prompt_lens[index], history, lengths)
        if self._bias is not None:
            tokens, values, offsets = self._bias
            parts, cu = _parts(offsets, rows)
            made |= self._to_device(_BIAS, tokens[parts], values[parts], cu)
        if self._bad_words is not None:
            tokens, word_offsets, offsets = self._bad_words
            words, cu = _parts(offsets, rows)
            parts, cu_words = _parts(word_offsets, words)
            made |= self._to_device(_BAD_WORDS, tokens[parts], cu_words, cu)
        return RequestOptions(**made)

    def _count(self, begins: Tensor, history: Tensor, lengths: Tensor) -> Tensor:
        """Returns int32 [B, V]: how often each token was generated."""
        places = torch.arange(history.shape[1], device=self.device, dtype=torch.int64)
        counted = (places >= begins[:, None]) & (places < lengths[:, None]) & (history < self.vocab)
        counts = torch.zeros((history.shape[0], self.vocab), dtype=torch.int32, device=self.device)
        return counts.scatter_add_(1, history.clamp(0, self.vocab - 1), counted.int())

    def _to_device(self, names: tuple[str, ...], *values: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(value).to(self.device, non_blocking=True)
            for name, value in zip(names, values, strict=True)
        }


_BIAS = ("bias_tokens", "bias_values", "cu_bias")
_BAD_WORDS = ("bad_tokens", "cu_bad_words", "cu_bad_seqs")


def _penalties_of(params: SamplingParams | None) -> set[str]:
    """Returns the names of the penalties that are on."""
    if params is None:
        return set()
    return {name for name, value in params.penalties_on(torch.device("cpu")).items() if value is not None}


def _forbidden_first(options: TokenOptions, stop_ids: Sequence[int], least: int) -> tuple[list[int], int]:
    """Returns the tokens that a text may not have among its first ones, and how many those are."""
    first = list(options.begin_suppress_tokens or ())
    if not stop_ids:
        least = 0
    if not first:
        return list(stop_ids), least
    if least > 1 and set(first) != set(stop_ids):
        raise ValueError(
            "begin_suppress_tokens: expected none with min_new_tokens above 1, which forbids other tokens for longer,"
            f" got {first}"
        )
    return sorted({*first, *(stop_ids if least else ())}), max(least, 1)


def _numpy(options: RequestOptions, *names: str) -> tuple[np.ndarray[Any, Any], ...] | None:
    tensors = [getattr(options, name) for name in names]
    return None if any(tensor is None for tensor in tensors) else tuple(tensor.numpy() for tensor in tensors)


def _parts(
    offsets: np.ndarray[Any, Any], rows: Sequence[int] | np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns where the entries of these rows are, one row after the other, and the rows' offsets in them."""
    index = np.asarray(rows, np.int64)
    counts = offsets[index + 1] - offsets[index]
    cu = np.zeros(len(index) + 1, np.int32)
    np.cumsum(counts, out=cu[1:])
    within = np.arange(cu[-1]) - np.repeat(cu[:-1], counts)
    return np.repeat(offsets[index], counts) + within, cu
