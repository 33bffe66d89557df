"""`generate(tree="auto")`: the choice on made-up machines, and the same text whatever is chosen."""

from __future__ import annotations

import time
from unittest.mock import patch

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from generate_case import SAMPLING, lists, prompts_of, tiny

from pagedtree import DraftTree, TreeBatch
from pagedtree.generation.tree_tuner import LOSS_SHARE, TreeTuner
from pagedtree.integrations.transformers import (
    MedusaDrafter,
    MedusaHeads,
    ModelDrafter,
    NgramDrafter,
    generate,
    medusa_tree,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Machine:
    """A machine whose steps take `plain` seconds, and more per node and level; children are accepted by chance."""

    def __init__(self, acceptance, *, plain=1.0, node=0.01, level=0.05, noise=0.0, batch=1, seed=0):
        self.acceptance, self.plain, self.node, self.level = acceptance, plain, node, level
        self.noise, self.batch, self.rng = noise, batch, np.random.default_rng(seed)

    def seconds(self, tree: DraftTree) -> float:
        cost = self.plain + self.node * self.batch * (tree.num_nodes - 1) + self.level * tree.max_depth
        return cost * (1 + self.noise * self.rng.standard_exponential())

    def path(self, tree: DraftTree) -> list[int]:
        path, node = [0], 0
        while True:
            children, child = [], int(tree.first_child[node])
            while child >= 0:
                children.append(child)
                child = int(tree.next_sibling[child])
            rates = self.acceptance[: len(children)]
            pick = self.rng.choice(len(rates) + 1, p=[*rates, 1 - sum(rates)])
            if pick == len(rates):
                return path + [-1] * (tree.max_depth + 1 - len(path))
            node = children[pick]
            path.append(node)


ROOT = DraftTree.chain(0)


@patch.object(time, "perf_counter", lambda: 0.0)  # the tuner's own time on this machine does not count on that one
def run(machine: Machine, tuner: TreeTuner, tokens: int) -> tuple[float, list[int]]:
    """Seconds until each sequence has so many tokens; nodes of the trees of the steps."""
    seconds, sizes = 0.0, []
    remaining = [tokens] * machine.batch
    tuner.begin()
    tuner.cannot_rehearse()
    while remaining:
        tree = tuner.next_tree(remaining) or ROOT
        paths = torch.tensor([machine.path(tree) for _ in remaining], dtype=torch.int32)
        took = machine.seconds(tree)
        tuner.observe(remaining, took, TreeBatch.from_trees([tree] * len(remaining)), paths)
        seconds += took
        sizes.append(tree.num_nodes)
        remaining = [left - n for left, n in zip(remaining, (paths >= 0).sum(dim=1).tolist(), strict=True) if left > n]
    return seconds, sizes


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize(
    "machine",
    [
        dict(acceptance=[0.0, 0.0], batch=1),  # a drafter that is never right
        dict(acceptance=[0.3, 0.1], batch=8, node=0.2),  # nodes are dear
        dict(acceptance=[0.5, 0.1], batch=1, level=0.9),  # the draft model is dear, too
        dict(acceptance=[0.2, 0.1], batch=64, node=0.02),
    ],
)
def test_drafts_that_do_not_pay_cost_next_to_nothing(machine, noise):
    tokens = 192
    machine = Machine(**machine, noise=noise)
    tuner = TreeTuner(16, 5)
    tuner.observe_reading(100, 100 * machine.node)
    seconds, sizes = run(machine, tuner, tokens)
    plain = tokens * machine.plain * (1 + noise)
    # Noise of 20 % leaves 1.5 % in the mean of 192 steps.
    assert seconds <= plain * (1 + LOSS_SHARE + (0.03 if noise else 0.002)) + machine.plain
    assert sizes[-1] == 1 or sizes.count(1) > 0.8 * len(sizes)


@pytest.mark.parametrize("batch, node", [(1, 0.01), (4, 0.01)])
def test_drafts_that_pay_are_used(batch, node):
    machine = Machine([0.7, 0.15, 0.05], batch=batch, node=node)
    seconds, sizes = run(machine, TreeTuner(16, 5), 600)
    assert seconds < 0.55 * 600 * machine.plain
    assert max(sizes) > 6 and sizes.count(1) < 0.2 * len(sizes)


def test_the_tree_follows_its_cost():
    dear, cheap = (run(Machine([0.6, 0.2], node=node), TreeTuner(16, 8), 800)[1] for node in (0.25, 0.001))
    assert np.median(dear[-50:]) < np.median(cheap[-50:]) == 16


def test_a_change_of_the_text_shows():
    tuner = TreeTuner(16, 5)
    machine = Machine([0.7, 0.15], node=0.05)
    run(machine, tuner, 300)
    machine.acceptance = [0.0, 0.0]
    seconds, sizes = run(machine, tuner, 600)
    assert sizes[-200:].count(1) > 180
    assert seconds < 600 * machine.plain * 1.06
    machine.acceptance = [0.8, 0.1]
    seconds, _ = run(machine, tuner, 800)
    assert seconds < 0.7 * 800 * machine.plain


def test_batch_sizes_are_judged_apart():
    tuner = TreeTuner(16, 5)
    assert run(Machine([0.7, 0.2], batch=1), tuner, 400)[1][-2:] != [1, 1]
    assert run(Machine([0.3, 0.1], batch=32, node=0.05), tuner, 400)[1][-2:] == [1, 1]
    assert run(Machine([0.7, 0.2], batch=1), tuner, 50)[1][-2:] != [1, 1]


def test_what_a_drafter_has_to_read_first_must_pay():
    tuner = TreeTuner(16, 5)
    run(Machine([0.7, 0.2]), tuner, 400)
    tuner.observe_reading(100, 100.0)
    assert tuner.next_tree([100], unread=5) is not None
    assert tuner.next_tree([100], unread=500) is None


def test_one_slow_step_is_not_held_against_drafts():
    tuner, machine = TreeTuner(16, 5), Machine([0.7, 0.2])
    run(machine, tuner, 300)
    tree = tuner.next_tree([100])
    assert tree is not None and tree.num_nodes > 1
    path = torch.tensor([[0] + [-1] * tree.max_depth], dtype=torch.int32)
    tuner.observe([100], 1000.0, TreeBatch.from_trees([tree]), path)
    assert tuner.next_tree([100]) is not None


@pytest.fixture(scope="module")
def model():
    return tiny(0)


def drafters(model):
    heads = MedusaHeads(model.config.hidden_size, 3, model.get_output_embeddings())
    return {
        "n-gram": NgramDrafter(12, remember=2),
        "Medusa": MedusaDrafter(heads, medusa_tree(3, 12)),
        "draft model": ModelDrafter(tiny(1), num_nodes=12, depth=3, width=3),
    }


# Every second or third step without drafts, and trees of changing size.
SCHEDULE = [None, DraftTree.chain(1), DraftTree.full([3, 2]), None, None, DraftTree.chain(2), DraftTree.full([2, 1, 1])]


@pytest.fixture
def scheduled(monkeypatch):
    """A tuner that goes through SCHEDULE."""
    steps = []

    def next_tree(self, remaining, *, unread, others_wait):
        assert min(remaining) > 0 and unread >= 0
        steps.append(SCHEDULE[len(steps) % len(SCHEDULE)])
        return steps[-1]

    monkeypatch.setattr(TreeTuner, "next_tree", next_tree)
    return steps


@pytest.mark.parametrize("params", [None, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["n-gram", "Medusa", "draft model"])
def test_the_text_does_not_depend_on_the_trees(model, scheduled, name, params):
    prompts = prompts_of((5, 21, 1, 34), seed=3)
    plain, _ = generate(model, prompts, max_new_tokens=24, params=params)
    drafter = drafters(model)[name]
    for options in ({}, {"n": 2, "page_size": 4, "num_pages": 40}, {"max_batch_tokens": 8}):
        expected = plain if "n" not in options else generate(model, prompts, max_new_tokens=24, params=params, n=2)[0]
        found, stats = generate(
            model, prompts, drafter=drafter, max_new_tokens=24, params=params, tree="auto", **options
        )
        assert lists(found) == lists(expected)
        assert 0 < stats.drafted_steps < stats.steps
    assert len(scheduled) > len(SCHEDULE)


def test_the_draft_model_catches_up_after_steps_without_drafts(model, scheduled):
    """Chains of the draft model's own greedy tokens are accepted whole, so one wrong row in its cache would show."""
    drafter = ModelDrafter(model, num_nodes=4, depth=3, width=1)
    _, stats = generate(model, prompts_of((5, 21), seed=3), drafter=drafter, max_new_tokens=60, tree="auto")
    depths = {tree.max_depth for tree in SCHEDULE if tree is not None}
    for sequence in stats.sequences:
        assert set(sequence.accepted[:-1]) <= depths | {0} and max(sequence.accepted) == 3


def test_what_was_learnt_stays_with_drafter_and_model(model):
    drafter, prompts = NgramDrafter(8), prompts_of((9,), seed=1)
    generate(model, prompts, drafter=drafter, max_new_tokens=12, tree="auto")
    tuner = drafter.tuner[1]
    assert tuner.costs
    generate(model, prompts, drafter=drafter, max_new_tokens=12, tree="auto")
    assert drafter.tuner[1] is tuner
    generate(tiny(2), prompts, drafter=drafter, max_new_tokens=12, tree="auto")
    assert drafter.tuner[1] is not tuner


def test_nothing_is_done_before_the_first_token(model, scheduled, monkeypatch):
    """The first token must not wait for what drafts set up."""
    events = []

    def note(owner, name, event):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: events.append(event) or function(*args))

    note(TreeTuner, "begin", "tuner")
    drafter = ModelDrafter(tiny(1), num_nodes=12, depth=3, width=3)
    note(drafter.packed, "use", "draft model")
    for _ in range(2):
        generate(
            model,
            prompts_of((5, 21), seed=3),
            drafter=drafter,
            max_new_tokens=12,
            tree="auto",
            on_step=lambda step: events.append("step"),
        )
        assert events[0] == "step" and sorted(set(events)) == ["draft model", "step", "tuner"]
        assert events.count("tuner") == events.count("draft model") == 1
        events.clear()


def test_without_auto_the_drafter_uses_its_whole_tree(model, scheduled):
    drafter, prompts = NgramDrafter(8, max_branches=1), [[1, 2, 3, 4, 5, 6] * 4]
    generate(model, prompts, drafter=drafter, max_new_tokens=12, tree="auto")
    sizes = []
    generate(model, prompts, drafter=drafter, max_new_tokens=12, on_step=lambda r: sizes.append(r.trees.max_nodes))
    assert set(sizes[1:]) <= {1, 8} and 8 in sizes


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(tree="best"), "tree: expected None or \"auto\", got 'best'"),
        (dict(tree="auto", cuda_graph=True), "cuda_graph"),
    ],
)
def test_refusals(model, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, [[1, 2]], drafter=NgramDrafter(8), max_new_tokens=4, **options)


def test_auto_without_a_drafter_is_plain_decoding(model):
    prompts = prompts_of((9,), seed=1)
    assert lists(generate(model, prompts, max_new_tokens=8, tree="auto")[0]) == lists(
        generate(model, prompts, max_new_tokens=8)[0]
    )


def test_rehearsals_count_what_would_have_been_accepted():
    tuner = TreeTuner(16, 4)
    before = tuner.acceptance[:3].copy()
    tree = DraftTree.from_paths([[0], [1], [0, 0], [0, 0, 0]])
    trees = TreeBatch.from_trees([tree, tree, ROOT])
    drafts = [-1] * 9
    for parent, rank, token in ((0, 0, 7), (0, 1, 8)):
        node = int(tree.first_child[parent])
        for _ in range(rank):
            node = int(tree.next_sibling[node])
        drafts[node] = drafts[tree.num_nodes + node] = token
    # The second guess of one text, nothing of the other, and no guess: the first guess is never right.
    assert tuner.may_rehearse
    for _ in range(30):
        tuner.observe_rehearsal([9, 9, 9], drafts, trees, [[8, 9], [3, 7], [5]], time.perf_counter())
    assert tuner.acceptance[0, 0] < 0.15 < before[0, 0]
    assert tuner.acceptance[0, 1] == pytest.approx(1 / 3, abs=0.1)
    assert not tuner.may_rehearse, "a rehearsal has its share of the time"


def test_ngram_drafter_rehearses_as_it_proposes():
    tokens = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]])
    drafter = NgramDrafter(8, max_branches=1)
    lengths = torch.tensor([8], dtype=torch.int32)
    (drafts, trees, *_), (expected, *_) = drafter.rehearse(tokens, lengths), drafter.propose(tokens, lengths)
    assert torch.equal(drafts, expected) and drafts[1 : trees.parents.shape[0]].tolist()[:2] == [4, 5]
    drafter.use_tree(DraftTree.chain(1))
    assert torch.equal(drafter.rehearse(tokens, lengths)[0], expected), "use_tree does not narrow it"


@patch.object(time, "perf_counter", lambda: 0.0)
def rehearsed(machine: Machine, tuner: TreeTuner, tokens: int) -> tuple[float, int]:
    """As `run`, of one sequence whose drafter rehearses; how many of its steps had drafts."""
    seconds, drafted, remaining = 0.0, 0, tokens
    chain = DraftTree.chain(4)
    tuner.begin()
    while remaining > 0:
        tree = tuner.next_tree([remaining]) or ROOT
        if tree is ROOT and tuner.may_rehearse and remaining % 16 == 0:
            text = [7] * sum(node > 0 for node in machine.path(chain)) + [8]
            tuner.observe_rehearsal([remaining], [-1] + [7] * 4, TreeBatch.from_trees([chain]), [text], 0.0)
        path = torch.tensor([machine.path(tree)], dtype=torch.int32)
        took = machine.seconds(tree)
        tuner.observe([remaining], took, TreeBatch.from_trees([tree]), path)
        seconds, drafted = seconds + took, drafted + (tree is not ROOT)
        remaining -= int((path >= 0).sum())
    return seconds, drafted


def test_costs_of_a_slow_spell_are_not_kept_for_ever():
    """Rehearsals promise much, but the first drafts took so long that they do not pay."""
    tuner, machine = TreeTuner(16, 5), Machine([0.7, 0.1], level=1.5)
    slow = [rehearsed(machine, tuner, 96) for _ in range(8)]
    assert 1 < sum(drafted for _, drafted in slow) < 8
    assert sum(seconds for seconds, _ in slow) < 8 * 96 * (1 + LOSS_SHARE) + 2 * machine.plain
    machine.level = 0.05
    fast = [rehearsed(machine, tuner, 96) for _ in range(12)]
    assert sum(seconds for seconds, _ in fast[-4:]) < 0.6 * 4 * 96


class Uneven(Machine):
    """Every sequence but the last one takes all drafts; the last one takes none."""

    def paths(self, tree: DraftTree, remaining: list[int]) -> torch.Tensor:
        first = [0]
        while (child := int(tree.first_child[first[-1]])) >= 0:
            first.append(child)
        rows = [first + [-1] * (tree.max_depth + 1 - len(first))] * (len(remaining) - 1)
        return torch.tensor([*rows, [0] + [-1] * tree.max_depth], dtype=torch.int32)


@pytest.mark.parametrize("others_wait", [False, True])
def test_progress_is_that_of_the_last_sequence_unless_others_wait(others_wait):
    machine, tuner = Uneven([1.0], node=0.02, batch=4), TreeTuner(16, 5)
    remaining = [4000, 4000, 4000, 8000]  # the last one stays behind
    tuner.begin()
    tuner.cannot_rehearse()
    seconds, drafted = 0.0, 0
    for _ in range(192):
        tree = tuner.next_tree(remaining, others_wait=others_wait) or ROOT
        paths = machine.paths(tree, remaining)
        seconds += (took := machine.seconds(tree))
        tuner.observe(remaining, took, TreeBatch.from_trees([tree] * 4), paths)
        remaining = [left - n for left, n in zip(remaining, (paths >= 0).sum(dim=1).tolist(), strict=True)]
        drafted += tree.num_nodes > 1
    if others_wait:
        assert drafted > 120
    else:
        assert drafted < 20 and seconds < 192 * (1 + LOSS_SHARE) + 2 * machine.plain


def test_nobody_is_evicted_for_drafts(model, scheduled):
    prompts, options = prompts_of((5, 21, 9, 14), seed=3), dict(max_new_tokens=24, page_size=4, num_pages=42)
    _, plain = generate(model, prompts, **options)
    _, drafted = generate(model, prompts, drafter=NgramDrafter(12), tree="auto", **options)
    assert drafted.evictions == plain.evictions == 0 < drafted.drafted_steps


def test_plain_steps_judge_only_what_is_new(monkeypatch):
    """The promise of drafts takes as long to work out as 2 % of a small model's step."""
    tuner, judged = TreeTuner(16, 4), []
    tokens = TreeTuner._tokens
    monkeypatch.setattr(TreeTuner, "_tokens", lambda self, tree: judged.append(tree) or tokens(self, tree))
    wrong = [500] * 8, [-1, 5] * 8, TreeBatch.from_trees([DraftTree.chain(1)] * 8), [[6]] * 8
    path = torch.tensor([[0]], dtype=torch.int32)
    tuner.begin()
    for rehearsals in range(1, 4):
        tuner.observe_rehearsal(*wrong, time.perf_counter())
        for _ in range(20):
            assert tuner.next_tree([500]) is None
            tuner.observe([500], 1.0, TreeBatch.from_trees([ROOT]), path)
        assert len(judged) == rehearsals
    assert 0 < tuner.lost < 0.1, "what the tuner itself took"
