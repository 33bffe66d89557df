"""`generate(tree="auto")`: choices on simulated machines, and the same text for any choice; `choose_tree`."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drafters import SUBJECTS
from support.models import SAMPLING, lists, prompts_of, tiny
from support.tuner import ROOT, Machine, fresh, run

from pagedtree import Draft, DraftTree, TreeBatch, choose_tree, expected_tokens, select_nodes
from pagedtree.check_draft import rows_of
from pagedtree.generation.drafters import NgramDrafter
from pagedtree.generation.tree_tuner import Outcome, Plan, StepCosts, TreeTuner
from pagedtree.integrations.transformers import ModelDrafter, generate

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
    tuner.plan([30, 10, 5])
    assert tuner.costs[3].plain == 1.0  # a new batch size begins with the nearest one's costs


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
    first, second = (min(int(4 * (0.5 + rank) ** 0.5), 11) for rank in (0, 1))
    assert tuner.odds._seen == {first: (0.0, pytest.approx(1.95)), second: (pytest.approx(1.95), pytest.approx(1.95))}
    assert tuner.by_depth._seen == {1: (1.0, 1.0), 2: (1.0, 1.0)}
    assert plan.keep(proposal).num_drafted == 0  # a node is worth no more than the siblings before it
    tuner.learn(plan, Outcome(1.0, torch.tensor([[0, 1, 3]]), torch.tensor([[7, 9, 5]]), 0.0, selection))
    assert tuner.by_depth._seen[3] == (0.0, 1.0)  # the path ends at a leaf above the planned depth


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
    prompts, options = prompts_of((5, 21, 1, 34), seed=3), {"max_new_tokens": 24, "params": params, "n": 2}
    expected, _ = generate(model, prompts, **options)
    few = {"page_size": 4, "num_pages": 40, "max_batch_tokens": 8}
    found, stats = generate(model, prompts, drafter=SUBJECTS["full"].drafter(name), **few, **options)
    assert lists(found) == lists(expected)
    assert 0 < stats.drafted_steps < stats.steps and len(scheduled) > len(SCHEDULE)


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


# ---- texts of a real model, replayed at the measured costs of its steps

TOKENS = 96
# Answers of SmolLM2-135M-Instruct to 16 prompts of each kind in bfloat16; a token is the place of its first occurrence.
ROWS = json.loads(Path(__file__).with_name("recorded_texts.json").read_text(encoding="utf-8"))["rows"]
# Two cores with AVX-512: seconds of a step without drafts, of any drafts, and of each drafted row, by the batch size.
SIZES, PLAIN, ONCE, ROW = (1, 4, 8), (31.2e-3, 32.0e-3, 37.2e-3), (0.0, 5.2e-3, 2.5e-3), (0.95e-3, 0.85e-3, 0.83e-3)


class Recorded(Machine):
    """Replays texts in one batch."""

    def __init__(self, rows: list[dict], drafter: NgramDrafter | None) -> None:
        self.rows, self.drafter, self.batch = rows, drafter, len(rows)
        self.noise, self.rng = 0.0, np.random.default_rng()
        texts = [torch.tensor(row["prompt"] + row["text"]) for row in rows]
        self.tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)

    def target(self, drafted: int, size: int) -> float:
        plain, once, row = (float(np.interp(size, SIZES, of_sizes)) for of_sizes in (PLAIN, ONCE, ROW))
        return plain + (once + row * drafted if drafted else 0.0)

    def drafting(self, levels: int, size: int) -> float:
        return 0.3e-3 + 0.06e-3 * size if levels else 0.0

    def draft(self, tree: DraftTree, places: dict[int, int]) -> Draft:
        if tree is ROOT:
            return Draft(torch.zeros(len(places), dtype=torch.int64), TreeBatch.from_trees([ROOT] * len(places)))
        lengths = torch.tensor([len(self.rows[s]["prompt"]) + place for s, place in places.items()])
        return self.drafter.propose(self.tokens[[*places]], lengths.int())

    def confidence(self) -> torch.Tensor:
        return self.drafter.confidence()

    def end_of(self, sequence: int, tokens: int) -> int:
        return len(self.rows[sequence]["text"])

    def path(self, draft: Draft, b: int, sequence: int, place: int) -> tuple[list[int], list[int]]:
        begin, end = draft.trees.cu_nodes[b : b + 2].tolist()
        parents, drafted = draft.trees.parents[begin:end].tolist(), draft.draft_tokens[begin:end].tolist()
        path, tokens = [0], []
        for token in self.rows[sequence]["text"][place:]:
            tokens.append(token)
            child = [n for n, parent in enumerate(parents) if parent == path[-1] and drafted[n] == token]
            if not child:
                break
            path += child
        return path[: len(tokens)], tokens


def seconds(rows: list[dict], drafter: NgramDrafter, is_chosen: bool = False) -> float:
    tuner = TreeTuner(drafter.max_depth) if is_chosen else None
    if tuner is not None:
        num_read = sum(len(row["prompt"]) for row in rows)
        tuner.learn_reading(num_read, 0.9e-3 * num_read)
    return run(Recorded(rows, drafter), tuner, TOKENS, DraftTree.chain(drafter.max_depth))[0]


def plain_seconds(rows: list[dict]) -> float:
    sizes = [sum(len(row["text"]) > place for row in rows) for place in range(TOKENS)]
    return sum(Recorded(rows, None).target(0, size) for size in sizes if size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", dict.fromkeys(row["kind"] for row in ROWS))
def test_chosen_trees_are_near_the_best_choice(kind: str, size: int) -> None:
    """A kind's median speed is at least 0.97 of plain decoding, 0.95 of the best of plain, chains and fixed trees."""
    of_kind = [row for row in ROWS if row["kind"] == kind][: 8 * size]
    over_plain, over_best = [], []
    for first in range(0, len(of_kind), size):
        rows = of_kind[first : first + size]
        plain, chosen = plain_seconds(rows), seconds(rows, NgramDrafter(32), is_chosen=True)
        fixed = [seconds(rows, NgramDrafter(16, max_branches=branches)) for branches in (1, 4)]
        over_plain.append(plain / chosen)
        over_best.append(min(plain, *fixed) / chosen)
    print(over_plain, over_best)
    assert median(over_plain) >= 0.97 and median(over_best) >= 0.95


# ---- `choose_tree` against all trees of small sizes


@cache
def all_forests(num_nodes: int, depth: int, rank: int, num_ranks: int) -> list[tuple]:
    """Forests are nested tuples; children have ranks from `rank`."""
    if num_nodes == 0:
        return [()]
    if depth == 0 or rank == num_ranks:
        return []
    return [
        (child, *siblings)
        for size in range(1, num_nodes + 1)
        for child in all_forests(size - 1, depth - 1, 0, num_ranks)
        for siblings in all_forests(num_nodes - size, depth, rank + 1, num_ranks)
    ]


def parents_of(forest: tuple) -> list[int]:
    parents, queue = [-1], [(0, forest)]
    for node, children in queue:
        for child in children:
            parents.append(node)
            queue.append((len(parents) - 1, child))
    return parents


def rate(tree: DraftTree, acceptance, costs, level_cost) -> float:
    return expected_tokens(tree, acceptance) / (costs[tree.num_nodes - 1] + level_cost * tree.max_depth)


@st.composite
def problems(draw):
    depth, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    unit = st.floats(0, 1, allow_subnormal=False)
    levels = np.array([[draw(unit) for _ in range(ranks)] for _ in range(depth)])
    levels /= np.maximum(levels.sum(axis=1, keepdims=True), 1.0)  # ranks in any order
    costs = sorted(draw(st.floats(0.1, 2.0)) for _ in range(6))
    return levels, costs, draw(st.sampled_from([0.0, 0.2, 1.0]))


@settings(max_examples=80, deadline=None)
@given(problems())
def test_no_tree_has_a_higher_rate(problem):
    levels, costs, level_cost = problem
    tree = choose_tree(levels, lambda n: costs[n - 1], max_nodes=6, level_cost=level_cost)
    rates = [
        rate(DraftTree(parents_of(forest)), levels, costs, level_cost)
        for size in range(6)
        for forest in all_forests(size, len(levels), 0, levels.shape[1])
    ]
    assert rate(tree, levels, costs, level_cost) == pytest.approx(max(rates), rel=1e-9)


def test_every_depth_takes_the_same_row_of_one():
    tree = choose_tree([0.6, 0.2], lambda n: 1.0, max_nodes=40, max_depth=5)
    assert tree.num_nodes == 40 and tree.max_depth == 5
    assert expected_tokens(tree, [0.6, 0.2]) == pytest.approx(expected_tokens(tree, [[0.6, 0.2]] * 5))


def test_a_size_costs_at_least_as_much_as_the_smaller_ones():
    tree = choose_tree([0.5], lambda n: 0.1 if n == 3 else 2.0, max_nodes=4)
    assert tree.parents.tolist() == [-1, 0, 1, 2]


def test_expected_tokens_of_a_tree():
    tree = DraftTree.from_paths([[0], [1], [0, 0], [2]])
    assert expected_tokens(tree, [[0.5, 0.25], [0.4, 0.1]]) == pytest.approx(1 + 0.5 + 0.25 + 0.5 * 0.4)
    assert expected_tokens(DraftTree.chain(0), [0.5]) == 1.0
    assert expected_tokens(DraftTree.chain(3), [0.5]) == pytest.approx(1.875)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(acceptance=[]), r"acceptance: expected probabilities \[R\] or \[D, R\], got shape"),
        (dict(acceptance=[0.5, 1.5]), "acceptance: expected probabilities that sum to at most 1 per row, got"),
        (dict(acceptance=[0.6, 0.6]), "acceptance: expected probabilities that sum to at most 1 per row, got"),
        (dict(acceptance=[float("nan")]), "acceptance: expected probabilities that sum to at most 1 per row, got"),
        (dict(max_nodes=0), "max_nodes: expected 1 to 1024, got 0"),
        (dict(max_nodes=1025), "max_nodes: expected 1 to 1024, got 1025"),
        (dict(max_depth=0), "max_depth: expected at least 1, got 0"),
        (dict(level_cost=-1.0), "level_cost: expected a finite number of at least 0, got -1.0"),
        (dict(step_cost=lambda n: 2.0 - n), "step_cost: expected a positive, finite number, got 0.0 for 2 nodes"),
        (dict(step_cost=lambda n: float("nan")), "step_cost: expected a positive, finite number, got nan for 1 nodes"),
    ],
)
def test_refusals(change, message):
    arguments = {"acceptance": [0.5], "step_cost": lambda n: 1.0} | change
    with pytest.raises(ValueError, match=message):
        choose_tree(arguments.pop("acceptance"), arguments.pop("step_cost"), **arguments)
