"""`generate(tree="auto")`: choices on simulated machines, and the same text for any choice."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("transformers")

from support.drafters import SUBJECTS
from support.models import SAMPLING, lists, prompts_of, tiny
from support.tuner import Machine, fresh, run

from pagedtree import DraftTree, select_nodes
from pagedtree.check_draft import rows_of
from pagedtree.generation.drafters import NgramDrafter
from pagedtree.generation.tree_tuner import Outcome, Plan, StepCosts, TreeTuner
from pagedtree.integrations.transformers import ModelDrafter, generate

pytestmark = pytest.mark.usefixtures("one_thread")
SUBJECT = "full"


LOSERS = [
    dict(acceptance=[0.0, 0.0], batch=1),  # a drafter that is never right
    dict(acceptance=[0.3, 0.1], batch=8, row=0.2),  # rows are expensive
    dict(acceptance=[0.5, 0.1], batch=1, level=0.9),  # the draft model is expensive, too
    dict(acceptance=[0.2, 0.1], batch=64, row=0.02),
]
WINNERS = [
    dict(acceptance=[0.7, 0.15, 0.05], batch=1),
    dict(acceptance=[0.7, 0.15, 0.05], batch=4),
    dict(acceptance=[0.6, 0.2], batch=1, level=0.2),
    dict(acceptance=[0.5, 0.2], batch=8, row=0.005),
]


def seconds_of(parameters: dict, tokens: int = 96) -> tuple[float, float, float]:
    """Returns noisy seconds without drafts, with chosen drafts from scratch, and with whole trees."""
    noise = 0.2
    chosen = whole = 0.0
    seeds = 4 if parameters.get("batch", 1) < 64 else 1
    for seed in range(seeds):
        machines = [Machine(**parameters, noise=noise, seed=seed) for _ in range(2)]
        chosen += run(machines[0], fresh(machines[0]), tokens)[0]
        whole += run(machines[1], None, tokens)[0]
    return seeds * tokens * (1 + noise), chosen, whole


@pytest.mark.parametrize("machine", LOSERS)
def test_drafts_that_do_not_pay_cost_little(machine):
    plain, chosen, whole = seconds_of(machine)
    assert chosen < 1.1 * plain < whole


@pytest.mark.parametrize("machine", WINNERS)
def test_drafts_that_pay_are_used_from_the_start(machine):
    """Chosen trees gain at least 70 % of the fixed tree's gain within 96 tokens, from scratch."""
    plain, chosen, whole = seconds_of(machine)
    assert plain / chosen - 1 > 0.7 * (plain / whole - 1) > 0


def test_each_token_saves_its_row_and_counts_of_rows_are_few():
    tuner = TreeTuner(4)
    tuner.costs[2] = StepCosts(plain=1.0, once=0.0, row=0.1, level=1e-9)
    plan = tuner.plan([30, 10])
    assert plan.weights == pytest.approx([0.8 * 0.75 + 0.1, 0.8 * 0.25 + 0.1])
    assert plan.count([0.9] * 12) == 12 and plan.count([0.9] * 12 + [0.0] * 20) == 8
    tuner.found = 1e9  # never end the batch earlier
    assert tuner.plan([30, 10]).weights == pytest.approx([0.1, 0.1])


def test_a_change_of_the_text_shows():
    machine = Machine([0.7, 0.15], row=0.05)
    tuner = fresh(machine)
    run(machine, tuner, 300)
    machine.acceptance = [0.0, 0.0]
    seconds, rows = run(machine, tuner, 600)
    assert rows[-200:].count(0) > 180
    assert seconds < 600 * machine.plain * 1.05
    machine.acceptance = [0.8, 0.1]
    seconds, _ = run(machine, tuner, 800)
    assert seconds < 0.6 * 800 * machine.plain


def test_looks_take_one_percent_of_the_time():
    """A drafter that is never right and costs a third of a step is asked once in 30 steps."""
    machine, looks = Machine([0.0], level=0.3, row=0.1), []
    tuner = fresh(machine)
    plan_of = TreeTuner.plan

    def note(self, *arguments):
        plan = plan_of(self, *arguments)
        looks.append(plan.depth is not None)
        return plan

    with patch.object(TreeTuner, "plan", note):
        run(machine, tuner, 400)
    assert 3 <= sum(looks[-300:]) <= 12


def test_level_times_exclude_reading():
    """Reading before the first level is no time of the levels."""
    tuner, machine = TreeTuner(2, grows_by_level=True), Machine([0.9])
    tuner.learn_reading(1000, 1.0)
    path, tokens = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 0, 1000]])
    for _ in range(8):
        plan = tuner.plan([500], unread=200.0)
        if plan.depth is None:
            tuner.learn(plan, Outcome(1.0, path[:, :1], tokens[:, :1]))
            continue
        selection = plan.keep(machine.draft(DraftTree.chain(2), {0: 0}))
        drafting = 0.25 * plan.depth + 200.0 * 0.001
        tuner.learn(plan, Outcome(1.02 + drafting, path, tokens, drafting, selection))
    assert tuner.costs[1].drafter(2) == pytest.approx(0.5, rel=0.1)


def test_acceptance_counts_all_children_of_accepted_nodes():
    """Unverified children of an accepted node count, too; nodes below a rejected one do not."""
    tuner, machine = TreeTuner(3), Machine([0.6])
    plan = tuner.plan([500])
    proposal = machine.draft(DraftTree.full([2, 2]), {0: 0})  # nodes 1, 2; 3, 4 below 1; 5, 6 below 2
    tokens = torch.tensor([0, 7, 8, 9, 10, 11, 12])
    selection = plan.keep(proposal._replace(draft_tokens=tokens))
    part = replace(selection, rows=torch.tensor([0, 2], dtype=torch.int32), num_drafted=1)
    tuner.learn(plan, Outcome(1.0, torch.tensor([[0, 1]]), torch.tensor([[8, 12]]), 0.0, part))
    counts_by_kind = {kind: counts for kind, counts in tuner.odds._seen.items()}
    first, second = (min(int(4 * (0.5 + rank) ** 0.5), 11) for rank in (0, 1))
    assert counts_by_kind == {first: (0.0, pytest.approx(1.95)), second: (pytest.approx(1.95), pytest.approx(1.95))}
    assert tuner.by_depth._seen == {1: (1.0, 1.0), 2: (1.0, 1.0)}


@pytest.fixture(autouse=True)
def whole_trees():
    """Leaves the default on."""


# The depth of each step; every second or third has no drafts.
SCHEDULE = [None, 1, 2, None, None, 2, 3]


@pytest.fixture
def scheduled(monkeypatch):
    """The tuner follows SCHEDULE and drops some nodes every other time."""
    steps = []
    plan_of, keep = TreeTuner.plan, Plan.keep

    def plan(self, remaining, unread, others_wait):
        assert min(remaining) > 0 and unread >= 0
        steps.append(SCHEDULE[len(steps) % len(SCHEDULE)])
        return replace(plan_of(self, remaining, unread, others_wait), depth=steps[-1])

    def keep_some(self, proposal, confidence):
        assert confidence is None or len(confidence) >= proposal.trees.cu_nodes[-1]
        whole = keep(self, proposal, confidence)
        trees = proposal.trees
        if len(steps) % 2 or trees.max_nodes == 1:
            return replace(whole, draft=proposal, rows=None, num_drafted=len(trees.parents) - trees.batch_size)
        scores = -trees.depths.float()
        part, rows = select_nodes(trees, scores, max(len(scores) * 2 // 3, trees.batch_size))
        return replace(whole, draft=rows_of(proposal, part, rows), rows=rows, num_drafted=len(rows) - trees.batch_size)

    monkeypatch.setattr(TreeTuner, "plan", plan)
    monkeypatch.setattr(Plan, "keep", keep_some)
    return steps


@pytest.mark.each_value
@pytest.mark.parametrize("params", [None, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "name", ["ngram tree", "suffix", "medusa", "medusa best first", "EAGLE", "draft model", "block", "MTP", "combined"]
)
def test_the_text_does_not_depend_on_the_trees(model, scheduled, name, params):
    prompts = prompts_of((5, 21, 1, 34), seed=3)
    plain, _ = generate(model, prompts, max_new_tokens=24, params=params)
    drafter = SUBJECTS["full"].drafter(name)
    for options in ({}, {"n": 2, "page_size": 4, "num_pages": 40}, {"max_batch_tokens": 8}):
        expected = plain if "n" not in options else generate(model, prompts, max_new_tokens=24, params=params, n=2)[0]
        found, stats = generate(model, prompts, drafter=drafter, max_new_tokens=24, params=params, **options)
        assert lists(found) == lists(expected)
        assert 0 < stats.drafted_steps < stats.steps
    assert len(scheduled) > len(SCHEDULE)


def test_nothing_is_done_before_the_first_token(model, scheduled, monkeypatch):
    """Setup of drafts must not delay it."""
    events = []

    def note(owner, name, event):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: events.append(event) or function(*args, **options))

    note(TreeTuner, "plan", "tuner")
    drafter = ModelDrafter(tiny(1), num_nodes=12, depth=3, width=3)
    note(drafter.packed, "use", "draft model")
    for _ in range(2):
        prompts, on_step = prompts_of((5, 21), seed=3), lambda step: events.append("step")
        generate(model, prompts, drafter=drafter, max_new_tokens=12, on_step=on_step)
        assert events[0] == "step" and sorted(set(events)) == ["draft model", "step", "tuner"]
        assert events.count("draft model") == 1
        events.clear()


def test_other_choices_are_refused(model):
    with pytest.raises(ValueError, match="tree: expected None or \"auto\", got 'best'"):
        generate(model, [[1, 2]], drafter=NgramDrafter(8), max_new_tokens=4, tree="best")


def test_drafts_evict_no_sequence(model, scheduled):
    prompts, options = prompts_of((5, 21, 9, 14), seed=3), dict(max_new_tokens=24, page_size=4, num_pages=42)
    _, plain = generate(model, prompts, **options)
    _, drafted = generate(model, prompts, drafter=NgramDrafter(12), tree="auto", **options)
    assert drafted.evictions == plain.evictions == 0 < drafted.drafted_steps
