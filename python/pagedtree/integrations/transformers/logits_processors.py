"""transformers' logits processors as sampling parameters and token options, which are exact on draft trees."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers.generation import (
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagedtree import SamplingParams
from pagedtree._arguments import refusal
from pagedtree.generation.token_options import TokenOptions

# In the order in which transformers applies them.
WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
# These forbid tokens, or leave finite logits unchanged (the first one). Forbidden tokens stay forbidden, so their order
# among the processors before the warpers is free.
MASKS = (
    InfNanRemoveLogitsProcessor,
    NoBadWordsLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)
FILTERS = {*WARPERS.values(), "filter_order"}
KNOWN = (SequenceBiasLogitsProcessor, RepetitionPenaltyLogitsProcessor, *MASKS, *WARPERS, LogitNormalization)


@dataclass
class Processors:
    """Fields of `SamplingParams` and `TokenOptions`; min_new_tokens and penalize_prompt for each prompt."""

    params: dict[str, Any]
    min_new_tokens: list[int]
    penalize_prompt: list[bool]
    bias: dict[int, float] = field(default_factory=dict)
    bad_words: list[list[int]] = field(default_factory=list)
    begin_suppress_tokens: list[int] = field(default_factory=list)

    def on_params(self, params: SamplingParams | None) -> SamplingParams | None:
        """Returns `params` (None = greedy) with the processors' settings. Raises ValueError where both set a field."""
        if not self.params:
            return params
        # The order of the filters is a property of all of them.
        set_here = {*self.params, *(FILTERS if FILTERS & set(self.params) else ())}
        if params is None:
            if FILTERS & set_here:
                raise refusal("logits_processor", f"params with {', '.join(self.params)}", "None = greedy")
            params = SamplingParams(temperature=0.0)
        elif any(_is_set(params, name) for name in set_here):
            raise refusal("params", f"no {', '.join(sorted(set_here))} beside logits_processor's")
        return replace(params, **self.params)

    def on_options(self, options: TokenOptions, prompt: int) -> TokenOptions:
        """Returns the options of one outcome of a prompt with the processors' settings."""
        changed: dict[str, Any] = {} if self.penalize_prompt[prompt] else {"penalize_prompt": False}
        if self.bias:
            biases = options.bias or {}
            changed["bias"] = {**biases, **{token: biases.get(token, 0.0) + bias for token, bias in self.bias.items()}}
        if self.bad_words:
            changed["bad_words"] = [*(options.bad_words or ()), *self.bad_words]
        if self.begin_suppress_tokens:
            changed["begin_suppress_tokens"] = [*(options.begin_suppress_tokens or ()), *self.begin_suppress_tokens]
        return replace(options, **changed) if changed else options


def read_processors(
    processors: Iterable[Any], prompts: Sequence[Sequence[int]], width: int | None, eos_ids: Sequence[int], vocab: int
) -> Processors:
    """Reads the settings of a `LogitsProcessorList`. Raises ValueError, with its name, for a processor without a
    counterpart on draft trees, or none in its place.

    prompts: their tokens, without padding. width: of the tensor that held them, None for lists. vocab: columns of the
    model's logits.
    """
    processors = list(processors)
    names = [type(processor).__name__ for processor in processors]
    unknown = [name for name, processor in zip(names, processors, strict=True) if type(processor) not in KNOWN]
    if unknown:
        wanted = f"those that draft trees can follow ({', '.join(k.__name__ for k in KNOWN)})"
        raise refusal("logits_processor", wanted, ", ".join(unknown))
    places = [_place(processor) for processor in processors]
    ordered = [place for place in places if place != 2]
    warpers_begin = next((i for i, place in enumerate(places) if place > 2), len(places))
    if ordered != sorted(ordered) or any(place <= 2 for place in places[warpers_begin:]):
        raise refusal("logits_processor", "them in transformers' order", ", ".join(names))
    once = [place for place in places if place not in (0, 2)]
    if len(once) != len(set(once)) or any(getattr(p, "min_tokens_to_keep", 1) != 1 for p in processors):
        raise refusal("logits_processor", "processors as transformers makes them", ", ".join(names))
    widths = [len(prompt) if width is None else width for prompt in prompts]
    read = Processors(_sampling(processors), [0] * len(prompts), [True] * len(prompts))
    for processor in processors:
        _read(processor, read, widths, [len(prompt) for prompt in prompts], eos_ids, vocab)
    return read


def known_tokens(tokens: Tensor, vocab: int) -> list[int]:
    """Keeps the model's tokens; transformers ignores unknown ones."""
    return [int(token) for token in tokens.flatten().tolist() if 0 <= token < vocab and token == int(token)]


def _is_set(params: SamplingParams, name: str) -> bool:
    value = getattr(params, name)
    return isinstance(value, Tensor) or value != getattr(SamplingParams(), name)


def _place(processor: Any) -> int:
    """Ranks a processor as transformers does: bias, repetition penalty, forbidden tokens, then the warpers."""
    kind = type(processor)
    if kind in MASKS:
        return 2
    if kind is SequenceBiasLogitsProcessor:
        return 2 if all(bias == -math.inf for bias in processor.sequence_bias.values()) else 0
    return KNOWN.index(kind)


def _sampling(processors: list[Any]) -> dict[str, Any]:
    """Returns the warpers as fields of `SamplingParams`. transformers filters by top_k, then top_p, then min_p."""
    values = {WARPERS[type(p)]: getattr(p, WARPERS[type(p)]) for p in processors if type(p) in WARPERS}
    if {"top_k", "top_p", "min_p"} <= set(values):
        raise refusal("top_k, top_p, min_p", "at most two of them (top_k=0 is off)", "all")
    # min_p keeps the same tokens as on the unfiltered distribution, and so does top_p without top_k.
    if {"top_p", "min_p"} <= set(values):
        values["filter_order"] = "joint"
    return values


def _read(
    processor: Any, read: Processors, widths: list[int], lengths: list[int], eos_ids: Sequence[int], vocab: int
) -> None:
    if isinstance(processor, SequenceBiasLogitsProcessor):  # and NoBadWords, which derives from it
        for tokens, bias in processor.sequence_bias.items():
            ids = [int(token) for token in tokens]
            if not ids or max(ids) >= vocab or math.isnan(bias):
                name = "bad_words_ids" if isinstance(processor, NoBadWordsLogitsProcessor) else "sequence_bias"
                raise refusal(name, f"ids of the model's {vocab} logits and a bias", f"{ids}: {bias}")
            if bias == -math.inf:
                read.bad_words.append(ids)
            elif len(ids) == 1:
                read.bias[ids[0]] = read.bias.get(ids[0], 0.0) + bias
            else:
                raise refusal("sequence_bias", "single tokens, or -inf for several", f"{bias} for {ids}")
    elif isinstance(processor, RepetitionPenaltyLogitsProcessor):
        read.params["repetition_penalty"] = processor.penalty
        _read_ignored(getattr(processor, "prompt_ignore_length", None), read, widths, lengths)
    elif isinstance(processor, SuppressTokensLogitsProcessor):
        read.bad_words += [[token] for token in known_tokens(processor.suppress_tokens, vocab)]
    elif isinstance(processor, SuppressTokensAtBeginLogitsProcessor):
        if any(processor.begin_index != width for width in widths):
            raise refusal("begin_index", f"the prompts' width, {widths}", processor.begin_index)
        read.begin_suppress_tokens += known_tokens(processor.begin_suppress_tokens, vocab)
    elif isinstance(processor, (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)):
        ids = processor.eos_token_id.flatten().tolist()
        if set(ids) != set(eos_ids):
            raise refusal("min_new_tokens", f"to forbid the tokens that end a text, {eos_ids}", ids)
        if isinstance(processor, MinLengthLogitsProcessor):
            least = processor.min_length
        else:
            least = processor.prompt_length_to_skip + processor.min_new_tokens
        read.min_new_tokens = [
            max(count, least - width) for count, width in zip(read.min_new_tokens, widths, strict=True)
        ]


def _read_ignored(ignored: Any, read: Processors, widths: list[int], lengths: list[int]) -> None:
    if ignored is None:
        return
    counts = ignored.tolist() if isinstance(ignored, Tensor) else [ignored] * len(widths)
    if len(counts) != len(widths):
        raise refusal("prompt_ignore_length", f"one per prompt, {len(widths)}", len(counts))
    for b, (count, width, length) in enumerate(zip(counts, widths, lengths, strict=True)):
        if count == width and length:
            read.penalize_prompt[b] = False
        elif count > width - length:
            wanted = f"at most the padding, {width - length}, or the whole prompt, {width}"
            raise refusal("prompt_ignore_length", wanted, count)
