"""Request options that no careful caller passes: what is refused by name, and values that stay without effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from options_case import (
    PARTS,
    TREES,
    VOCAB,
    Case,
    calls,
    changed,
    expected,
    good_case,
    hostile_options,
    make_case,
    verify,
)
from step_case import int32
from torch import Tensor
from verify_case import check_bounds

from pagedtree import (
    RequestOptions,
    SamplingParams,
    TreeBatch,
    Verdict,
    build_trees,
    expand_tree,
    sample,
    start_draft,
    verify_block,
    verify_rejection,
    verify_sampled,
    verify_traversal,
    verify_typical,
)
from pagedtree.check.cases.capture import captured

FAR = 2**31 - 1
OPS = [verify_sampled, verify_rejection, verify_block, verify_traversal]
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def run(op: Callable, case: Case, **change) -> Verdict:
    keywords = {} if op is verify_sampled else {"draft_law": "iid", "draft_probs": case.probs}
    arguments = {
        "params": case.params, "grammar_mask": case.grammar_mask, "options": case.options, **case.streams, **keywords,
    }  # fmt: skip
    arguments |= change
    return op(case.logits, case.drafts, case.trees, arguments.pop("params"), **arguments)


# Refusals -------------------------------------------------------------------------------------------------------------


def wrong_tensors(options: RequestOptions, device: torch.device) -> list[tuple[str, Tensor | None]]:
    found: list[tuple[str, Tensor | None]] = []
    for name, t in options.tensors().items():
        assert t is not None
        found.append((name, t.double() if t.dtype == torch.float32 else t.float()))
        found.append((name, t.long() if t.dtype == torch.int32 else t.int()))
        found.append((name, t[None]))
        if name not in ("bias_tokens", "bias_values", "bad_tokens", "cu_bad_words"):
            found.append((name, t[:-1]))
            found.append((name, torch.cat([t, t])))
        if t.dim() == 2:
            found.append((name, t.t().contiguous().t()))
        if name in ("prompt_mask", "output_counts", "allowed_mask"):
            found.append((name, t[:, :-1]))
            found.append((name, torch.cat([t, t], 1)))
    for name in ("bias_tokens", "bias_values", "cu_bias", "bad_tokens", "cu_bad_words", "cu_bad_seqs", "history",
                 "history_lens", "stop_ids", "min_position"):  # fmt: skip
        found.append((name, None))  # the others of its group are there
    found.append(("bias_values", options.bias_values[:-1]))
    return found


GROUPS = [
    {"bias_tokens", "bias_values", "cu_bias"}, {"bad_tokens", "cu_bad_words", "cu_bad_seqs"},
    {"history", "history_lens", "history_start"}, {"stop_ids", "min_position"},
]  # fmt: skip


@each_op
def test_tensors_that_do_not_fit_are_named(device, op):
    case = good_case(device)
    before = [t.clone() for t in case.options.tensors().values()]
    run(op, case)
    for name, value in wrong_tensors(case.options, device):
        named = next((group for group in GROUPS if name in group), set()) if value is None or value.dim() == 1 else {}
        with pytest.raises(ValueError, match=rf"{op.__name__}: `({'|'.join({name, *named})})` must be"):
            run(op, case, options=replace(case.options, **{name: value}))
    for t, same in zip(case.options.tensors().values(), before, strict=True):
        assert torch.equal(t.view(torch.uint8), same.view(torch.uint8))


@each_op
def test_other_devices_and_types(device, op):
    case = good_case(device)
    for name, t in case.options.tensors().items():
        with pytest.raises(ValueError, match=rf"{op.__name__}: `\w+` must be on .*(meta|cpu|cuda)"):
            run(op, case, options=replace(case.options, **{name: t.to("meta")}))
    with pytest.raises(TypeError, match="options: expected a RequestOptions"):
        run(op, case, options={"bias_tokens": case.options.bias_tokens})
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        for value in (torch.ones(3, device=device), torch.ones(6, device=device).double()):
            with pytest.raises(ValueError, match=f"`{name}` must be of"):
                run(op, case, params=SamplingParams(**{name: value}))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"bias": [True]}, TypeError, r"bias\[0\]: expected a mapping"),
        ({"bias": [{1: "x"}]}, TypeError, r"bias\[0\]\[1\]: expected a number"),
        ({"bad_words": [3]}, TypeError, r"bad_words\[0\]: expected a sequence or None, got int"),
        ({"bad_words": [[[]]]}, ValueError, r"bad_words\[0\]\[0\]: expected at least one token"),
        ({"bad_words": [[[9]]]}, ValueError, r"bad_words\[0\]\[0\]: expected ids in 0\.\.8, got 9"),
        ({"stop_ids": [[1]], "min_positions": [None]}, TypeError, r"min_positions\[0\]: expected an integer"),
        ({"stop_ids": [[1]], "min_positions": [2**63]}, ValueError, r"min_positions\[0\]: expected an integer of 64"),
        ({"stop_ids": [[1]]}, ValueError, "stop_ids: expected together with min_positions"),
        ({"prompts": [[1]], "outputs": [[1], [2]]}, ValueError, "outputs: expected 1 entries, as prompts has, got 2"),
        ({}, ValueError, "prompts: expected at least one list"),
    ],
)
def test_lists_that_do_not_fit_are_named(given, error, message):
    with pytest.raises(error, match=message):
        RequestOptions.from_lists(9, **given)


def test_sample_refuses(device):
    case = good_case(device)
    rows, at = case.logits[:6], {**case.streams, "options": case.options}
    sample(rows, case.params, **at)
    for name, value in wrong_tensors(case.options, device):
        named = next((group for group in GROUPS if name in group), set()) if value is None or value.dim() == 1 else {}
        with pytest.raises(ValueError, match=rf"sample: `({'|'.join({name, *named})})` must be"):
            sample(rows, case.params, **case.streams, options=replace(case.options, **{name: value}))
    with pytest.raises(ValueError, match="sample: `grammar_mask` must be of shape"):
        sample(rows, case.params, **at, grammar_mask=torch.ones(6, VOCAB + 1, dtype=torch.bool, device=device))
    with pytest.raises(ValueError, match="sample: `prompt_mask` must be of shape"):
        sample(rows[:5], SamplingParams(), seeds=case.seeds[:5], positions=case.positions[:5], options=case.options)
    with pytest.raises(TypeError, match="options: expected a RequestOptions"):
        sample(rows, case.params, **case.streams, options=3)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_ops_without_penalties_refuse_them(device, name):
    case = good_case(device)
    state = start_draft(torch.zeros(2, dtype=torch.int64, device=device), max_kv_nodes=4)
    at = {"seeds": torch.zeros(2, dtype=torch.int64, device=device)}
    at["positions"] = at["seeds"]
    for value in (1.5, torch.ones(1, device=device)):
        params = SamplingParams(**{name: value})
        with pytest.raises(ValueError, match=rf"expand_tree: `params` must have {name} \d"):
            expand_tree(state, torch.zeros(2, VOCAB, device=device), num_children=2, law="iid", params=params, **at)
        with pytest.raises(ValueError, match=rf"verify_typical: `params` must have {name} \d"):
            verify_typical(case.logits, case.drafts, case.trees, params)
        for op in OPS[1:]:
            with pytest.raises(ValueError, match=rf"{op.__name__}: `draft_params` must have {name} \d"):
                run(op, case, draft_params=params)


@each_op
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cu_bias", [0, 3, 2, 4, 4, 4, 4]),
        ("cu_bias", [1, 1, 2, 3, 3, 3, 3]),
        ("cu_bias", [0, 0, 0, 0, 0, 0, FAR]),
        ("cu_bad_seqs", [0, 1, 2, 1, 3, 3, 3]),
        ("cu_bad_seqs", [0, 1, 2, 2, 3, 3, FAR]),
        ("cu_bad_words", None),
        ("history_lens", [0, 1, 10, 1, 3, 3]),
        ("history_lens", [0, -1, 0, 1, 3, 3]),
    ],
)
def test_value_checks(device, value_checks, op, name, values):
    case = good_case(device)
    run(op, case)
    given = getattr(case.options, name).clone()
    if values is None:
        given[1] = given[2] + 1
    else:
        given[:] = int32(values, device)
    with pytest.raises(ValueError, match=f"{op.__name__}: `{name}"):
        run(op, case, options=replace(case.options, **{name: given}))


# Values ---------------------------------------------------------------------------------------------------------------


def in_memory(t: Tensor, fill: int) -> Tensor:
    """The tensor in the middle of memory full of `fill`: whoever reads outside of it sees that."""
    guard = 64 * t.element_size()
    memory = torch.full((t.numel() * t.element_size() + 2 * guard,), fill, dtype=torch.uint8, device=t.device)
    inner = memory[guard : memory.numel() - guard].view(t.dtype).view(t.shape)
    return inner.copy_(t)


def same(a: Verdict, b: Verdict) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@given(st.integers(0, 2**32))
@settings(max_examples=15)
def test_hostile_values_read_nothing_else(device, seed):
    """Twice the same values in different surroundings: the results are those of a vocabulary, and equal."""
    generator = torch.Generator().manual_seed(seed)
    case = good_case(device, seed % 7)
    options = hostile_options(case, generator)
    positions = torch.tensor([0, 5, 2**63 - 1, -(2**63), 2**31, -1], device=device)
    if seed % 2:
        case = replace(case, positions=positions)
    for op in OPS:
        found = []
        for fill in (0, 255, 0x3F):
            placed = {name: in_memory(t, fill) for name, t in options.tensors().items() if t is not None}
            found.append(run(op, case, options=RequestOptions(**placed)))
            assert all(
                t is None or torch.equal(t.view(torch.uint8), getattr(options, name).view(torch.uint8))
                for name, t in placed.items()
            )
        assert same(found[0], found[1]) and same(found[0], found[2])
        check_bounds(found[0], 8, 7, VOCAB)
    tokens = [
        sample(case.logits[:6], case.params, **case.streams, options=RequestOptions(
            **{name: in_memory(t, fill) for name, t in options.tensors().items() if t is not None}))
        for fill in (0, 255)
    ]  # fmt: skip
    assert torch.equal(*tokens) and (tokens[0] >= 0).all() and (tokens[0] < VOCAB).all()


@given(st.integers(0, 2**32))
@settings(max_examples=15)
def test_hostile_trees(device, seed):
    """Garbage in links, parents, depths and drafts, with every option on: the walk ends inside the trees."""
    generator = torch.Generator().manual_seed(seed)
    case = good_case(device, seed % 7)
    rows, batch = len(case.drafts), len(case.seeds)
    mixed = torch.tensor([-(2**31), -5, -1, 0, 1, 2, 3, 4, 7, 8, rows - 1, rows, FAR])

    def garbage(size: int) -> Tensor:
        return mixed[torch.randint(0, len(mixed), (size,), generator=generator)].int().to(device)

    trees = TreeBatch(
        cu_nodes=garbage(batch + 1) if seed % 3 else case.trees.cu_nodes, parents=garbage(rows), depths=garbage(rows),
        first_child=case.trees.first_child if seed % 2 else garbage(rows), next_sibling=garbage(rows),
        mask=garbage(rows)[:, None], valid=case.trees.valid, max_nodes=8, max_depth=7,
    )  # fmt: skip
    table = garbage(5)
    for op in OPS:
        for change in ({}, {"draft_to_target": table}):
            hostile = replace(case, trees=trees, drafts=garbage(rows) % 6 if change else case.drafts)
            check_bounds(run(op, hostile, **change), 8, 7, VOCAB)


@each_op
def test_ids_out_of_range_do_nothing(device, op):
    case = good_case(device)
    expect = run(op, case)
    outside = [-1, -2, VOCAB, VOCAB + 1, -(2**31), FAR]
    more = {
        "bias_tokens": torch.cat([case.options.bias_tokens, int32(outside, device)]),
        "bias_values": torch.cat([case.options.bias_values, torch.full((6,), 50.0, device=device)]),
        "bad_tokens": torch.cat([case.options.bad_tokens, int32(outside, device)]),
        "stop_ids": torch.cat([case.options.stop_ids, int32([outside] * 6, device)], 1),
    }
    grown = case.options.cu_bias.clone()
    grown[-1] += 6
    words, sequences = case.options.cu_bad_words, case.options.cu_bad_seqs.clone()
    more["cu_bad_words"] = torch.cat([words, words[-1:] + torch.arange(1, 7, device=device, dtype=torch.int32)])
    sequences[-1] += 6
    more |= {"cu_bias": grown, "cu_bad_seqs": sequences}
    assert same(run(op, case, options=replace(case.options, **more)), expect)


def test_malformed_trees(device):
    """What can be reached has the options of its own path."""
    case = changed(make_case(VOCAB, PARTS, seed=1, parents=TREES), lambda t: t.to(device))
    parents = case.trees.parents.clone()
    parents[4] = 9
    trees = build_trees(parents, case.trees.cu_nodes, max_nodes=8, max_depth=7)
    broken = replace(case, trees=trees)
    assert not trees.valid[0] and trees.valid[1]
    applied = broken.applied()
    for name in calls(broken):
        assert same(verify(broken, name), expected(broken, name, applied))


def test_positions_at_the_ends(device):
    """The position that a row predicts may be beyond 2^63; nothing else of the row depends on it."""
    logits = torch.tensor([[0.0, 1.0]], device=device)
    seeds = torch.zeros(1, dtype=torch.int64, device=device)
    for position, least, token in (
        (2**62, 2**63 - 1, 0), (2**62, 2**62, 1), (-(2**63), 0, 0), (-(2**63), -(2**63), 1), (2**63 - 2, 2**63 - 1, 1),
    ):  # fmt: skip
        options = RequestOptions.from_lists(2, stop_ids=[[1]], min_positions=[least], device=device)
        at = {"seeds": seeds, "positions": seeds + position, "options": options}
        assert int(sample(logits, SamplingParams(temperature=0.0), **at)) == token


# Torch ----------------------------------------------------------------------------------------------------------------


class Steps:
    """Ops on buffers that stay where they are, for `captured`."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.results: list[Verdict] = []

    def step(self) -> None:
        self.results = [run(op, self.case) for op in OPS]

    def copy_(self, other: Case) -> None:
        for mine, its in ((self.case, other), (self.case.options, other.options), (self.case.trees, other.trees)):
            for name, t in vars(mine).items():
                if isinstance(t, Tensor):
                    t.copy_(getattr(its, name))
        for name, t in self.case.penalties.items():
            t.copy_(other.penalties[name])


def of_fixed_size(case: Case) -> Case:
    """The same numbers in tensors of one size for all cases."""

    def longer(t: Tensor, size: int) -> Tensor:
        return torch.cat([t, t.new_full((size - len(t),), t[-1] if len(t) else 0)])

    o = case.options
    options = replace(
        o, bias_tokens=longer(o.bias_tokens, 64), bias_values=longer(o.bias_values, 64),
        bad_tokens=longer(o.bad_tokens, 400), cu_bad_words=longer(o.cu_bad_words, 100),
    )  # fmt: skip
    wide = {}
    for name, neutral in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
        value = case.penalties.get(name, neutral)
        wide[name] = torch.as_tensor(value, device=case.logits.device).float().flatten().expand(6).clone()
    return replace(case, options=options, penalties=wide)


def test_replays_take_other_options(device):
    """One captured call, in which every tensor changes between replays."""
    first, *others = (of_fixed_size(good_case(device, seed)) for seed in (1, 2, 3, 4))
    steps = Steps(changed(first, Tensor.clone))
    replay = captured(steps, device)
    for other in (*others, first):
        steps.copy_(other)
        replay()
        for op, verdict in zip(OPS, steps.results, strict=True):
            assert same(verdict, run(op, other)), op
