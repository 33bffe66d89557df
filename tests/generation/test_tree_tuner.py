"""`generate(tree="auto")`: the choice on made-up machines, and the same text whatever is chosen."""

from __future__ import annotations

import itertools
import time
from unittest.mock import patch

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from generate_case import SAMPLING, lists, prompts_of, tiny, tiny_eagle

from pagedtree import Draft, DraftTree, TreeBatch
from pagedtree.generation import tree_tuner
from pagedtree.generation.batch_progress import BatchProgress
from pagedtree.generation.node_budget import NodeBudget
from pagedtree.generation.tree_tuner import TreeTuner
from pagedtree.integrations.transformers import (
    CombinedDrafter,
    EagleDrafter,
    MedusaDrafter,
    MedusaHeads,
    ModelDrafter,
    NgramDrafter,
    generate,
    medusa_tree,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Machine:
    """A machine whose steps take `plain` seconds, and more per row and level; children are accepted by chance.

    What is accepted at a place of a text does not depend on the steps before, so that one text can be generated in
    several ways. ease: how much likelier than `acceptance` guesses are, for each sequence. guesses: how often there are
    any.
    """

    def __init__(
        self, acceptance, *, plain=1.0, row=0.01, level=0.05, noise=0.0, batch=1, ease=(1.0,), guesses=1.0, seed=0
    ):
        self.acceptance, self.plain, self.row, self.level = acceptance, plain, row, level
        self.noise, self.batch, self.rng = noise, batch, np.random.default_rng(seed)
        self.ease, self.guesses = ease, guesses
        self.text = self.rng.random((batch, 2000, 2))

    def seconds(self, rows: int, levels: float) -> float:
        cost = self.plain + self.row * (rows - self.batch) + self.level * levels
        return cost * (1 + self.noise * self.rng.standard_exponential())

    def draft(self, tree: DraftTree, places: dict[int, int]) -> Draft:
        """places: how many tokens each sequence of the batch has."""
        guessed = [self.text[sequence, place, 1] < self.guesses for sequence, place in places.items()]
        trees = TreeBatch.from_trees([tree if guess else ROOT for guess in guessed], max_nodes=tree.num_nodes)
        return Draft(ranks_of(trees), trees)

    def path(self, draft: Draft, b: int, sequence: int, place: int) -> tuple[list[int], list[int]]:
        """Accepted nodes, and the token behind each. A node's draft token is its rank."""
        begin, end = draft.trees.cu_nodes[b : b + 2].tolist()
        parents, ranks = draft.trees.parents[begin:end].tolist(), draft.draft_tokens[begin:end].tolist()
        rates = np.cumsum(self.acceptance) * self.ease[sequence % len(self.ease)]
        path, tokens = [0], []
        while True:
            rank = int(np.searchsorted(rates, self.text[sequence, place + len(path) - 1, 0], side="right"))
            tokens.append(rank if rank < len(rates) else 1000)  # one that nobody drafts
            child = [n for n, parent in enumerate(parents) if parent == path[-1] and ranks[n] == tokens[-1]]
            if not child:
                return path, tokens
            path += child


ROOT, WHOLE = DraftTree.chain(0), medusa_tree(5, 16)


def ranks_of(trees: TreeBatch) -> torch.Tensor:
    """Each node's place among its siblings."""
    ranks, offsets = torch.zeros_like(trees.parents), trees.cu_nodes.tolist()
    for begin, end in itertools.pairwise(offsets):
        for node, sibling in enumerate(trees.next_sibling[begin:end].tolist()):
            if sibling >= 0:
                ranks[begin + sibling] = ranks[begin + node] + 1
    return ranks.long()


@patch.object(time, "perf_counter", lambda: 0.0)  # the tuner's own time on this machine does not count on that one
def run(machine: Machine, tuner: TreeTuner, tokens: int, whole: DraftTree = WHOLE) -> tuple[float, list[int]]:
    """Seconds until each sequence has so many tokens; rows besides the roots of each step."""
    seconds, rows = 0.0, []
    places = dict.fromkeys(range(machine.batch), 0)
    tuner.begin()
    while places:
        remaining = {sequence: tokens - place for sequence, place in places.items()}
        draft, levels = machine.draft(ROOT, places), 0.0
        if tuner.wants_drafts(remaining):
            levels = (tuner.tree or whole).max_depth
            draft, _ = tuner.narrow(machine.draft(tuner.tree or whole, places), None, list(places))
        paths, texts = zip(*(machine.path(draft, b, *each) for b, each in enumerate(places.items())), strict=True)
        accepted, tokens_after = (torch.full((len(paths), 1 + 8), -1, dtype=torch.int32) for _ in range(2))
        for b, (path, text) in enumerate(zip(paths, texts, strict=True)):
            accepted[b, : len(path)], tokens_after[b, : len(path)] = torch.tensor(path), torch.tensor(text)
        rows.append(int(draft.trees.cu_nodes[-1]) - len(paths))
        took = machine.seconds(rows[-1] + machine.batch, levels)
        tuner.observe(list(places), took, accepted, tokens_after, machine.level * levels)
        seconds += took
        reached = {s: place + len(path) for (s, place), path in zip(places.items(), paths, strict=True)}
        places = {s: place for s, place in reached.items() if place < tokens}
    return seconds, rows


def fixed(machine: Machine, tokens: int, whole: DraftTree = WHOLE) -> float:
    """Seconds with the whole tree in every step."""
    with (
        patch.object(TreeTuner, "wants_drafts", lambda self, remaining: True),
        patch.object(TreeTuner, "narrow", lambda self, draft, *_: (draft, None)),
        patch.object(TreeTuner, "observe", lambda self, *_: None),
        patch.object(TreeTuner, "tree", None, create=True),
    ):
        return run(machine, TreeTuner(whole.num_nodes, whole.max_depth), tokens, whole)[0]


LOSERS = [
    dict(acceptance=[0.0, 0.0], batch=1),  # a drafter that is never right
    dict(acceptance=[0.3, 0.1], batch=8, row=0.2),  # rows are dear
    dict(acceptance=[0.5, 0.1], batch=1, level=0.9),  # the draft model is dear, too
    dict(acceptance=[0.2, 0.1], batch=64, row=0.02),
]


def seconds_of(parameters: dict, noise: float, tokens: int = 96) -> tuple[float, float, float]:
    """Seconds without drafts, with chosen ones, from scratch, and with the whole tree in each step."""
    chosen = whole = 0.0
    seeds = 4 if parameters.get("batch", 1) < 64 else 1
    for seed in range(seeds):
        machines = [Machine(**parameters, noise=noise, seed=seed) for _ in range(2)]
        tuner = TreeTuner(16, 5)
        tuner.observe_reading(100, 100 * machines[0].row / 3)
        chosen += run(machines[0], tuner, tokens)[0]
        whole += fixed(machines[1], tokens)
    return seeds * tokens * (1 + noise), chosen, whole


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("machine", LOSERS)
def test_drafts_that_do_not_pay_cost_little(machine, noise):
    plain, chosen, whole = seconds_of(machine, noise)
    assert chosen < (1.05 if noise == 0.0 else 1.1) * plain < whole


WINNERS = [
    dict(acceptance=[0.7, 0.15, 0.05], batch=1),
    dict(acceptance=[0.7, 0.15, 0.05], batch=4),
    dict(acceptance=[0.6, 0.2], batch=1, level=0.2),
    dict(acceptance=[0.8, 0.1], batch=2, guesses=0.5),  # as n-grams, which often have no guess at all
    dict(acceptance=[0.5, 0.2], batch=8, row=0.005),
]


@pytest.mark.parametrize("noise, share", [(0.0, 0.85), (0.2, 0.7)])
@pytest.mark.parametrize("machine", WINNERS)
def test_drafts_that_pay_are_used_from_the_start(machine, noise, share):
    """At least 85 % of what the fixed tree gains, within 96 tokens and from scratch."""
    plain, chosen, whole = seconds_of(machine, noise)
    assert plain / chosen - 1 > share * (plain / whole - 1) > 0


def test_the_tree_follows_its_cost():
    dear, cheap = (run(Machine([0.6, 0.2], row=row), TreeTuner(16, 5), 300)[1] for row in (0.25, 0.001))
    assert np.median(dear[-50:]) < 5 < 10 < np.median(cheap[-50:])


def test_each_call_looks_for_the_best_tree():
    tuner, searched = TreeTuner(16, 5), []
    with patch.object(tree_tuner, "choose_tree", lambda *_, **__: searched.append(1) or DraftTree.chain(2)):
        for _ in range(2):
            tuner.begin()
            tuner.levels = None
            tuner.observe([0], 1000.0, torch.zeros(1, 1), torch.zeros(1, 1))
            tuner.has_proof = tuner.is_warm = True
            assert tuner.wants_drafts({0: 500})
    assert searched == [1, 1]


def test_easy_sequences_get_the_nodes():
    """Where rows are dear, half of the sequences are worth them; but not if they are far ahead of the others."""
    machine, tuner = Machine([0.5, 0.1], row=0.03, batch=8), TreeTuner(16, 5)
    tuner.observe_reading(100, 1.0)
    run(machine, tuner, 100)
    for others_wait, remaining in ((True, [100] * 8), (True, [40, 100] * 4), (False, [40, 100] * 4)):
        tuner.budget._native.of_sequences = {s: (0.0, 60.0) if s % 2 else (9.0, 5.0) for s in range(8)}
        tuner.elapsed, tuner.resting_until = 100.0, 0.0
        assert tuner.wants_drafts(dict(enumerate(remaining)), others_wait=others_wait)
        narrowed, _ = tuner.narrow(machine.draft(WHOLE, dict.fromkeys(range(8), 0)), None, range(8))
        sizes = narrowed.trees.cu_nodes.diff()
        assert sizes[1::2].max() == 1
        assert sizes[::2].min() > 4 if others_wait else sizes.max() < 4


def test_a_change_of_the_text_shows():
    tuner = TreeTuner(16, 5)
    machine = Machine([0.7, 0.15], row=0.05)
    run(machine, tuner, 300)
    machine.acceptance = [0.0, 0.0]
    seconds, rows = run(machine, tuner, 600)
    assert rows[-200:].count(0) > 180
    assert seconds < 600 * machine.plain * 1.05
    machine.acceptance = [0.8, 0.1]
    seconds, _ = run(machine, tuner, 800)
    assert seconds < 0.6 * 800 * machine.plain


def test_drafts_that_lost_are_compared_and_come_back():
    """Texts that nobody guesses at first: plain steps with a look now and then, and drafts as soon as they pay."""
    machine, tuner = Machine([0.9, 0.05], level=0.001), TreeTuner(16, 5)
    machine.text[:, :40] = 1.0
    seconds, rows = run(machine, tuner, 120)
    assert rows[12:38].count(0) >= 24  # given up
    assert seconds < 40 * 1.06 + 80 / 2.5


def test_drafts_rest_where_nobody_guesses():
    """For ten times as long as they took; and they are back as soon as a guess was worth a row."""
    machine, tuner = Machine([0.9, 0.05], level=0.3, row=0.1), TreeTuner(16, 5)
    machine.text[:, :60, 0] = 1.0
    asked: list[bool] = []
    wants = TreeTuner.wants_drafts

    def note(self, *others):
        asked.append(wants(self, *others))
        return asked[-1]

    with patch.object(TreeTuner, "wants_drafts", note):
        run(machine, tuner, 60)
        assert 1 <= sum(asked[-40:]) <= 10  # a look takes 0.3 steps
        asked.clear()
        machine.text[:, :60, 0] = 0.0
        run(machine, tuner, 60)
    assert all(asked[-4:])


def test_guesses_that_are_free_are_looked_at_first():
    """The model's are asked for in every fourth look, until one is right; then as long as its levels pay."""
    tuner, trees = TreeTuner(16, 5, has_free_guesses=True), []
    one, none = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 5)
    tuner.observe([0], 1.0, one, none)
    machine = Machine([0.9])
    for _ in range(8):
        tuner.resting_until = 0.0
        assert tuner.wants_drafts({0: 10_000}, unread=5.0)
        trees.append((tuner.tree or WHOLE, tuner.levels))
        tuner.narrow(machine.draft(trees[-1][0], {0: 0}), None, [0])
        tuner.observe([0], 1.0, one, none)
        tuner.since_plain = 0
    assert [tree.num_nodes > 1 for tree, _ in trees] == 2 * [False, False, False, True]
    assert [levels > 0.0 for _, levels in trees] == 2 * [False, False, False, True]
    tuner.has_proof, tuner.resting_until = True, 0.0
    costs = tuner._costs_of(1)
    costs.level = 10.0 * costs.plain
    assert tuner.wants_drafts({0: 100}) and not tuner.is_look and tuner.tree.num_nodes == 1 and tuner.levels == 0.0


def test_what_sequences_that_are_ahead_gain_counts_less():
    """Three of four are easy to guess; the batch ends with the fourth, which is not."""
    machine = Machine([0.8, 0.1], batch=4, ease=(1.0, 1.0, 1.0, 0.0), row=0.02)
    seconds, _ = run(machine, TreeTuner(16, 5), 96)
    assert seconds < 1.15 * 96 * machine.plain < 0.75 * fixed(machine, 96)


def test_levels_are_learnt_though_they_read_what_was_accepted():
    """The first draft after plain steps may read much more than the others, and tells nothing of levels."""
    tuner, machine = TreeTuner(8, 2), Machine([0.9])
    tuner.observe_reading(1000, 1.0)
    tuner.observe([0], 1.0, torch.zeros(1, 1), torch.zeros(1, 1))
    tuner.has_proof = True
    path, tokens = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 0, 1000]])
    for step in range(5):
        assert tuner.wants_drafts({0: 500}, unread=2.0)
        tuner.narrow(machine.draft(DraftTree.chain(2), {0: 0}), None, [0])
        drafting = 0.25 * tuner.levels + (0.0 if tuner.since_plain else 1.0)
        tuner.observe([0], 1.02 + drafting, path, tokens, drafting)
        assert step < 2 or tuner.since_plain > 1
        if tuner.since_plain == 4:  # the next one is plain
            break
    assert tuner._costs_of(1).level == pytest.approx(0.25, rel=0.1)


def test_a_slow_pass_without_drafts_is_not_laid_to_them():
    """A look costs what the drafter took, and rests ten times as long as that, whatever else kept the machine busy."""
    tuner, machine = TreeTuner(16, 5), Machine([0.6, 0.2])
    one, other = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 1000)
    for seconds in (1.0, 1.0, 1.9):
        tuner.observe([0], seconds, one, other)
    assert tuner.wants_drafts({0: 500})
    tuner.narrow(machine.draft(DraftTree.chain(1), {0: 0}), None, [0])
    tuner.observe([0], 90.0, one, other, drafting=89.0)
    assert tuner.lost == pytest.approx(2.0)  # the drafter's first call also sets up what the others need
    tuner.lost = tuner.elapsed = tuner.resting_until = 0.0
    assert tuner.wants_drafts({0: 500}) and tuner.is_look
    tuner.narrow(machine.draft(DraftTree.chain(1), {0: 0}), None, [0])
    assert tuner.rows == 0
    tuner.observe([0], 1.9, one, other, drafting=0.01)
    assert tuner.lost == pytest.approx(0.01) and tuner.resting_until == pytest.approx(tuner.elapsed + 0.1)


def test_the_budget_is_told_what_was_verified():
    tuner, machine, told = TreeTuner(16, 5), Machine([0.6, 0.2], row=0.2), []
    tuner.observe([0], 1.0, torch.zeros(1, 1), torch.zeros(1, 1))
    tuner.has_proof, tuner._costs_of(1).row = True, 0.2
    assert tuner.wants_drafts({0: 500})
    draft = machine.draft(WHOLE, {0: 0})
    narrowed, rows = tuner.narrow(draft, None, [0])
    assert 1 < narrowed.draft_tokens.shape[0] < draft.draft_tokens.shape[0]
    with patch.object(NodeBudget, "observe", lambda self, *arguments: told.append(arguments) or 2 * [np.ones(1)]):
        tuner.observe([0], 1.0, torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 7))
    assert told[0][0] is draft and told[0][1] is rows


def test_batch_sizes_are_judged_apart():
    tuner = TreeTuner(16, 5)
    assert max(run(Machine([0.7, 0.2], batch=1), tuner, 400)[1][-4:]) > 0
    assert max(run(Machine([0.3, 0.1], batch=32, row=0.5), tuner, 200)[1][-4:]) == 0
    assert max(run(Machine([0.7, 0.2], batch=1), tuner, 50)[1][-4:]) > 0


def test_what_a_drafter_has_to_read_first_must_be_affordable():
    tuner = TreeTuner(16, 5)
    run(Machine([0.7, 0.2]), tuner, 400)
    tuner.observe_reading(100, 100.0)
    assert tuner.wants_drafts({0: 100}, unread=2)
    assert not tuner.wants_drafts({0: 100}, unread=500)


def test_one_slow_step_is_not_held_against_drafts():
    tuner, machine = TreeTuner(16, 5), Machine([0.7, 0.2])
    run(machine, tuner, 300)
    assert tuner.wants_drafts({0: 100})
    tuner.narrow(machine.draft(WHOLE, {0: 0}), None, [0])
    tuner.observe([0], 1000.0, *torch.tensor([[[0]], [[1000]]], dtype=torch.int32))
    assert tuner.wants_drafts({0: 100})


@pytest.fixture(scope="module")
def model():
    return tiny(0)


def drafters(model):
    heads = MedusaHeads(model.config.hidden_size, 3, model.get_output_embeddings())
    return {
        "n-gram": NgramDrafter(12, remember=2),
        "Medusa": MedusaDrafter(heads, medusa_tree(3, 12)),
        "Medusa, best first": MedusaDrafter(heads, 12),
        "EAGLE": EagleDrafter(tiny_eagle(model), num_nodes=12, depth=3, width=3),
        "draft model": ModelDrafter(tiny(1), num_nodes=12, depth=3, width=3),
        "combined": CombinedDrafter(
            ModelDrafter(tiny(1), num_nodes=12, depth=3, width=3), NgramDrafter(6, max_branches=1), min_match=1
        ),
    }


# Every second or third step without drafts, and trees of changing size.
SCHEDULE = [None, DraftTree.chain(1), DraftTree.full([3, 2]), None, None, DraftTree.chain(2), DraftTree.full([2, 1, 1])]


@pytest.fixture
def scheduled(monkeypatch):
    """A tuner that goes through SCHEDULE."""
    steps = []

    def wants_drafts(self, remaining, unread, others_wait):
        assert min(remaining.values()) > 0 and unread >= 0
        self.progress = BatchProgress(remaining.values(), True, 0.0)
        steps.append(SCHEDULE[len(steps) % len(SCHEDULE)])
        self.levels = None
        if not self._costs_of(len(remaining)).num_plain:
            self.observe(list(remaining), 1.0, None, None)
        self.tree, self.is_look, self.catching_up = steps[-1], False, 0.0
        self.levels = None if self.tree is None else 1.0
        return self.tree is not None

    def narrow(self, draft, confidence, sequences):
        given = None if confidence is None else confidence()
        assert given is None or given.shape == draft.trees.parents.shape
        share = (2, 3)[len(steps) % 2]  # every other time some nodes are left out

        def best_count(worth, is_draft, fixed, row):
            return max(len(worth) * share // 3, int((~is_draft).sum()))

        with patch.object(tree_tuner, "best_count", best_count):
            return whole(self, draft, lambda: given, sequences)

    whole = TreeTuner.narrow
    monkeypatch.setattr(TreeTuner, "wants_drafts", wants_drafts)
    monkeypatch.setattr(TreeTuner, "narrow", narrow)
    return steps


@pytest.mark.parametrize("params", [None, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["n-gram", "Medusa", "Medusa, best first", "EAGLE", "draft model", "combined"])
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
    _, stats = generate(model, prompts_of((5, 21), seed=3), drafter=drafter, max_new_tokens=100, tree="auto")
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


def test_nobody_is_evicted_for_drafts(model, scheduled):
    prompts, options = prompts_of((5, 21, 9, 14), seed=3), dict(max_new_tokens=24, page_size=4, num_pages=42)
    _, plain = generate(model, prompts, **options)
    _, drafted = generate(model, prompts, drafter=NgramDrafter(12), tree="auto", **options)
    assert drafted.evictions == plain.evictions == 0 < drafted.drafted_steps
