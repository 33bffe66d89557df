"""The rules by which `generate` verifies drafts, chooses tokens and ends texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import pagedtree
from pagedtree import Draft, RequestOptions, SamplingParams, Verdict, verify
from pagedtree._arguments import argument_error, refusal
from pagedtree.bits import unpacked
from pagedtree.generation.scheduler import GeneratedSequence

if TYPE_CHECKING:
    from pagedtree.distributed import VocabShards

RULES = ("auto", *(name.removeprefix("verify_") for name in verify.__all__ if name not in ("Verdict", "verify_tokens")))
DRAFT_LAWS = ("onehot", "iid", "swor", "coupled")
DRAWN = ("iid", "swor")

# Odd, so that every step of a sequence has a different key; the golden ratio's bits separate keys of small seeds.
_STEP_KEY = 0x9E3779B97F4A7C15 - 2**64


# Rules that support a vocabulary split across ranks.
_SHARDED = ("greedy", "sampled", "rejection")


def check_rule(
    rule: str, params: SamplingParams | None, draft_law: str, is_chain: bool, is_sharded: bool = False
) -> str:
    """Returns `rule` with "auto" resolved. Raises ValueError for invalid combinations."""
    if rule not in RULES:
        raise refusal("rule", f"one of {', '.join(RULES)}", repr(rule))
    if draft_law not in DRAFT_LAWS:
        raise refusal("drafter", f"a draft_law of {', '.join(DRAFT_LAWS)}", repr(draft_law))
    if rule == "auto":
        rule = "greedy" if params is None else "sampled"
    if (rule == "greedy") != (params is None):
        raise refusal("rule", 'params for every rule but "greedy" and none for "greedy"', f"{rule!r} with {params}")
    if is_sharded and rule not in _SHARDED:
        raise refusal("rule", f"one of {', '.join(_SHARDED)} with shards", repr(rule))
    if rule == "block" and not is_chain:
        raise argument_error("rule", '"block" verifies chains, got a drafter whose trees branch (is_chain is False)')
    if rule == "traversal" and draft_law not in DRAWN:
        text = '"traversal" weighs drafts that were drawn (draft_law "iid" or "swor"), got a drafter of draft_law'
        raise argument_error("rule", f'{text} {draft_law!r}; "rejection" accepts as many of those')
    if draft_law == "coupled" and rule != "sampled":
        raise argument_error("rule", f'drafts coupled to the noise of "sampled" are of use to that alone, got {rule!r}')
    return rule


def check_options(rule: str, params: SamplingParams | None, origin: str = "") -> tuple[str, SamplingParams | None]:
    """Returns the rule and params that support request options. Raises ValueError, ending with `origin`, if none do."""
    if rule == "typical":
        raise argument_error("rule", f'"typical" takes no options, penalties or min_new_tokens; the others do{origin}')
    return ("sampled", SamplingParams(temperature=0.0)) if params is None else (rule, params)


@dataclass
class Sampling:
    """A verification rule with its parameters: tensors in params and the seeds have one entry per sequence.

    shards: this rank's part of the vocabulary, if the logits are split across ranks. vocab_size: columns of the
    target's logits, of all ranks together; None = unknown.
    """

    rule: str
    params: SamplingParams | None
    seeds: Tensor
    shards: VocabShards | None = None
    vocab_size: int | None = None

    def of(self, sequences: Sequence[GeneratedSequence]) -> Sampling:
        """Returns the rule with the parameters and seeds of these sequences only."""
        if self.params is None:  # nothing differs between sequences
            return self
        rows = torch.tensor([sequence.index for sequence in sequences], dtype=torch.int64)
        return self.at(rows.to(self.seeds.device))

    def at(self, rows: Tensor) -> Sampling:
        """Like `of`, for sequence numbers int64 [B]; a number past the last one stands for an arbitrary sequence."""
        rows = rows.clamp(max=max(self.seeds.shape[0] - 1, 0))
        params = self.params
        if params is not None:
            values = {field.name: getattr(params, field.name) for field in fields(params)}
            settings: dict[str, Any] = {
                name: value[rows] for name, value in values.items() if isinstance(value, Tensor) and value.ndim
            }
            params = replace(params, **settings)
        return replace(self, params=params, seeds=self.seeds[rows])

    def draft_seeds(self, start: Tensor) -> Tensor:
        """Returns seeds for this step only, with roots at `start`.

        "block" and "traversal" also decide by later drafts, which the same noise in the next step would make dependent
        on the text.
        """
        return self.seeds + _STEP_KEY * (start.long() + 1)

    def for_drafts(self) -> Sampling:
        """Returns a copy without penalties, for a draft model: `expand_tree` takes the other parameters."""
        if self.params is None:
            return self
        return replace(
            self, params=replace(self.params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        )

    def verify(
        self,
        logits: Tensor,
        draft: Draft,
        draft_law: str,
        start: Tensor,
        options: RequestOptions | None = None,
        grammar_mask: Tensor | None = None,
    ) -> Verdict:
        """Verifies trees with roots at `start`. options: not under the rules "greedy" and "typical". grammar_mask:
        packed, of all nodes."""
        keywords: dict[str, Any] = {"grammar_mask": grammar_mask}
        if self.shards is not None:
            keywords["shards"] = self.shards
            if grammar_mask is not None:
                keywords["grammar_mask"] = self.shards.own(unpacked(grammar_mask, self.shards.vocab))
        rule = self.rule
        if self.params is None:
            return pagedtree.verify_greedy(logits, draft, **keywords)
        if rule == "typical":
            return pagedtree.verify_typical(logits, draft, self.params, **keywords)
        keywords |= {"seeds": self.seeds, "positions": start, "options": options}
        if rule == "sampled":
            return pagedtree.verify_sampled(logits, draft, self.params, **keywords)
        if draft.trees.max_nodes == 1:  # no drafts: one draw from the target, the same under every rule
            rule, draft_law = "rejection", "onehot"
        if draft_law not in DRAWN:
            draft = draft._replace(draft_probs=None, draft_rows=None)
        return getattr(pagedtree, f"verify_{rule}")(logits, draft, self.params, draft_law=draft_law, **keywords)
