"""Log-probabilities of generated tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from pagedtree import Commit, RequestOptions, SamplingParams, Verdict, token_logprobs
from pagedtree.bits import packed
from pagedtree.generation.rules import Sampling

# Per token of each sequence of a step: log-probability, rank, the most likely tokens, and their log-probabilities.
Found = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass
class TokenLogprobs:
    """Log-probabilities of one sequence under `generate(logprobs=n)`; entry i belongs to its i-th new token.

    Attributes:
        logprobs: natural logarithm of the token's probability.
        ranks: number of tokens that are at least as likely, itself included, ignoring filters.
        top_tokens, top_logprobs: the n most likely tokens of the place and their log-probabilities, largest first.
    """

    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_tokens: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)

    def append(self, found: list[list[Any]], count: int) -> None:
        """Appends the first `count` tokens of one sequence of a step."""
        lists: tuple[list[Any], ...] = (self.logprobs, self.ranks, self.top_tokens, self.top_logprobs)
        for entries, new in zip(lists, found, strict=True):
            entries += new[:count]


class LogprobReader:
    """Reads the log-probabilities of a step's tokens.

    top_n: how many top tokens to report. is_processed: whether probabilities are taken after options, temperature and
    filters (for greedy sequences after options only), else from the raw logits.
    """

    def __init__(self, top_n: int, is_processed: bool) -> None:
        self.top_n, self.is_processed = top_n, is_processed

    def read(
        self,
        logits: Tensor,
        verdict: Verdict,
        committed: Commit,
        start: Tensor,
        sampling: Sampling,
        options: RequestOptions | None,
        grammar_mask: Tensor | None,
    ) -> Found:
        """Returns [B, S] or [B, S, top_n] each, of verdict.tokens; undefined past the committed ones. options: from
        before the commit, but its history has the new tokens. Advances its counts instead of `commit`."""
        rows = committed.accept_rows
        if not self.is_processed:
            values = token_logprobs(logits, verdict.tokens.flatten(), rows=rows.flatten(), top_n=self.top_n)
            return cast(Found, tuple(tensor.unflatten(0, rows.shape) for tensor in values))
        params = _of_greedy_too(sampling.params)
        by_depth = []
        for depth in range(rows.shape[1]):
            row, tokens = rows[:, depth].contiguous(), verdict.tokens[:, depth].contiguous()
            here = _options_at(depth, row, tokens, logits.shape[1], start, committed, options, grammar_mask)
            by_depth.append(token_logprobs(logits, tokens, rows=row, params=params, options=here, top_n=self.top_n))
            if options is not None and options.output_counts is not None:
                vocab = options.output_counts.shape[1]
                is_new = (row >= 0) & (tokens < vocab)
                options.output_counts.scatter_add_(1, tokens.clamp(0, vocab - 1)[:, None], is_new.int()[:, None])
        return cast(Found, tuple(torch.stack(tensors, dim=1) for tensors in zip(*by_depth, strict=True)))


def _of_greedy_too(params: SamplingParams | None) -> SamplingParams | None:
    """Neutralizes greedy parameters: at temperature 0 one token would have all the probability."""
    if params is None:
        return None
    neutral: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    if isinstance(params.temperature, Tensor):
        is_greedy = params.temperature == 0
        neutral = {name: torch.where(is_greedy, value, getattr(params, name)) for name, value in neutral.items()}
    elif params.temperature != 0:
        return params
    return replace(params, **neutral)


def _options_at(
    depth: int,
    row: Tensor,
    tokens: Tensor,
    vocab: int,
    start: Tensor,
    committed: Commit,
    options: RequestOptions | None,
    grammar_mask: Tensor | None,
) -> RequestOptions | None:
    """Returns the options at the paths' nodes of this depth; earlier nodes count as text."""
    changed: dict[str, Tensor] = {}
    allowed = None if grammar_mask is None else grammar_mask[row.clamp(min=0)]
    if options is not None:
        if options.allowed_mask is not None:
            allowed = options.allowed_mask if allowed is None else allowed & options.allowed_mask
        if options.history is not None:
            changed["history_lens"] = start + 1 + committed.num_tokens.clamp(max=depth)
        if options.stop_ids is not None and options.min_position is not None:
            is_early = start.long() + depth + 1 < options.min_position
            if allowed is None:
                allowed = torch.full((row.shape[0], -(-vocab // 32)), -1, dtype=torch.int32, device=row.device)
            allowed = _without(allowed, options.stop_ids, is_early, tokens, vocab)
    if allowed is not None:
        changed["allowed_mask"] = allowed
    return replace(options or RequestOptions(), **changed) if changed else options


def _without(allowed: Tensor, stop_ids: Tensor, is_early: Tensor, tokens: Tensor, vocab: int) -> Tensor:
    """Returns the packed mask without the stop tokens of early rows; where one came, it was the only token left."""
    is_early = is_early & (stop_ids != tokens[:, None]).all(dim=1)
    bits = torch.zeros((allowed.shape[0], 32 * allowed.shape[1]), dtype=torch.bool, device=allowed.device)
    is_valid = (stop_ids >= 0) & (stop_ids < vocab) & is_early[:, None]
    # Invalid entries write False to column 0.
    columns = torch.where(is_valid, stop_ids, 0).long()
    bits.scatter_reduce_(1, columns, is_valid, "amax")
    return allowed & ~packed(bits)
