"""Request options: changes to logits by the verify ops and `sample`, before temperature and filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedtree._arguments import expect_type, refusal
from pagedtree.bits import packed
from pagedtree.sampling_params import SamplingParams

__all__ = ["CHANGES_LOGITS", "OptionRows", "RequestOptions", "option_arguments"]

# Fields that change logits; the others refine them.
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
CHANGES_LOGITS = (*_PENALTIES, "allowed_mask", "bias_tokens", "bad_tokens", "stop_ids")


@dataclass(frozen=True, eq=False)
class RequestOptions:
    """The options of B requests (masks, biases, bad words, penalty counts) as device tensors; None: not used.

    Exact on trees: the distribution at node n is plain decoding's after n's path. Rows may be strided. Ids out of range
    and offsets that do not ascend are ignored. Tensors may change between graph replays.

    Attributes:
        prompt_mask: int32 [B, ceil(V / 32)]; bit x % 32 of word x // 32: token x is in the prompt.
        output_counts: int32 [B, V], how often each token was generated, the root included; `commit` advances it.
        allowed_mask: int32 [B, ceil(V / 32)]; tokens whose bit is not set are forbidden.
        bias_tokens, bias_values: int32 [M], float32 [M], added to logits; -inf forbids, NaN is ignored. A token that is
            listed twice gets both. cu_bias: int32 [B + 1], the offsets of the sequences' entries.
        bad_tokens: int32 [M], the tokens of all bad words. cu_bad_words: int32 [K + 1], the words' offsets in it.
            cu_bad_seqs: int32 [B + 1], the sequences' offsets in the words.
        history: int64 [B, L], the text so far, the root included, which bad words match together with the path; None:
            the path alone. history_lens: int32 [B], its lengths. history_start: int32 [B], where matching begins; None:
            0, as in transformers (in vLLM after the prompt).
        stop_ids: int32 [B, S], -1: none; forbidden at rows that predict a position below min_position, int64 [B].
            Node n predicts positions[b] + depth + 1, a row of `sample` its positions[r] + 1.

    Changes to a row of logits, for node n of sequence b (a row of `sample` is a root):

        path = the draft tokens from below the root to n
        text = history[b, history_start[b] : history_lens[b]] + path
        logits[x] = -inf where allowed_mask[b], or the op's grammar_mask, forbids x
        logits[word[-1]] = -inf for each bad word of b with text ending in word[:-1]
        if positions[b] + depth + 1 < min_position[b], unless no other token would then have a finite logit at the end:
            logits[stop_ids[b]] = -inf
        logits[x] += bias
        count = output_counts[b] + the counts of path
        if count[x] > 0 or x in prompt:
            logits[x] = logits[x] / repetition if logits[x] > 0 else logits[x] * repetition
        logits[x] -= frequency * count[x]
        logits[x] -= presence * (count[x] > 0)

    Arithmetic is float32 for any dtype; -inf stays -inf. Source: the order is vLLM's.
    """

    prompt_mask: Tensor | None = None
    output_counts: Tensor | None = None
    allowed_mask: Tensor | None = None
    bias_tokens: Tensor | None = None
    bias_values: Tensor | None = None
    cu_bias: Tensor | None = None
    bad_tokens: Tensor | None = None
    cu_bad_words: Tensor | None = None
    cu_bad_seqs: Tensor | None = None
    history: Tensor | None = None
    history_lens: Tensor | None = None
    history_start: Tensor | None = None
    stop_ids: Tensor | None = None
    min_position: Tensor | None = None

    def __post_init__(self) -> None:
        for name in _NAMES:
            value = getattr(self, name)
            if value is not None and not isinstance(value, Tensor):
                raise refusal(name, "a Tensor or None", type(value).__name__, TypeError)

    def tensors(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in _NAMES}

    @classmethod
    def from_lists(
        cls,
        vocab: int,
        *,
        prompts: Sequence[Sequence[int]] | None = None,
        outputs: Sequence[Sequence[int]] | None = None,
        allowed: Sequence[Sequence[int] | None] | None = None,
        bias: Sequence[Mapping[int, float] | None] | None = None,
        bad_words: Sequence[Sequence[Sequence[int]] | None] | None = None,
        match_prompts: bool = True,
        stop_ids: Sequence[Sequence[int] | None] | None = None,
        min_positions: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> RequestOptions:
        """Builds the tensors from Python lists with one entry per sequence; None entries: no option for the sequence.

        Args:
            vocab: V, in 1..2^20.
            prompts, outputs: token ids, the root included; with bad_words together the history.
            allowed: the only allowed tokens. bias: added to the logits of tokens.
            bad_words: lists of token ids. match_prompts: whether a bad word may begin in the prompt.
            stop_ids, min_positions: ids forbidden at positions below min_positions; both or neither.

        Raises ValueError for other lengths, ids outside 0..vocab - 1, empty words, NaN biases; TypeError for types.
        """
        lists = {"prompts": prompts, "outputs": outputs, "allowed": allowed, "bias": bias, "bad_words": bad_words}
        batch = _batch_of({**lists, "stop_ids": stop_ids, "min_positions": min_positions})
        _expect_integer("vocab", vocab)
        if not 1 <= vocab <= 2**20:
            raise refusal("vocab", "1..2^20", vocab)
        if (stop_ids is None) != (min_positions is None):
            raise refusal("stop_ids", "together with min_positions", "one of them")
        tensors: dict[str, np.ndarray[Any, Any] | Tensor] = {}
        texts = {
            name: [_ids(f"{name}[{b}]", ids, vocab) for b, ids in enumerate(value)]
            for name, value in (("prompts", prompts), ("outputs", outputs))
            if value is not None
        }
        if prompts is not None:
            tensors["prompt_mask"] = _packed(texts["prompts"], vocab)
        if outputs is not None:
            tensors["output_counts"] = np.stack(
                [np.bincount(ids, minlength=vocab).astype(np.int32) for ids in texts["outputs"]]
                or [np.zeros((0, vocab), np.int32)]
            ).reshape(batch, vocab)
        if allowed is not None:
            all_ids = np.arange(vocab)
            tensors["allowed_mask"] = _packed(
                [all_ids if ids is None else _ids(f"allowed[{b}]", ids, vocab) for b, ids in enumerate(allowed)], vocab
            )
        if bias is not None:
            tensors |= _bias_arrays(bias, vocab)
        if bad_words is not None:
            tensors |= _bad_word_arrays(bad_words, vocab)
            if texts:
                parts = [[of_all[b] for of_all in texts.values()] for b in range(batch)]
                history = [np.concatenate(part) for part in parts]
                tensors["history"] = _padded(history, 0, np.int64)
                tensors["history_lens"] = np.array([len(text) for text in history], np.int32)
                if prompts is not None and not match_prompts:
                    tensors["history_start"] = np.array([len(ids) for ids in texts["prompts"]], np.int32)
        if stop_ids is not None and min_positions is not None:
            stops = [_ids(f"stop_ids[{b}]", [] if s is None else s, vocab) for b, s in enumerate(stop_ids)]
            tensors["stop_ids"] = _padded(stops, -1, np.int32)
            for b, position in enumerate(min_positions):
                _expect_integer(f"min_positions[{b}]", position)
            tensors["min_position"] = np.array(min_positions, np.int64).reshape(batch)
        host_tensors = {name: x if isinstance(x, Tensor) else torch.from_numpy(x) for name, x in tensors.items()}
        return cls(**{name: tensor.to(device) for name, tensor in host_tensors.items()})


_NAMES = tuple(field.name for field in fields(RequestOptions))


def _bias_arrays(bias: Sequence[Mapping[int, float] | None], vocab: int) -> dict[str, np.ndarray[Any, Any]]:
    entries = [_biases(f"bias[{b}]", entry) for b, entry in enumerate(bias)]
    ids = [_ids(f"bias[{b}]", list(entry), vocab) for b, entry in enumerate(entries)]
    values = np.array([float(value) for entry in entries for value in entry.values()])
    with np.errstate(over="ignore"):  # values outside fp32 are infinite
        return {"bias_tokens": _joined(ids), "bias_values": values.astype(np.float32), "cu_bias": _offsets(ids)}


def _bad_word_arrays(lists: Sequence[Sequence[Sequence[int]] | None], vocab: int) -> dict[str, np.ndarray[Any, Any]]:
    names = [f"bad_words[{b}]" for b in range(len(lists))]
    words = [
        [_word(f"{name}[{k}]", word, vocab) for k, word in enumerate(_entries(name, entry))]
        for name, entry in zip(names, lists, strict=True)
    ]
    flat = [word for of_sequence in words for word in of_sequence]
    return {"bad_tokens": _joined(flat), "cu_bad_words": _offsets(flat), "cu_bad_seqs": _offsets(words)}


# One row for each sequence; the others are concatenated lists of different lengths.
_ROWS = ("prompt_mask", "allowed_mask", "stop_ids", "min_position")
_BIAS = ("bias_tokens", "bias_values", "cu_bias")
_BAD_WORDS = ("bad_tokens", "cu_bad_words", "cu_bad_seqs")


class OptionRows:
    """The `RequestOptions` of any of S sequences. Only used options are allocated.

    lists: the text-independent arguments of `RequestOptions.from_lists`, which raises, of S entries each. prompt_lens:
    S lengths; tokens after the prompt are counted. has_counts: whether a sequence has a penalty.

    Attributes:
        is_used: whether a sequence has options.
        idle_row: the number of a sequence without options, for captured steps.
        tail: the most tokens of a text that bad words are compared with.
    """

    def __init__(
        self,
        vocab: int,
        lists: Mapping[str, Sequence[Any]],
        prompt_lens: Sequence[int],
        *,
        has_counts: bool,
        device: torch.device,
    ) -> None:
        self.vocab, self.device, self.has_counts = vocab, device, has_counts
        self.is_used = bool(lists) or has_counts
        self.idle_row = len(prompt_lens)
        idle = {"prompts": [], "min_positions": 0}
        arguments: dict[str, Any] = {name: [*entries, idle.get(name)] for name, entries in lists.items()}
        options = RequestOptions.from_lists(vocab, **arguments) if arguments else RequestOptions()
        self._prompt_lens = self._put(_integers([*prompt_lens, 0]))
        self._rows = {name: self._put(value) for name in _ROWS if (value := getattr(options, name)) is not None}
        self._bias, self._bad_words = _host_tensors(options, _BIAS), _host_tensors(options, _BAD_WORDS)
        words = (word for entry in lists.get("bad_words", ()) for word in entry or ())
        self.tail = max(map(len, words), default=1) - 1
        self._current: tuple[RequestOptions | None, list[int]] | None = None
        self._selected = RequestOptions()

    def of(self, rows: list[int], history: Tensor, lengths: Tensor) -> RequestOptions | None:
        """Returns the options of the sequences with these numbers; None where no sequence has any.

        Rebuilt when the selection changes, with counts from the texts, int64 [B, capacity], of these lengths, int32
        [B]; `commit` advances the counts.
        """
        if not self.is_used:
            return None
        if self._current != (None, rows):
            self._selected, self._current = self._counted(rows, history, lengths), (None, rows)
        return self.with_text(self._selected, history, lengths)

    def select(self, rows: Sequence[int]) -> RequestOptions:
        """Returns the options of the sequences with these numbers, without texts and counts."""
        index = _integers(rows)
        row_index = self._put(index)
        fields = {name: value[row_index] for name, value in self._rows.items()}
        if self.has_counts:
            fields["output_counts"] = torch.zeros((len(rows), self.vocab), dtype=torch.int32, device=self.device)
        if self._bias is not None:
            tokens, values, offsets = self._bias
            parts, cu = _parts(offsets, index)
            fields |= self._named(_BIAS, tokens[parts], values[parts], cu)
        if self._bad_words is not None:
            tokens, word_offsets, offsets = self._bad_words
            words, cu = _parts(offsets, index)
            parts, cu_words = _parts(word_offsets, words)
            fields |= self._named(_BAD_WORDS, tokens[parts], cu_words, cu)
        return RequestOptions(**fields)

    def count(self, options: RequestOptions, history: Tensor, begins: Tensor, lengths: Tensor) -> None:
        """Adds the tokens of each text from begins[b] to lengths[b] - 1 to the counts, if any."""
        if options.output_counts is None:
            return
        places = torch.arange(history.shape[1], device=self.device, dtype=torch.int64)
        counted = (places >= begins[:, None]) & (places < lengths[:, None]) & (history < self.vocab)
        options.output_counts.scatter_add_(1, history.clamp(0, self.vocab - 1), counted.int())

    def with_text(self, options: RequestOptions, history: Tensor, lengths: Tensor) -> RequestOptions:
        return options if self._bad_words is None else replace(options, history=history, history_lens=lengths)

    def buffers(self, batch_size: int) -> RequestOptions | None:
        """Returns options of idle rows with room for any `batch_size` sequences, for captured steps."""
        if not self.is_used:
            return None
        room = {
            name: self._put(torch.zeros_like(values))
            for names, lists in ((_BIAS, self._bias), (_BAD_WORDS, self._bad_words))
            for name, values in zip(names[:2], (lists or ())[:2], strict=False)
        }
        return replace(self.select([self.idle_row] * batch_size), **room)

    def refresh(self, buffers: RequestOptions, rows: list[int], history: Tensor, lengths: list[int]) -> None:
        """Writes the options of these sequences into `buffers`, unless they are there. rows: one for each row of the
        buffers, `idle_row` for idle ones. history: int64 [sequences + 1, capacity]."""
        if self._current is not None and self._current[0] is buffers and self._current[1] == rows:
            return
        text_lengths = self._put(_integers(lengths))
        tensors = self._counted(rows, history[self._put(_integers(rows))], text_lengths).tensors()
        for name, into in buffers.tensors().items():
            value = tensors[name]
            if into is not None and value is not None:
                into[: value.shape[0]].copy_(value)
        self._current = buffers, rows

    def _counted(self, rows: list[int], history: Tensor, lengths: Tensor) -> RequestOptions:
        options = self.select(rows)
        self.count(options, history, self._prompt_lens[self._put(_integers(rows))], lengths)
        return options

    def _named(self, names: tuple[str, ...], *values: Tensor) -> dict[str, Tensor]:
        return {name: self._put(value) for name, value in zip(names, values, strict=True)}

    def _put(self, values: Tensor) -> Tensor:
        return values.to(self.device, non_blocking=True)


def option_arguments(params: SamplingParams, options: RequestOptions | None, device: torch.device) -> dict[str, Tensor]:
    arguments = params.penalties_on(device)
    if options is not None:
        expect_type("options", options, RequestOptions)
        arguments |= options.tensors()
    # Each argument costs time per call, even None.
    return {name: tensor for name, tensor in arguments.items() if tensor is not None}


def _batch_of(given: Mapping[str, Sequence[Any] | None]) -> int:
    sizes: dict[str, int] = {}
    for name, value in given.items():
        if value is None:
            continue
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise refusal(name, "a sequence with one entry per sequence", type(value).__name__, TypeError)
        sizes[name] = len(value)
    if not sizes:
        raise refusal("prompts", "at least one list of options", "none")
    first = next(iter(sizes))
    for name, size in sizes.items():
        if size != sizes[first]:
            raise refusal(name, f"{sizes[first]} entries, as {first} has", size)
    return sizes[first]


def _ids(name: str, ids: Sequence[int], vocab: int) -> np.ndarray[Any, Any]:
    if isinstance(ids, (str, bytes, Mapping)):
        raise refusal(name, "token ids", type(ids).__name__, TypeError)
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError):  # lists of different lengths
        array = np.zeros((0, 0))
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise refusal(name, "token ids", f"{ids!r:.60}", TypeError)
    if array.size and not (array.min() >= 0 and array.max() < vocab):
        bad_id = array[(array < 0) | (array >= vocab)][0]
        raise refusal(name, f"ids in 0..{vocab - 1}", bad_id)
    return array.astype(np.int64)


def _expect_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise refusal(name, "an integer", f"{value!r:.60}", TypeError)
    if not -(2**63) <= int(value) < 2**63:
        raise refusal(name, "an integer of 64 bits", value)


def _entries(name: str, entry: Sequence[Any] | None) -> Sequence[Any]:
    if entry is None:
        return []
    if isinstance(entry, (str, bytes)) or not isinstance(entry, Sequence):
        raise refusal(name, "a sequence or None", type(entry).__name__, TypeError)
    return entry


def _biases(name: str, entry: Mapping[int, float] | None) -> Mapping[int, float]:
    if entry is None:
        return {}
    if not isinstance(entry, Mapping):
        raise refusal(name, "a mapping of token ids to numbers or None", type(entry).__name__, TypeError)
    for token, value in entry.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise refusal(f"{name}[{token!r:.20}]", "a number", f"{value!r:.60}", TypeError)
        if value != value:
            raise refusal(f"{name}[{token!r:.20}]", "a number", "NaN")
    return entry


def _word(name: str, word: Sequence[int], vocab: int) -> np.ndarray[Any, Any]:
    ids = _ids(name, word, vocab)
    if ids.size == 0:
        raise refusal(name, "at least one token", "an empty word")
    return ids


def _packed(rows: Sequence[np.ndarray[Any, Any]], vocab: int) -> Tensor:
    mask = np.zeros((len(rows), vocab), np.bool_)
    for row, ids in zip(mask, rows, strict=True):
        row[ids] = True
    return packed(torch.from_numpy(mask))


def _joined(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int32)


def _offsets(parts: Sequence[Sequence[Any] | np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.cumsum([0, *(len(part) for part in parts)], dtype=np.int32)


def _padded(
    rows: Sequence[np.ndarray[Any, Any]], fill: int, dtype: type[np.signedinteger[Any]]
) -> np.ndarray[Any, Any]:
    out = np.full((len(rows), max((len(row) for row in rows), default=0)), fill, dtype)
    for into, row in zip(out, rows, strict=True):
        into[: len(row)] = row
    return out


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _host_tensors(options: RequestOptions, names: tuple[str, ...]) -> tuple[Tensor, ...] | None:
    tensors = [getattr(options, name) for name in names]
    return None if any(tensor is None for tensor in tensors) else tuple(tensors)


def _parts(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    begins = offsets[rows]
    counts = offsets[rows + 1] - begins
    cu = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    parts = (begins - cu[:-1]).repeat_interleave(counts)
    return parts + torch.arange(parts.shape[0], device="cpu", dtype=torch.int64), cu.int()
