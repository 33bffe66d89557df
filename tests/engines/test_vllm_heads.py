"""Drafters that read the target's states leave stock vLLM's greedy output."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from vllm_case import (
    DRAFT,
    EAGLE,
    MEDUSA,
    PREEMPTED,
    RANKS,
    TARGET,
    V1_ONLY,
    accepted,
    engine,
    expect_preemptions,
    generate,
    metrics_of,
    oracle_options,
    runner_of,
    token_prompts,
    tree_options,
)

from pagedtree.generation.drafters import MedusaHeads
from pagedtree.integrations.vllm.features import check_features
from pagedtree.integrations.vllm.tuned import BatchTuner

PROMPTS = token_prompts()
NO_PREFIXES = {"enable_prefix_caching": False}
SCHEDULES = {"plain": {}, "chunked": dict(max_num_batched_tokens=40), "preempted": PREEMPTED}


def reading(outputs: list[list[int]], **options: Any) -> dict[str, Any]:
    return oracle_options(PROMPTS, outputs, "ReadingDrafter", **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_features_are_those_of_the_layers(stock, schedule):
    """All tokens but the newest have transformers' features.

    The drafter raises where a hidden state yields another token than the root.
    """
    from transformers import AutoModelForCausalLM

    layers = [2, 0, 1]
    with engine(**reading(stock, layers=layers), **SCHEDULES[schedule], **NO_PREFIXES) as llm:
        assert generate(llm, PROMPTS) == stock
        assert accepted(llm) > 12 * len(PROMPTS)
        drafter = runner_of(llm).drafter
        assert drafter.num_checked > len(PROMPTS)
        texts = [
            (drafter.texts[request_id].tolist(), torch.cat(parts)) for request_id, parts in drafter.features.items()
        ]
        if schedule == "preempted":
            expect_preemptions(llm)
    assert len(texts) == len(PROMPTS)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    for tokens, features in texts:
        # The tuple begins with the embeddings and ends after the last norm, so it lacks the last layer.
        with torch.no_grad():
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer + 1][0] for layer in layers], dim=1)
        torch.testing.assert_close(features, expected[: len(features)], rtol=1e-3, atol=1e-3)


def test_two_ranks_get_the_same_states(stock):
    """The drafter raises on each rank where the output layer yields another token."""
    with engine(**reading(stock, layers=[2]), **RANKS, **NO_PREFIXES) as llm:
        assert generate(llm, PROMPTS) == stock
        assert accepted(llm) > 12 * len(PROMPTS)


HEADS = pytest.mark.parametrize("drafter", ["medusa", "eagle"])


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        *((drafter, {}) for drafter in ("medusa", "eagle", "model", "folder")),
        pytest.param("folder", {"tree": "auto"}, marks=V1_ONLY),
        ("folder", {"drafter": EAGLE, "depth": 3, "width": 2}),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_of_drafters(stock, drafter, options, schedule):
    with engine(**tree_options(drafter, **options), **SCHEDULES[schedule], **NO_PREFIXES) as llm:
        assert generate(llm, PROMPTS) == stock
        assert accepted(llm) > len(PROMPTS)
        if schedule == "preempted" and drafter != "folder":
            expect_preemptions(llm)


@pytest.mark.parametrize("tree", ["whole", pytest.param("auto", marks=V1_ONLY)])
def test_a_memory_over_requests(stock, tree):
    with engine(**tree_options("suffix", tree=tree)) as llm:
        assert generate(llm, PROMPTS) == stock
        first = accepted(llm)
        assert generate(llm, PROMPTS) == stock
        assert accepted(llm) - first > (15 * len(PROMPTS) if tree == "whole" else 0)


@V1_ONLY
@HEADS
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_heads_that_are_not_asked_in_every_step(stock, drafter, schedule, monkeypatch):
    """Every second plan drafts nothing, and the drafter reads those tokens later."""
    plan, plans = BatchTuner.plan, []

    def other(tuner, *args):
        plans.append(plan(tuner, *args))
        tuner._step.plan = dataclasses.replace(plans[-1], depth=None if len(plans) % 2 else 2)
        return tuner._step.plan

    monkeypatch.setattr(BatchTuner, "plan", other)
    settings = SCHEDULES[schedule] | ({"num_gpu_blocks_override": 12} if schedule == "preempted" else {})
    with engine(**tree_options(drafter, tree="auto"), **settings, **NO_PREFIXES) as llm:
        assert generate(llm, PROMPTS) == stock
        assert accepted(llm) > 0
        assert (metrics_of(llm)["vllm:num_preemptions"] > 0) == (schedule == "preempted")
    assert len(plans) > 10


def test_a_model_without_streams_is_refused():
    with pytest.raises(ValueError, match="SupportsEagle3, got Linear"):
        check_features(None, torch.nn.Linear(1, 1), [1])
    check_features(None, torch.nn.Linear(1, 1), ())


NOTHING: list[list[int]] = [[]] * len(PROMPTS)
LAYERS = "feature_layers: expected layers in 0..[0-9]+, got"
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (LAYERS, {**reading(NOTHING, layers=[0, 99]), **NO_PREFIXES}),
    (LAYERS, {**reading(NOTHING, layers=[-1]), **NO_PREFIXES}),
    ("enable_prefix_caching = False", {**reading(NOTHING, layers=[1]), "enable_prefix_caching": True}),
    ("enable_prefix_caching = False", tree_options("eagle")),
    ("expected the entry heads", tree_options("medusa", heads=None)),
    ("expected those of a model of hidden size 256, got 128", tree_options("medusa", heads="narrow")),
    ("expected the entry head, a folder", tree_options("eagle", head=None)),
    ("expected the entry drafter, a folder", tree_options("folder", drafter=None)),
    ("architectures: expected a draft head", tree_options("folder", drafter=DRAFT)),
    ("for Medusa heads there is MedusaTreeDrafter", tree_options("folder", drafter=MEDUSA)),
]


@pytest.mark.parametrize(("message", "options"), REFUSED)
def test_refuses_heads_that_do_not_fit(message, options, tmp_path, monkeypatch):
    MedusaHeads(128, 2, torch.nn.Identity()).save_pretrained(tmp_path / "narrow")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=message), engine(**options):
        pass
