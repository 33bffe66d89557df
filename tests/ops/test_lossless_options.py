"""Under penalties and bias the rules use plain decoding's distributions.

Logits, biases and penalties are multiples of ln 2, so probabilities are fractions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.batches import paths_of
from support.devices import slow_on_simt
from support.exact import (
    CHAIN,
    LIMIT,
    LOSSLESS,
    RULES,
    TABLES,
    TREE,
    Distribution,
    Path,
    Questions,
    ToyPair,
    first_tokens,
    off_the_target,
)

from pagedtree import RequestOptions, SamplingParams, reference
from pagedtree.testing import use_backend

LN2 = math.log(2)
TEMPERATURE = 0.5
SAID, PROMPT = [2, 1], [0]  # the root is the last of SAID
REPETITION, PRESENCE, FREQUENCY = 2.0, -1, 1  # the latter two in units of ln 2
BIAS = {1: 1, 2: -2, 0: 1}


class PenalisedPair(ToyPair):
    """ToyPair with a penalised, biased target; logits are multiples of ln 2."""

    def weights(self, prefix: Path) -> list[int | None]:
        """Returns raw logits in units of ln 2, None for -inf; even, for repetition to halve."""
        generator = np.random.default_rng([self.seed, 5, len(prefix), *(x + 1 for x in prefix)])
        found: list[int | None] = [2 * int(w) for w in generator.integers(-1, 2, self.vocab)]
        if generator.random() < 0.3:
            found[int(generator.integers(self.vocab))] = None
        return found

    def exponent(self, x: int, weight: int, count: int) -> Fraction:
        logit = Fraction(weight + BIAS.get(x, 0))
        if count > 0 or x in PROMPT:
            logit = logit / Fraction(REPETITION) if logit > 0 else logit * Fraction(REPETITION)
        return (logit - FREQUENCY * count - PRESENCE * (count > 0)) / Fraction(TEMPERATURE)

    def p(self, prefix: Path) -> Distribution:
        said = [*SAID, *prefix]
        masses = [
            Fraction(0) if weight is None else Fraction(2) ** self.exponent(x, weight, said.count(x))
            for x, weight in enumerate(self.weights(prefix))
        ]
        return reference.normalised(masses)

    def logits(self, parents: Sequence[int], drafts: Sequence[int]) -> list[list[float]]:
        """Returns raw logits by node."""
        prefixes = paths_of(drafts, parents)
        return [[-math.inf if w is None else w * LN2 for w in self.weights(x)] for x in prefixes]


# The core suite has a small and a large tree.
SOME = [pytest.param(*case, marks=[] if case[2] in (CHAIN, TREE) else pytest.mark.slow) for case in LOSSLESS]


# The ops --------------------------------------------------------------------------------------------------------------


def options_of(batch: int, vocab: int, device: torch.device) -> RequestOptions:
    return RequestOptions.from_lists(
        vocab, prompts=[PROMPT] * batch, outputs=[SAID] * batch,
        bias=[{x: value * LN2 for x, value in BIAS.items()}] * batch, device=device,
    )  # fmt: skip


PARAMS = SamplingParams(
    temperature=TEMPERATURE, repetition_penalty=REPETITION, presence_penalty=PRESENCE * LN2,
    frequency_penalty=FREQUENCY * LN2,
)  # fmt: skip


@pytest.mark.parametrize(("rule", "law", "tree"), SOME, ids=str)
def test_ops_match_exact_rules(device, rule, law, tree):
    exact, op = RULES[rule]
    questions = Questions.of_pairs(PenalisedPair, exact, law, tree, every=9)
    options = options_of(len(questions.expected), 3, device)
    questions.check(questions.answer(op, law, device, torch.float32, PARAMS, options=options))


# Whole steps ----------------------------------------------------------------------------------------------------------


STEPS = [
    *[("rejection", law, [2, 2]) for law in ("iid", "swor", "topk")],
    *[("traversal", law, [2, 2]) for law in ("iid", "swor")],
    *[("block", law, [1, 1, 1]) for law in ("iid", "topk")],
    *[("sampled", law, [2, 2, 2]) for law in ("swor", "coupled")],
]
STEPS_IN_CORE = STEPS[1:2] + STEPS[3:4] + STEPS[5:6] + STEPS[8:]
PENALTIES = SamplingParams(temperature=0.8, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7)


@slow_on_simt
@pytest.mark.parametrize(
    ("rule", "law", "branching", "model"),
    [
        pytest.param(*case, model, marks=[] if case in STEPS_IN_CORE and model == "flat" else pytest.mark.slow)
        for case in STEPS
        for model in TABLES
    ],
    ids=str,
)
def test_steps_drafted_by_expand_tree(backend, device, rule, law, branching, model):
    """The text follows the penalised target; the drafter ignores penalties."""
    count = 20 if backend == "simt" else 10_000
    tokens, accepted = first_tokens(rule, law, branching, model, count, device, params=PENALTIES)
    if backend == "simt":  # too slow for the statistic: equals the CPU
        with use_backend("cpu"):
            assert tokens.equal(first_tokens(rule, law, branching, model, count, device, params=PENALTIES)[0])
        return
    assert off_the_target(tokens, model, PENALTIES) < LIMIT
    assert accepted > 0.2
    if model == "flat":
        assert off_the_target(tokens, model) > LIMIT  # penalties matter


@pytest.mark.stats
@pytest.mark.parametrize("model", TABLES)
@pytest.mark.parametrize(("rule", "law", "branching"), STEPS, ids=str)
def test_steps_closely(backend, device, rule, law, branching, model):
    if backend == "simt":
        pytest.skip("emulated: it gives the bits of cuda and cpu, but not a million draws in a reasonable time")
    tokens, _ = first_tokens(rule, law, branching, model, 1_000_000, device, params=PENALTIES)
    assert off_the_target(tokens, model, PENALTIES) < LIMIT
