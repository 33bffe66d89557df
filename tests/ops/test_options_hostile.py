"""Hostile request options raise a named error or have no effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import int32
from support.batches import VOCAB, OptionCase, check_bounds, good_case, hostile_options
from support.exact import VERIFY
from torch import Tensor

from pagedtree import RequestOptions, SamplingParams, expand_tree, sample, start_draft, verify_typical

FAR = 2**31 - 1
OPS = [*VERIFY.values()]
each_op = pytest.mark.parametrize("op", [*OPS, sample], ids=lambda op: op.__name__)


def run(op: Callable, case: OptionCase, options: RequestOptions | None = None, **change: Any) -> tuple[Tensor, ...]:
    keywords = {"grammar_mask": case.grammar_mask, "options": options or case.options, **case.streams}
    if op is sample:
        rows = len(case.seeds)
        keywords |= {"params": case.params, "grammar_mask": case.grammar_mask[:rows]}
        return (sample(case.logits[:rows], **keywords | change),)
    if op is not VERIFY["sampled"]:
        keywords |= {"draft_law": "iid", "draft_probs": case.probs}
    return op(case.logits, case.drafts, case.trees, **{"params": case.params} | keywords | change)


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
    alone = ("prompt_mask", "output_counts", "allowed_mask", "history_start")
    found += [(name, None) for name in options.tensors() if name not in alone]  # the group's others exist
    return [*found, ("bias_values", options.bias_values[:-1])]


GROUPS = [
    ("bias_tokens", "bias_values", "cu_bias"),
    ("bad_tokens", "cu_bad_words", "cu_bad_seqs"),
    ("history", "history_lens", "history_start"),
    ("stop_ids", "min_position"),
]


@each_op
def test_tensors_that_do_not_fit_are_named(device, op):
    case = good_case(device)
    before = [t.clone() for t in case.options.tensors().values()]
    run(op, case)
    for name, value in wrong_tensors(case.options, device):
        is_of_group = value is None or value.dim() == 1
        group_names = next((group for group in GROUPS if is_of_group and name in group), (name,))
        with pytest.raises(ValueError, match=rf"{op.__name__}: ({'|'.join(group_names)}): expected"):
            run(op, case, options=replace(case.options, **{name: value}))
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        for value in (torch.ones(3, device=device), torch.ones(6, device=device).double()):
            with pytest.raises(ValueError, match=f"{op.__name__}: {name}: expected "):
                run(op, case, params=SamplingParams(**{name: value}))
    for t, copy in zip(case.options.tensors().values(), before, strict=True):
        assert torch.equal(t.view(torch.uint8), copy.view(torch.uint8))


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


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_ops_without_penalties_refuse_them(device, name):
    case = good_case(device)
    state = start_draft(torch.zeros(2, dtype=torch.int64, device=device), max_kv_nodes=4)
    at = {"seeds": torch.zeros(2, dtype=torch.int64, device=device)}
    at["positions"] = at["seeds"]
    for value in (1.5, torch.ones(1, device=device)):
        params = SamplingParams(**{name: value})
        with pytest.raises(ValueError, match=rf"expand_tree: params: expected {name} \d"):
            expand_tree(state, torch.zeros(2, VOCAB, device=device), num_children=2, law="iid", params=params, **at)
        with pytest.raises(ValueError, match=rf"verify_typical: params: expected {name} \d"):
            verify_typical(case.logits, case.drafts, case.trees, params)
        for op in OPS[1:]:
            with pytest.raises(ValueError, match=rf"{op.__name__}: draft_params: expected {name} \d"):
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
    tensor = getattr(case.options, name).clone()
    if values is None:
        tensor[1] = tensor[2] + 1
    else:
        tensor[:] = int32(values, device)
    with pytest.raises(ValueError, match=f"{op.__name__}: {name}"):
        run(op, case, options=replace(case.options, **{name: tensor}))


# Values ---------------------------------------------------------------------------------------------------------------


def in_memory(t: Tensor, fill: int) -> Tensor:
    """Surrounds the tensor with `fill`, which reveals reads out of bounds."""
    guard = 64 * t.element_size()
    memory = torch.full((t.numel() * t.element_size() + 2 * guard,), fill, dtype=torch.uint8, device=t.device)
    inner = memory[guard : memory.numel() - guard].view(t.dtype).view(t.shape)
    return inner.copy_(t)


def same(a: tuple, b: tuple) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@given(st.integers(0, 2**32))
@settings(max_examples=15)
def test_hostile_values_read_nothing_else(device, seed):
    """Results ignore surrounding memory, and are in the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    case = good_case(device, seed % 7)
    options = hostile_options(case, generator)
    positions = torch.tensor([0, 5, 2**63 - 1, -(2**63), 2**31, -1], device=device)
    if seed % 2:
        case = replace(case, positions=positions)
    for op in (*OPS, sample):
        found = []
        for fill in (0, 255, 0x3F):
            tensors = {name: in_memory(t, fill) for name, t in options.tensors().items() if t is not None}
            found.append(run(op, case, RequestOptions(**tensors)))
            for name, t in tensors.items():
                assert torch.equal(t.view(torch.uint8), getattr(options, name).view(torch.uint8))
        assert same(found[0], found[1]) and same(found[0], found[2])
        if op is sample:
            assert (found[0][0] >= 0).all() and (found[0][0] < VOCAB).all()
        else:
            check_bounds(found[0], 8, 7, VOCAB)


def test_positions_at_the_ends(device):
    """A position beyond 2^63 affects nothing else of its row."""
    logits = torch.tensor([[0.0, 1.0]], device=device)
    seeds = torch.zeros(1, dtype=torch.int64, device=device)
    first, last = -(2**63), 2**63 - 1
    for position, least, token in (
        (2**62, last, 0),
        (2**62, 2**62, 1),
        (first, 0, 0),
        (first, first, 1),
        (last - 1, last, 1),
    ):
        options = RequestOptions.from_lists(2, stop_ids=[[1]], min_positions=[least], device=device)
        at = {"seeds": seeds, "positions": seeds + position, "options": options}
        assert int(sample(logits, SamplingParams(temperature=0.0), **at)) == token
