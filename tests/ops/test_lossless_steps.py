"""The first three tokens by `expand_tree` and a lossless rule follow the target's exact distribution.

Trees have levels of several nodes: rules that judge leaves first meet cousins, which must not share draws.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.exact import LIMIT, TABLES, first_tokens, off_the_target
from torch import Tensor

from pagedtree import SamplingParams
from pagedtree.drafting import DraftState, expand_tree
from pagedtree.testing import use_backend

PENALTIES = SamplingParams(temperature=0.8, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7)
CASES = [
    *[("rejection", law, tree) for law in ("iid", "swor", "topk") for tree in ([3, 1], [2, 2, 2])],
    *[("traversal", law, tree) for law in ("iid", "swor") for tree in ([3, 1], [3, 1, 1], [2, 2, 2])],
    *[("block", law, [1, 1, 1]) for law in ("iid", "topk")],
    *[("sampled", law, [2, 2, 2]) for law in ("iid", "swor", "topk", "coupled")],
]


@pytest.mark.parametrize(
    ("rule", "law", "branching", "model", "params"),
    [  # the core suite has one model per case, and each rule with penalties
        pytest.param(*case, model, params, marks=[] if (i + j) % 2 == 0 and i % every == 0 else pytest.mark.slow)
        for params, every in ((None, 1), (PENALTIES, 4))
        for i, case in enumerate(CASES)
        for j, model in enumerate(TABLES)
    ],
    ids=str,
)
def test_first_three_tokens(backend: str, device, rule, law, branching, model, params) -> None:
    """The drafter ignores penalties."""
    if backend == "simt":  # too slow for the statistic: equals the CPU
        tokens, _ = first_tokens(rule, law, branching, model, 15, device, params=params)
        with use_backend("cpu"):
            assert tokens.equal(first_tokens(rule, law, branching, model, 15, device, params=params)[0])
        return
    tokens, accepted = first_tokens(rule, law, branching, model, 10_000, device, params=params)
    assert off_the_target(tokens, model, params) < LIMIT
    assert accepted > 0.2
    if params is not None and model == "flat":
        assert off_the_target(tokens, model) > LIMIT  # penalties matter


@pytest.mark.stats
@pytest.mark.parametrize("params", [None, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize("model", TABLES)
@pytest.mark.parametrize(("rule", "law", "branching"), CASES, ids=str)
def test_first_three_tokens_closely(backend: str, device, rule, law, branching, model, params) -> None:
    if backend == "simt":
        pytest.skip("emulated: it gives the bits of cuda and cpu, but not a million draws in a reasonable time")
    tokens, _ = first_tokens(rule, law, branching, model, 1_000_000, device, params=params)
    assert off_the_target(tokens, model, params) < LIMIT


def expand_cousins_alike(state: DraftState, logits: Tensor, **options) -> DraftState:
    """Draws equal children at nodes of a level with equal distributions."""
    expanded = expand_tree(state, logits, **options)
    children = expanded.tokens[:, state.num_candidates :].view(state.batch_size, state.num_frontier, -1)
    tokens = [state.tokens, children[:, :1].expand_as(children).flatten(1)]
    return replace(expanded, tokens=torch.cat(tokens, dim=1))


@pytest.mark.parametrize(("law", "count"), [pytest.param("iid", 100_000, marks=pytest.mark.slow), ("swor", 25_000)])
def test_cousins_that_share_their_draws_are_seen(law: str, count: int) -> None:
    """Shared draws bias a rule that judges leaves first, not a rule that follows one node a level."""
    for rule, expand, is_off in [
        ("traversal", expand_tree, False),
        ("traversal", expand_cousins_alike, True),
        ("rejection", expand_cousins_alike, False),
    ]:
        tokens, _ = first_tokens(rule, law, [3, 1], "flat", count, torch.device("cpu"), expand)
        assert (off_the_target(tokens, "flat") > LIMIT) == is_off
