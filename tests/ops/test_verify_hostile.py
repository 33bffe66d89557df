"""Verify ops on malformed trees and hostile values; refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import calls
import pytest
import torch
from calls import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from support import int32
from support.batches import (
    BAD_ROW,
    MALFORMED,
    VOCAB,
    WEIGHED,
    batch_of,
    check_bounds,
    check_verdict,
    good_case,
    streams,
)
from torch import Tensor

from pagedtree import SamplingParams, TreeBatch, verify_block, verify_greedy, verify_sampled, verify_typical

FAR = 2**31 - 1
STRANGE = [math.nan, math.inf, -math.inf, -1.0, 0.0, 0.2, 0.5, 1.0, 3e38, 1e-45]


@given(st.integers(0, 2**32))
@settings(max_examples=25)
def test_hostile_values_stay_inside(device, seed):
    """Garbage in any number: the walk ends with results in range."""
    generator = torch.Generator().manual_seed(seed)
    case = good_case(device, seed % 7)
    rows, batch = len(case.drafts), len(case.seeds)
    mixed = torch.tensor([-FAR - 1, -5, -1, 0, 1, 2, 3, 4, 7, 8, rows - 1, rows, rows + 1, FAR])

    def garbage(size: int) -> Tensor:
        return mixed[torch.randint(0, len(mixed), (size,), generator=generator)].int().to(device)

    def floats(*shape: int) -> Tensor:
        return torch.tensor(STRANGE)[torch.randint(0, len(STRANGE), shape, generator=generator)].to(device)

    trees = TreeBatch(
        cu_nodes=garbage(batch + 1) if seed % 3 else case.trees.cu_nodes,
        parents=garbage(rows),
        depths=garbage(rows),
        first_child=case.trees.first_child if seed % 2 else garbage(rows),
        next_sibling=garbage(rows),
        mask=garbage(rows)[:, None],
        valid=case.trees.valid,
        max_nodes=8,
        max_depth=7,
    )
    logits, probs = (floats(rows, VOCAB), floats(rows, VOCAB)) if seed % 5 else (case.logits, case.probs)
    coins = {"coins": floats(rows), "final_coins": floats(batch)}
    law_tensors = {"draft_probs": probs, "draft_rows": garbage(rows)}
    for drafts, table in ((case.drafts, None), (garbage(rows) % 6, garbage(5))):
        arguments, mapped = (logits, drafts, trees), {"draft_to_target": table}
        verdicts = [
            verify_greedy(*arguments, **mapped),
            verify_typical(*arguments, SamplingParams(), **mapped),
            verify_sampled(*arguments, case.params, **case.streams, options=case.options, **mapped),
        ]
        for op, law in WEIGHED:
            weighed = {"draft_law": law, **coins, **({} if law == "onehot" else law_tensors), **mapped}
            verdicts.append(op(*arguments, case.params, **case.streams, options=case.options, **weighed))
            verdicts.append(op(*arguments, SamplingParams(), **case.streams, **weighed))
        for verdict in verdicts:
            check_bounds(verdict, 8, 7, VOCAB)


@pytest.mark.parametrize("link", [0, 1, 3, -1, 100, FAR])
def test_links_that_loop(device, link):
    trees = batch_of([[-1, 0, 0]], device, max_depth=6)
    logits = torch.tensor([0.0, 1.0], device=device).expand(3, 2)
    sibling = trees.next_sibling.clone()
    sibling[1] = link
    drafts = torch.tensor([0, 0, 0], device=device)
    verdict = verify_greedy(logits, drafts, replace(trees, next_sibling=sibling))
    check_verdict(verdict, 0, [0], [1], status=0 if link == -1 else MALFORMED)
    child = trees.first_child.clone()
    child[0] = link
    drafts = torch.tensor([1, 1, 1], device=device)
    verdict = verify_greedy(logits, drafts, replace(trees, first_child=child))
    path = [0, 1] if link == 1 else [0]
    check_verdict(verdict, 0, path, [1] * len(path), status=0 if link in (1, -1) else MALFORMED)


def test_block_follows_first_children_only(device, value_checks, monkeypatch):
    trees = batch_of([[-1, 0, 0, 1, 3], [-1, 0, 1, 2]], device)
    logits = torch.zeros(9, 4, device=device)
    logits[:, 1] = 50.0
    drafts = torch.ones(9, dtype=torch.int64, device=device)
    keywords = {"draft_law": "onehot", **streams(2, device)}
    with pytest.raises(ValueError, match="trees: expected chains, got a sibling of row 1"):
        verify_block(logits, drafts, trees, SamplingParams(), **keywords)
    monkeypatch.delenv("PAGEDTREE_CHECK")
    verdict = verify_block(logits, drafts, trees, SamplingParams(), **keywords)
    check_verdict(verdict, 0, [0, 1, 3, 4], [1, 1, 1, 1], status=MALFORMED)
    check_verdict(verdict, 1, [0, 1, 2, 3], [1, 1, 1, 1])


# Refusals -------------------------------------------------------------------------------------------------------------

TYPICAL = ("verify_typical",)
RATIO = ("verify_rejection", "verify_block", "verify_traversal")
SAMPLED = ("verify_sampled", *RATIO)
EVERY = ("verify_greedy", *SAMPLED, *TYPICAL)
# Ops, argument, change, message. Types and devices: test_calls.py, test_raw_arguments.py.
REFUSED: list[tuple[tuple[str, ...], tuple[str, ...], Callable[[Any], Any], str]] = [
    (EVERY, ("logits",), lambda t: t.int(), "logits: expected dtype torch.float32 or .*bfloat16, got torch.int32"),
    (EVERY, ("draft_tokens",), lambda t: t[:2], r"draft_tokens: expected shape \[8\] .*, got \[2\]"),
    (EVERY, ("draft_tokens",), lambda t: t.float(), "draft_tokens: expected dtype torch.int32 or torch.int64"),
    (EVERY, ("trees", "valid"), lambda t: t[:1], r"valid: expected shape \[2\] .*, got \[1\]"),
    (EVERY, ("trees", "first_child"), lambda t: t.long(), "first_child: expected dtype torch.int32"),
    (EVERY, ("trees", "next_sibling"), lambda t: t[:2], r"next_sibling: expected shape \[8\]"),
    (EVERY, ("trees", "max_depth"), lambda _: -1, r"max_depth: expected 0..1023, got -1"),
    (EVERY, ("trees", "max_nodes"), lambda _: 1025, r"max_nodes: expected 1..1024, got 1025"),
    (EVERY, ("grammar_mask",), lambda t: t[:, 1:], r"grammar_mask: expected shape \[8, 40\] .*, got \[8, 39\]"),
    (EVERY, ("grammar_mask",), lambda t: t[:, :1].int(), r"grammar_mask: expected shape \[8, 2\] .*, got \[8, 1\]"),
    (EVERY, ("grammar_mask",), lambda t: t.float(), "grammar_mask: expected dtype torch.bool or torch.int32"),
    (EVERY, ("draft_to_target",), lambda t: t.float(), "draft_to_target: expected dtype torch.int32 or .*int64"),
    ((*SAMPLED, *TYPICAL), ("params", "min_p"), lambda _: torch.zeros(3), r"min_p: expected shape \[1\] or \[2\]"),
    (SAMPLED, ("seeds",), lambda t: t.int(), "seeds: expected dtype torch.int64, got torch.int32"),
    (SAMPLED, ("positions",), lambda t: t[:1], r"positions: expected shape \[2\] .*, got \[1\]"),
    (RATIO, ("draft_law",), lambda _: "topk", "draft_law: expected"),
    (RATIO, ("draft_probs",), lambda _: None, "draft_probs: expected a Tensor, the .*, got None"),
    (RATIO, ("draft_probs",), lambda t: t.double(), "draft_probs: expected dtype torch.float32 or .*bfloat16"),
    (RATIO, ("draft_probs",), lambda t: t[:, :39], r"draft_probs: expected shape \[\*, 40\]"),
    (RATIO, ("draft_probs",), lambda t: t.t().contiguous().t(), "draft_probs: expected contiguous in its last"),
    (RATIO, ("draft_rows",), lambda t: t[1:], r"draft_rows: expected shape \[8\]"),
    (RATIO, ("draft_rows",), lambda t: t.float(), "draft_rows: expected dtype torch.int32 or torch.int64"),
    (RATIO, ("draft_rows",), lambda _: None, r"draft_probs: expected shape \[8, 40\]"),
    (RATIO, ("coins",), lambda _: int32([1] * 8), "coins: expected dtype torch.float32, got torch.int32"),
    (RATIO, ("coins",), lambda _: torch.zeros(9), r"coins: expected shape \[8\]"),
    (RATIO, ("final_coins",), lambda _: torch.zeros(3), r"final_coins: expected shape \[2\] .*, got \[3\]"),
    (RATIO, ("draft_params",), lambda _: SamplingParams(top_k=int32([0] * 3)), r"draft_top_k: .* \[1\] or \[2\]"),
    # Probabilities of deterministic drafts would bias the result.
    (RATIO[:2], ("draft_law",), lambda _: "onehot", "draft_probs: expected None"),
    (RATIO[2:], ("draft_law",), lambda _: "onehot", "draft_law: expected"),
    (TYPICAL, ("epsilon",), lambda _: -0.1, "epsilon: expected"),
    (TYPICAL, ("epsilon",), lambda _: 1.5, "epsilon: expected"),
    (TYPICAL, ("epsilon",), lambda _: math.nan, "epsilon: expected"),
    (TYPICAL, ("delta",), lambda _: -1.0, "delta: expected"),
    (TYPICAL, ("delta",), lambda _: math.inf, "delta: expected"),
]


@pytest.mark.parametrize("name", EVERY)
def test_refusals(name: str) -> None:
    call = calls.make(name)
    for names, path, wrong, message in REFUSED:
        if name not in names:
            continue
        arguments = {**dict.fromkeys(path[:1]), **call.arguments}
        value = arguments[path[0]]
        for key in path[1:]:
            value = getattr(value, key)
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            call.function(**changed(arguments, path, wrong(value)))


@pytest.mark.parametrize("name", (*EVERY, "verify_tokens"))
def test_draft_and_its_parts(name: str) -> None:
    """A `Draft`, with params behind it, is its parts in the flat form, and none of them may come a second time."""
    call = calls.make(name)
    given = calls.ops.with_draft(call.arguments)
    order = ("tokens" if name == "verify_tokens" else "logits", "draft_tokens", "params")
    positional = [given.pop(key) for key in order if key in given]
    found = call.function(*positional, **given)
    assert all(map(torch.equal, found, call.results()))
    for key in {"trees", "draft_probs", "draft_rows"} & call.arguments.keys():
        with pytest.raises(ValueError, match=f"{name}: {key}: expected None with a Draft"):
            call.function(**calls.ops.with_draft(call.arguments), **{key: call.arguments[key]})


@pytest.mark.parametrize("name", RATIO[:2])
@pytest.mark.parametrize(
    ("key", "value"), [("draft_params", SamplingParams()), ("draft_rows", torch.zeros(8, dtype=torch.int64))]
)
def test_distributions_of_chosen_drafts(name: str, key: str, value: object) -> None:
    call = calls.make(name)
    arguments = {**call.arguments, "draft_law": "onehot", "draft_probs": None, "draft_rows": None, "draft_params": None}
    call.function(**arguments)
    with pytest.raises(ValueError, match=f"{name}: {key}: expected None"):
        call.function(**{**arguments, key: value})


@pytest.mark.parametrize(
    ("path", "values", "message"),
    [
        (("trees", "cu_nodes"), [1, 5, 8], r"cu_nodes\[0\]: expected 0, got 1"),
        (("trees", "cu_nodes"), [0, 5, 4], "cu_nodes: expected non-descending"),
        (("trees", "cu_nodes"), [0, 5, 9], "cu_nodes: expected at most 8 rows, got 9"),
        (("draft_rows",), [0, 1, 2, 4, 0, 0, 0, 0], r"draft_rows\[3\]: expected 0\.\.3, got 4"),
    ],
)
def test_value_checks(device, value_checks, path, values, message):
    call = calls.make("verify_rejection").on_memory(lambda memory: memory.to(device))
    good = changed(call.arguments, ("draft_rows",), int32([0, 1, 2, 3, 0, 1, 2, 3], device))
    no_row = changed(good, ("logits",), torch.full_like(good["logits"], -math.inf))
    assert call.function(**no_row).status.tolist() == [BAD_ROW] * 2, "a status, not an error"
    with pytest.raises(ValueError, match=message):
        call.function(**changed(good, path, int32(values, device)))
