"""Restrictions on the tokens of `generate`'s sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedtree import SamplingParams
from pagedtree._arguments import argument_error, refusal
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.options import OptionRows


@dataclass(frozen=True)
class TokenOptions:
    """Restrictions on the tokens of a prompt's outcomes. The penalties are in `SamplingParams`.

    Attributes:
        bias: added to the logits of tokens, before penalties and temperature; -inf forbids a token.
        allowed_tokens: the only tokens allowed, EOS tokens included; None = all.
        bad_words: forbidden lists of token ids, which may begin in the prompt, as in transformers.
        begin_suppress_tokens: may not come first. penalize_prompt: whether repetition_penalty also counts the prompt.
    """

    bias: Mapping[int, float] | None = None
    allowed_tokens: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    penalize_prompt: bool = True


def option_rows(
    sequences: Sequence[GeneratedSequence],
    options: Sequence[TokenOptions],
    stop_ids: Sequence[int],
    min_new_tokens: Sequence[int],
    params: SamplingParams | None,
    vocab: int,
    device: torch.device,
) -> OptionRows:
    """Returns the options of a call's sequences, which hold their prompts.

    options, min_new_tokens: one per sequence. stop_ids: forbidden among the first min_new_tokens. params: their
    penalties determine which counts are needed. vocab: columns of the target's logits, of all ranks together.

    Raises ValueError for ids outside the vocabulary and for conflicting options of a sequence.
    """
    lists: dict[str, list[Any]] = {}
    penalties = {} if params is None else params.penalties_on(torch.device("cpu"))
    penalties = {name: value for name, value in penalties.items() if value is not None}
    if "repetition_penalty" in penalties and any(entry.penalize_prompt for entry in options):
        texts = [s.tokens if entry.penalize_prompt else [] for s, entry in zip(sequences, options, strict=True)]
        # Some models' input vocabulary is larger than their output vocabulary.
        lists["prompts"] = [[token for token in text if token < vocab] for text in texts]
    for name, field in (("allowed", "allowed_tokens"), ("bias", "bias"), ("bad_words", "bad_words")):
        values = [getattr(entry, field) for entry in options]
        if any(value is not None for value in values):
            lists[name] = values
    stop_ids = [token for token in stop_ids if 0 <= token < vocab]
    firsts = [_forbidden_first(entry, stop_ids, least) for entry, least in zip(options, min_new_tokens, strict=True)]
    if any(least for _, least in firsts):
        lists["stop_ids"] = [ids for ids, _ in firsts]
        lists["min_positions"] = [len(s.tokens) + least for s, (_, least) in zip(sequences, firsts, strict=True)]
    try:
        lens = [len(s.tokens) for s in sequences]
        return OptionRows(vocab, lists, lens, has_counts=bool(penalties), device=device)
    except (TypeError, ValueError) as error:
        raise argument_error("options", error, type(error)) from None


def _forbidden_first(options: TokenOptions, stop_ids: Sequence[int], least: int) -> tuple[list[int], int]:
    first = list(options.begin_suppress_tokens or ())
    if not stop_ids:
        least = 0
    if not first:
        return list(stop_ids), least
    if least > 1 and set(first) != set(stop_ids):
        wanted = "none with min_new_tokens above 1, which forbids other tokens for longer"
        raise refusal("begin_suppress_tokens", wanted, first)
    return sorted({*first, *(stop_ids if least else ())}), max(least, 1)
