"""Whole steps on tables as models: `expand_tree` drafts, a rule verifies; the text's distance from the target."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import torch
from statistics_case import excess
from torch import Tensor

from pagedtree import (
    Draft,
    DraftState,
    RequestOptions,
    SamplingParams,
    Verdict,
    distributed,
    expand_tree,
    reference,
    rerank_tree,
    start_draft,
    verify_block,
    verify_rejection,
    verify_sampled,
    verify_traversal,
)
from pagedtree.distributed import VocabShards

VOCAB, LENGTH = 3, 3
LIMIT = 6.0

# Next-token distributions after each token, and last after the prompt. The first pair ignores the text, and its drafter
# prefers unlikely tokens.
FLAT = torch.tensor([[0.5, 0.3, 0.2]]).expand(VOCAB + 1, -1), torch.tensor([[0.2, 0.3, 0.5]]).expand(VOCAB + 1, -1)
_generator = torch.Generator().manual_seed(4)
MARKOV = tuple(torch.randn(VOCAB + 1, VOCAB, generator=_generator).mul(1.2).softmax(-1) for _ in range(2))
MODELS = {"flat": FLAT, "markov": MARKOV}

RULES = {
    "sampled": verify_sampled,
    "rejection": verify_rejection,
    "block": verify_block,
    "traversal": verify_traversal,
}
SHARDED_RULES = {"sampled": distributed.verify_sampled, "rejection": distributed.verify_rejection}


def grown(
    draft_table: Tensor,
    roots: Tensor,
    positions: Tensor,
    seeds: Tensor,
    law: str,
    branching: list[int],
    expand: Callable[..., DraftState],
) -> Draft:
    """Grows trees with `branching[level]` children per node."""
    state = start_draft(roots, max_kv_nodes=1 + sum(prod(branching[:i]) for i in range(1, len(branching))))
    sampling = {"params": SamplingParams(), "seeds": seeds, "positions": positions} if law != "topk" else {}
    for level, children in enumerate(branching):
        width = state.num_frontier * children if level < len(branching) - 1 else 0
        logits = draft_table[state.level_tokens].log()
        state = expand(state, logits, num_children=children, num_frontier=width, law=law, **sampling)
    return rerank_tree(state, state.num_candidates)


def verified(
    rule: str, law: str, target: Tensor, draft: Draft, seeds: Tensor, positions: Tensor, shards: VocabShards | None,
    params: SamplingParams, said: RequestOptions | None,
) -> Verdict:  # fmt: skip
    logits = target[draft.draft_tokens.clamp(min=0)].log()
    options = {"seeds": seeds, "positions": positions, "options": said}
    rules = RULES
    if shards is not None:
        logits, options["shards"], rules = shards.own(logits), shards, SHARDED_RULES
    if rule != "sampled":
        options["draft_law"] = "onehot" if law == "topk" else law
        if law != "topk":
            options |= {"draft_probs": draft.draft_probs, "draft_rows": draft.draft_rows}
    return rules[rule](logits, draft.draft_tokens, draft.trees, params, **options)


def first_tokens(
    rule: str,
    law: str,
    branching: list[int],
    model: str,
    count: int,
    device: torch.device,
    expand: Callable[..., DraftState] = expand_tree,
    shards: VocabShards | None = None,
    params: SamplingParams | None = None,
) -> tuple[Tensor, float]:
    """Returns tokens [count, LENGTH], and mean accepted drafts per step; penalties of `params` count tokens so far."""
    target, draft_table = (table.to(device) for table in MODELS[model])
    seeds = torch.arange(count, device=device) * 7 + 1
    tokens = torch.full((count, 2 * LENGTH + len(branching)), -1, device=device)
    lengths = torch.zeros(count, dtype=torch.int64, device=device)
    roots = torch.full((count,), VOCAB, device=device)
    accepted = []
    while bool((lengths < LENGTH).any()):
        # `verify_block` and `verify_traversal` need new draft seeds each step; "coupled" shares verification's.
        draft_seeds = seeds if law == "coupled" else seeds + 0x5851F42D4C957F2D * (lengths + 1)
        draft = grown(draft_table, roots, lengths, draft_seeds, law, branching, expand)
        said = None if params is None else options_of(tokens, lengths)
        verdict = verified(rule, law, target, draft, seeds, lengths, shards, params or SamplingParams(), said)
        assert not verdict.status.any()
        steps = torch.arange(verdict.tokens.shape[1], device=device)
        emitted = steps <= verdict.num_accepted[:, None]
        accepted.append(float(verdict.num_accepted.float().mean()))
        places = (lengths[:, None] + steps).clamp(max=tokens.shape[1] - 1)
        rows = torch.arange(count, device=device)[:, None].expand_as(places)
        tokens[rows[emitted], places[emitted]] = verdict.tokens[emitted]
        # Finished sequences repeat their step, keeping the first LENGTH tokens.
        lengths = torch.where(lengths < LENGTH, lengths + verdict.num_accepted + 1, lengths)
        roots = tokens.gather(1, lengths[:, None] - 1)[:, 0]
    return tokens[:, :LENGTH].cpu(), float(np.mean(accepted))


def options_of(tokens: Tensor, lengths: Tensor) -> RequestOptions:
    """Counts the first `lengths` of each row's tokens."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    is_said = places < lengths[:, None]
    counts = torch.zeros(len(tokens), VOCAB, dtype=torch.int32, device=tokens.device)
    return RequestOptions(output_counts=counts.scatter_add_(1, tokens.clamp(min=0), is_said.int()))


def off_the_target(tokens: Tensor, model: str, params: SamplingParams | None = None) -> float:
    """Returns the tokens' chi-square less its mean, in standard deviations."""
    expected = np.ones([VOCAB] * LENGTH)
    for length in range(LENGTH):
        for prefix in np.ndindex(*[VOCAB] * length):
            row = MODELS[model][0][[prefix[-1] if prefix else VOCAB]].log()
            said = options_of(torch.tensor([[*prefix, -1]]), torch.tensor([length]))
            applied = reference.apply_options(row, params or SamplingParams(), said)[0]
            temperature = 1.0 if params is None else params.temperature
            p = reference.distribution(reference.clean_logits(applied), temperature)
            expected[prefix] *= p.reshape(VOCAB, *[1] * (LENGTH - length - 1))
    places = tokens @ VOCAB ** torch.arange(LENGTH - 1, -1, -1)
    return excess(np.bincount(places.numpy(), minlength=VOCAB**LENGTH), expected.flatten())
