"""The arguments of `generate`, checked, in the form that the engine takes."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pagedtree import SamplingParams
from pagedtree._arguments import refusal
from pagedtree.generation.drafters import Drafter
from pagedtree.generation.grammar_steps import GrammarSteps
from pagedtree.generation.logprobs import LogprobReader
from pagedtree.generation.rules import Sampling, check_options, check_rule
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.generation.token_options import TokenOptions, option_rows
from pagedtree.grammars import GrammarMatcher
from pagedtree.integrations.transformers.generation_config import ConfigFields, integer
from pagedtree.integrations.transformers.logits_processors import Processors
from pagedtree.integrations.transformers.whole_inputs import check_token_types
from pagedtree.options import OptionRows

if TYPE_CHECKING:
    from pagedtree.distributed import VocabShards

# Maximum of `token_logprobs`.
MOST_LOGPROBS = 1024
# A tokenizer's outputs that do not change the model's input, and input_ids.
ENCODED = {"input_ids", "attention_mask", "token_type_ids"}


def at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if integer(name, size) < 1:
            raise refusal(name, "at least 1", size)


def check_segment(segment: int, tree: str | None, share_prefix: bool | None) -> None:
    """Raises ValueError for a segment that plans do not take, and for what looks at the batch."""
    if integer("segment", segment) < 64 or segment % 64:
        raise refusal("segment", "a multiple of 64, at least 64, or None", segment)
    if tree is not None:
        raise refusal("tree", "None with segment, as the best tree depends on the batch", repr(tree))
    if share_prefix:
        raise refusal("share_prefix", "None or False with segment, as it depends on the batch", "True")


def _is_switch(value: Any) -> bool:
    return bool(np.isscalar(value) and value in (True, False))


def _has(*members: str) -> Callable[[Any], bool]:
    return lambda value: not isinstance(value, Tensor) and all(hasattr(value, member) for member in members)


# An argument's kind, unless it is None: its description and its check.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("share_prefix", "cuda_graph"), ("True, False", _is_switch)),
    **dict.fromkeys(("callback", "on_step"), ("a function", callable)),
    "params": ("SamplingParams", lambda value: isinstance(value, SamplingParams)),
    "shards": ("VocabShards", _has("vocab", "num_ranks")),
    "streamer": ("a streamer of transformers", _has("put", "end")),
    "logits_processor": ("a list of transformers' processors", _has("__iter__")),
}


def check_kinds(**values: Any) -> None:
    """Raises TypeError (ValueError for switches) if an argument is neither of its kind nor None."""
    for name, value in values.items():
        kind, is_one = _KINDS[name]
        if value is not None and not is_one(value):
            if is_one is _is_switch:
                raise refusal(name, f"{kind} or None", repr(value))
            raise refusal(name, f"{kind} or None", type(value).__name__, TypeError)


@dataclass
class Prompts:
    """A call's prompts without padding, of `n` outcomes each. tensor: the [B, L] that held them; None for lists.
    pad: fills the rows of results."""

    tokens: list[list[int]]
    tensor: Tensor | None
    pad: int
    n: int

    @classmethod
    def of(
        cls, model: Any, input_ids: Any, attention_mask: Any, vocab_size: int, eos_ids: list[int], pad: Any, n: int
    ) -> Prompts:
        pad = pad_token(model, pad)
        if isinstance(input_ids, Mapping) and input_ids.get("token_type_ids") is not None:
            check_token_types(model)
        input_ids, attention_mask = _prompts_and_mask(input_ids, attention_mask)
        tokens = _token_lists(input_ids, attention_mask, vocab_size, None if pad in eos_ids else pad)
        tensor = input_ids if isinstance(input_ids, Tensor) else None
        return cls(tokens, tensor, next(iter(eos_ids), 0) if pad is None else pad, n)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int | None:
        return None if self.tensor is None else self.tensor.shape[1]

    def sequences(self, max_new_tokens: int, unit: int) -> list[GeneratedSequence]:
        """Returns the outcomes, which share multiples of `unit` tokens of a prompt; the last one is always computed."""
        return [
            GeneratedSequence(
                index=b * self.n + j,
                group=b,
                tokens=list(prompt),
                max_length=len(prompt) + max_new_tokens,
                shared_len=(len(prompt) - 1) // unit * unit if self.n > 1 else 0,
            )
            for b, prompt in enumerate(self.tokens)
            for j in range(self.n)
        ]

    def results(self, sequences: list[GeneratedSequence], device: torch.device) -> list[Tensor] | Tensor:
        """Returns texts in the prompts' form."""
        if self.tensor is None:
            return [torch.tensor(sequence.tokens, device=device, dtype=torch.int64) for sequence in sequences]
        new = [sequence.tokens[len(self.tokens[sequence.group]) :] for sequence in sequences]
        width = max(map(len, new), default=0)
        rows = torch.tensor([[*row, *[self.pad] * (width - len(row))] for row in new], dtype=torch.int64)
        rows = rows.view(len(new), width).to(self.tensor.device)
        return torch.cat([self.tensor.long().repeat_interleave(self.n, dim=0), rows], dim=1)

    def of_sequences(self, name: str, values: Any) -> list[Any]:
        """Returns one value per sequence, from one per prompt or sequence."""
        if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
            raise refusal(name, "one value, or a list with one per prompt", type(values).__name__, TypeError)
        if len(values) not in (len(self), len(self) * self.n):
            raise refusal(name, f"a value for each of {len(self)} prompts", len(values))
        return [value for value in values for _ in range(self.n)] if len(values) == len(self) else list(values)


def _prompts_and_mask(input_ids: Any, attention_mask: Any) -> tuple[Any, Any]:
    if isinstance(input_ids, Mapping):
        if attention_mask is not None:
            raise refusal("attention_mask", "none beside a BatchEncoding or dict, which may hold it")
        names = [name for name in input_ids if name not in ENCODED]
        if names or "input_ids" not in input_ids:
            raise refusal("input_ids", "input_ids and attention_mask in the dict", list(input_ids))
        kinds: Any = input_ids.get("token_type_ids")
        rows = kinds.tolist() if hasattr(kinds, "tolist") else kinds or []
        if any(any(row) if isinstance(row, list | tuple) else row for row in rows):
            raise refusal("input_ids", "token_type_ids of 0", "others")
        input_ids, attention_mask = input_ids["input_ids"], input_ids.get("attention_mask")
        if isinstance(input_ids, list) and input_ids and isinstance(input_ids[0], Integral):  # a single text
            input_ids, attention_mask = [input_ids], None if attention_mask is None else [attention_mask]
        if attention_mask is not None and not hasattr(input_ids, "shape"):
            return _without_masked(input_ids, attention_mask), None
    if isinstance(input_ids, np.ndarray):
        input_ids = torch.from_numpy(input_ids)
    try:
        return input_ids, None if attention_mask is None else torch.as_tensor(attention_mask)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise refusal("attention_mask", f"zeros and ones [B, L], {error}") from None


def _without_masked(prompts: Any, mask: Any) -> list[list[int]]:
    prompts = _lists(prompts)
    if not isinstance(mask, list | tuple) or [len(row) for row in mask] != [len(prompt) for prompt in prompts]:
        raise refusal("attention_mask", "an entry for each token of input_ids", "others")
    return [[token for token, kept in zip(*pair, strict=True) if kept] for pair in zip(prompts, mask, strict=True)]


def _token_lists(input_ids: Any, attention_mask: Tensor | None, vocab_size: int, pad: int | None) -> list[list[int]]:
    if isinstance(input_ids, Tensor):
        is_integer = not input_ids.is_floating_point() and input_ids.dtype != torch.bool
        if input_ids.is_nested or input_ids.ndim != 2 or not is_integer:
            found = f"{input_ids.dtype} {list(input_ids.shape)}; a list for prompts of different lengths"
            raise refusal("input_ids", "integers [B, L]", found)
        if attention_mask is not None:
            keep = attention_mask.bool()
        else:
            keep = torch.ones_like(input_ids, dtype=torch.bool) if pad is None else input_ids != pad
        if keep.shape != input_ids.shape:
            raise refusal("attention_mask", list(input_ids.shape), list(keep.shape))
        pairs = zip(input_ids.tolist(), keep.tolist(), strict=True)
        prompts = [[token for token, kept in zip(*pair, strict=True) if kept] for pair in pairs]
    else:
        if attention_mask is not None:
            raise refusal("attention_mask", "none with a list of prompts")
        prompts = _lists(input_ids)
    for b, prompt in enumerate(prompts):
        _check_tokens(prompt, b, vocab_size)
    return prompts


def _lists(input_ids: Any) -> list[list[Any]]:
    if not hasattr(input_ids, "__iter__"):
        raise refusal("input_ids", "prompts", type(input_ids).__name__, TypeError)
    prompts = list(input_ids)
    if isinstance(input_ids, str) or any(isinstance(prompt, str) for prompt in prompts):
        raise refusal("input_ids", "token ids", "text; the tokenizer makes ids of it")
    if any(isinstance(prompt, Integral) for prompt in prompts):
        raise refusal("input_ids", "a list of prompts", "a list of ids; for one prompt pass [input_ids]")
    for b, prompt in enumerate(prompts):
        if not hasattr(prompt, "__iter__"):
            raise refusal("input_ids", "token ids", f"{type(prompt).__name__} as prompt {b}", TypeError)
    lists = [prompt.tolist() if hasattr(prompt, "tolist") else list(prompt) for prompt in prompts]
    return [prompt if isinstance(prompt, list) else [prompt] for prompt in lists]  # a tensor of no dimension


def _check_tokens(prompt: list[Any], b: int, vocab_size: int) -> None:
    if not prompt or not all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt):
        raise refusal("input_ids", "at least one token in one dimension", f"{reprlib.repr(prompt)} as prompt {b}")
    wrong = min(prompt) if min(prompt) < 0 else max(prompt)
    if not 0 <= wrong < vocab_size:
        raise refusal("input_ids", f"ids of the model's {vocab_size} tokens", f"{wrong} in prompt {b}")


def eos_tokens(model: Any, eos_token_id: Any) -> list[int]:
    """Returns the given tokens that end a sequence, else the generation config's."""
    token_ids = getattr(model.generation_config, "eos_token_id", None) if eos_token_id is None else eos_token_id
    if token_ids is None:
        return []
    values = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    return [integer("eos_token_id", token) for token in (values if isinstance(values, list | tuple) else [values])]


def pad_token(model: Any, pad_token_id: Any) -> int | None:
    """Returns the given token that fills rows, else the generation config's."""
    token = getattr(model.generation_config, "pad_token_id", None) if pad_token_id is None else pad_token_id
    return None if token is None else integer("pad_token_id", token)


@dataclass
class Request:
    """The arguments of `generate` that choose the texts. read: the settings of `config` and of logits processors."""

    prompts: Prompts
    sequences: list[GeneratedSequence]
    max_new_tokens: int
    min_new_tokens: Any
    params: SamplingParams | None
    seeds: Any
    options: Any
    eos_ids: list[int]
    config: ConfigFields
    read: Processors

    def sampling(
        self, rule: str, drafter: Drafter, vocab: int, shards: VocabShards | None, device: torch.device
    ) -> tuple[Sampling, OptionRows | None]:
        """Returns the rule with params and seeds of all sequences, and their options if there are any."""
        options, least = self._options(), self._least_lengths()
        if self.params is None and rule == "greedy":
            rule = "auto"  # penalties make params of temperature 0
        params = self.read.on_params(SamplingParams() if self.config.is_sampled else self.params)
        rule = check_rule(rule, params, drafter.draft_law, drafter.is_chain, shards is not None)
        params = params if params is None else self._of_sequences(params)
        rows = option_rows(self.sequences, options, self.eos_ids, least, params, vocab, device)
        if rows.is_used:
            rule, params = check_options(rule, params, self.config.origin())
        sampling = Sampling(rule, params, self._seeds(len(self.sequences)).to(device, torch.int64), shards, vocab)
        return sampling, rows if rows.is_used else None

    def _of_sequences(self, params: SamplingParams) -> SamplingParams:
        num_prompts, num_sequences, expanded = len(self.prompts), len(self.sequences), dict[str, Any]()
        for field in fields(params):
            value = getattr(params, field.name)
            if not isinstance(value, Tensor) or value.ndim == 0:
                continue
            if value.ndim != 1 or value.shape[0] not in (1, num_prompts, num_sequences):
                raise refusal("params", f"{field.name} of {num_prompts} prompts", list(value.shape))
            expanded[field.name] = value.repeat_interleave(num_sequences // value.shape[0]) if len(value) else value
        return replace(params, **expanded)

    def _seeds(self, count: int) -> Tensor:
        try:
            tensor = torch.arange(count, dtype=torch.int64) if self.seeds is None else torch.as_tensor(self.seeds)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise refusal("seeds", f"{count} integers, {error}") from None
        if tensor.shape != (count,) or tensor.is_floating_point():
            raise refusal("seeds", f"{count} integers", f"{tensor.dtype} {list(tensor.shape)}")
        return tensor

    def _options(self) -> list[TokenOptions]:
        is_one = self.options is None or isinstance(self.options, TokenOptions)
        options = self.prompts.of_sequences("options", [self.options] * len(self.prompts) if is_one else self.options)
        for option in options:
            if option is not None and not isinstance(option, TokenOptions):
                raise refusal("options", "TokenOptions or None", type(option).__name__, TypeError)
        n = self.prompts.n
        return [self.read.on_options(option or TokenOptions(), i // n) for i, option in enumerate(options)]

    def _least_lengths(self) -> list[int]:
        """Returns min_new_tokens of each sequence; None is 0."""
        counts: Any = 0 if self.min_new_tokens is None else self.min_new_tokens
        counts = counts.tolist() if hasattr(counts, "tolist") else counts
        counts = [counts] * len(self.prompts) if not isinstance(counts, list | tuple) else counts
        lengths = [integer("min_new_tokens", count) for count in self.prompts.of_sequences("min_new_tokens", counts)]
        most, n = self.max_new_tokens, self.prompts.n
        for count in lengths:
            if not 0 <= count <= most:
                raise refusal("min_new_tokens", f"0..max_new_tokens, {most}", count)
        return [min(max(count, self.read.min_new_tokens[i // n]), most) for i, count in enumerate(lengths)]


def grammars_of(grammars: Any, num_sequences: int, vocab: int, eos_ids: list[int]) -> GrammarSteps | None:
    if grammars is None:
        return None
    if isinstance(grammars, GrammarMatcher) or not isinstance(grammars, Sequence):
        raise refusal("grammars", "a list with a matcher or None per sequence", type(grammars).__name__, TypeError)
    if len(grammars) != num_sequences:
        raise refusal("grammars", f"{num_sequences} matchers, one per sequence or None", len(grammars))
    for i, matcher in enumerate(grammars):
        if matcher is None:
            continue
        if not isinstance(matcher, GrammarMatcher):
            raise refusal("grammars", f"a GrammarMatcher or None as number {i}", type(matcher).__name__, TypeError)
        if any(matcher is other for other in grammars[:i]):
            raise refusal("grammars", "a matcher of its own for each sequence", f"number {i} twice")
        if matcher.is_terminated():
            raise refusal("grammars", "texts that are not complete", f"a complete one as number {i}")
    return None if all(matcher is None for matcher in grammars) else GrammarSteps(grammars, vocab, eos_ids)


def logprobs_of(logprobs: Any, mode: str, vocab: int, is_sharded: bool) -> LogprobReader | None:
    if mode not in ("raw", "processed"):
        raise refusal("logprobs_mode", '"raw" or "processed"', repr(mode))
    if logprobs is None:
        return None
    if is_sharded:
        raise refusal("logprobs", "None with shards, whose logits no rank has whole")
    top_n, most = integer("logprobs", logprobs), min(vocab, MOST_LOGPROBS)
    if not 0 <= top_n <= most:
        raise refusal("logprobs", f"None or 0..{most}", top_n)
    return LogprobReader(top_n, mode == "processed")
