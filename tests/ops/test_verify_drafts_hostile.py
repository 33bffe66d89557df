"""The rules that weigh target against draft: large and odd vocabularies, strange values and trees, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from verify_case import BAD_ROW, MALFORMED, PARAMS, batch_of, check, check_bounds, streams

from pagedtree import (
    DraftTree,
    SamplingParams,
    TreeBatch,
    Verdict,
    commit,
    reference,
    sample,
    verify_block,
    verify_greedy,
    verify_rejection,
    verify_sampled,
    verify_traversal,
    verify_typical,
)

OPS = {
    verify_rejection: reference.rejection,
    verify_block: reference.block,
    verify_traversal: reference.traversal,
}
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def same(a: Verdict, b: Verdict) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def forest(op: Callable, batch: int, vocab: int, device: torch.device, seed: int = 0, dtype=torch.float32):
    """Trees whose drafts were drawn, and what every op takes: arguments, keywords."""
    generator = torch.Generator().manual_seed(seed)
    shape = [-1, 0, 1, 2] if op is verify_block else [-1, 0, 0, 1, 1, 2, 3]
    logits = torch.randn(batch * len(shape), vocab, generator=generator) * 2
    probs = (logits + torch.randn(logits.shape, generator=generator)).softmax(-1)
    drafts = torch.zeros(batch * len(shape), dtype=torch.int64)
    for row in range(drafts.numel()):
        parent = shape[row % len(shape)]
        if parent >= 0:
            drafts[row] = torch.multinomial(probs[row - row % len(shape) + parent], 1, generator=generator)
    arguments = (logits.to(dtype).to(device), drafts.to(device), batch_of([shape] * batch, device), SamplingParams())
    return arguments, {"draft_law": "iid", "draft_probs": probs.to(device), **streams(batch, device, seed)}


class Distributions:
    """The distributions of rows as lists; only those that are asked for are worked out."""

    def __init__(self, rows: Tensor, top_k: int = 0) -> None:
        self.rows, self.top_k = rows, top_k

    @cache  # noqa: B019
    def __getitem__(self, row: int) -> list[float]:
        if self.top_k == 0:
            return self.rows[row].double().tolist()
        return reference.distribution(reference.clean_logits(self.rows[row]), 0.9, self.top_k).tolist()


@pytest.mark.each_value
@each_op
@pytest.mark.parametrize("vocab", [1, 2, 15, 63, 1023, 1024, 1025, 5003, 262144])
def test_vocabularies(device, op, vocab):
    """Against the rule in float64, with coins that are near no bound."""
    (logits, drafts, trees, params), keywords = forest(op, 6 if vocab < 10_000 else 1, vocab, device, vocab)
    generator = torch.Generator().manual_seed(1)
    keywords["coins"] = torch.rand(drafts.shape[0], generator=generator).to(device)
    keywords["final_coins"] = torch.rand(trees.valid.shape[0], generator=generator).to(device)
    params = SamplingParams(temperature=0.9, top_k=max(vocab // 2, 1))
    verdict = op(logits, drafts, trees, params, **keywords)
    compared, size = 0, drafts.shape[0] // trees.valid.shape[0]
    for b in range(trees.valid.shape[0]):
        rows = slice(b * size, (b + 1) * size)
        p, q = Distributions(logits[rows], max(vocab // 2, 1)), Distributions(keywords["draft_probs"][rows])
        coins, margins = keywords["coins"][rows].tolist(), [1.0]

        def below(entry: int, bound: float, coins=coins, margins=margins) -> bool:
            margins.append(abs(coins[entry] - bound))
            return coins[entry] < bound

        path, distribution = OPS[op](trees.parents[rows].tolist(), drafts[rows].tolist(), p, q, "iid", below)
        if min(margins) < 1e-5:
            continue
        compared += 1
        tokens = verdict.tokens[b, : len(path)].tolist()
        assert [n for n in verdict.accept_index[b].tolist() if n >= 0] == path
        assert tokens[:-1] == [int(drafts[rows][n]) for n in path[1:]]
        cdf = np.concatenate([[0.0], np.cumsum(distribution)])
        u = float(keywords["final_coins"][b]) * cdf[-1]
        assert distribution[tokens[-1]] > 0 and cdf[tokens[-1]] - 1e-5 < u < cdf[tokens[-1] + 1] + 1e-5
    assert compared > 0


def test_more_draws_than_tokens(device):
    """Without replacement the distribution runs out: a token that was tried has no probability left."""
    trees = batch_of([[-1, 0, 0, 0, 0]], device)
    logits = torch.tensor([-math.inf, -math.inf, 0.0, 0.0], device=device).expand(5, 4)
    probs = torch.tensor([0.75, 0.25, 0.0, 0.0], device=device).expand(5, 4)
    drafts = torch.tensor([0, 0, 1, 0, 2], device=device)
    for op in (verify_rejection, verify_traversal):
        verdict = op(
            logits, drafts, trees, SamplingParams(), draft_law="swor", draft_probs=probs, **streams(1, device),
            coins=torch.zeros(5, device=device), final_coins=torch.tensor([0.5], device=device),
        )  # fmt: skip
        check(verdict, 0, [0], [3])


@each_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_shared_and_strided(device, op, dtype):
    """draft_rows in either type, draft_probs at any row stride: the same as one row for each node."""
    (logits, drafts, trees, params), keywords = forest(op, 12, 77, device, dtype=dtype)
    probs = keywords.pop("draft_probs").to(dtype)
    expected = op(logits, drafts, trees, params, draft_probs=probs, **keywords)
    order = torch.randperm(probs.shape[0], generator=torch.Generator().manual_seed(2))
    wide = torch.full((probs.shape[0] + 3, 100), math.nan, dtype=dtype, device=device)
    wide[order.to(device) + 3, 11:88] = probs
    for rows in (order + 3, (order + 3).int()):
        given = {"draft_probs": wide[:, 11:88], "draft_rows": rows.to(device)}
        assert same(op(logits, drafts, trees, params, **given, **keywords), expected)
    assert (expected.num_accepted > 0).any() and (expected.num_accepted < trees.max_depth).any()


@each_op
def test_draft_rows_outside_have_no_mass(device, op):
    (logits, drafts, trees, params), keywords = forest(op, 4, 30, device)
    rows = torch.tensor([-1, -(2**62), 2**62, drafts.shape[0]], device=device).repeat(drafts.shape[0])[: len(drafts)]
    verdict = op(logits, drafts, trees, params, draft_rows=rows, **keywords)
    assert (verdict.num_accepted == 0).all() and (verdict.status == 0).all()
    nothing = op(logits, torch.full_like(drafts, -1), trees, params, **keywords)
    assert torch.equal(verdict.tokens[:, 0], nothing.tokens[:, 0]), "what is left is the row's own distribution"


@each_op
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0}], ids=str
)
def test_draft_logits(device, op, sampling):
    (logits, drafts, trees, params), keywords = forest(op, 30, 40, device)
    draft_logits = keywords.pop("draft_probs").log()
    probs = torch.tensor(
        np.stack([reference.distribution(reference.clean_logits(row), **sampling) for row in draft_logits]),
        device=device,
    ).float()
    got = op(
        logits, drafts, trees, params, draft_probs=draft_logits, draft_params=SamplingParams(**sampling), **keywords
    )
    expected = op(logits, drafts, trees, params, draft_probs=probs, **keywords)
    assert torch.equal(got.accept_index, expected.accept_index)
    assert (got.tokens == expected.tokens).float().mean() > 0.97, "but for rounding"


@each_op
def test_grammar_masks_and_status(device, op):
    """A mask is the same as -inf in the logits; only rows that the walk reads set the status."""
    (logits, drafts, trees, params), keywords = forest(op, 20, 65, device)
    mask = torch.rand(logits.shape, generator=torch.Generator().manual_seed(3)).to(device) < 0.6
    mask[0] = False
    logits[drafts.shape[0] // 20, 3] = math.nan
    got = op(logits, drafts, trees, params, grammar_mask=mask, **keywords)
    masked = logits.masked_fill(~mask & ~logits.isnan(), -math.inf)
    assert same(got, op(masked, drafts, trees, params, **keywords))
    assert got.status[:2].tolist() == [BAD_ROW, BAD_ROW] and (got.status[2:] == 0).all()
    for b in range(1, 20):
        path = [n for n in got.accept_index[b].tolist() if n >= 0]
        for node, token in zip(path, got.tokens[b].tolist(), strict=False):
            assert mask[b * drafts.shape[0] // 20 + node, token]


@each_op
def test_temperature_zero_is_greedy(device, op):
    """Greedy sequences in one batch with sampled ones: their tokens are the argmaxes, whatever was drafted."""
    (logits, drafts, trees, _), keywords = forest(op, 12, 30, device)
    temperature = torch.tensor([0.0, 1.0] * 6, device=device)
    mixed = op(logits, drafts, trees, SamplingParams(temperature=temperature), **keywords)
    alone = op(logits, drafts, trees, SamplingParams(), **keywords)
    best = logits.argmax(-1).view(12, -1)
    for b in range(12):
        if b % 2:
            assert torch.equal(mixed.tokens[b], alone.tokens[b])
            continue
        path = [n for n in mixed.accept_index[b].tolist() if n >= 0]
        assert mixed.tokens[b, : len(path)].tolist() == best[b, path].tolist()
    greedy = verify_greedy(logits, drafts, trees)
    if op is verify_rejection:
        assert torch.equal(mixed.tokens[::2], greedy.tokens[::2])


@each_op
def test_batch_and_tree_change_nothing(device, op):
    (logits, drafts, trees, params), keywords = forest(op, 9, 1500, device, dtype=torch.bfloat16)
    params = SamplingParams(top_p=0.9)
    expected = op(logits, drafts, trees, params, **keywords)
    size = drafts.shape[0] // 9
    for b in (0, 4, 8):
        rows = slice(b * size, (b + 1) * size)
        shape = trees.parents[rows].tolist()
        mine = {**keywords, "draft_probs": keywords["draft_probs"][rows]}
        mine.update({name: keywords[name][b : b + 1] for name in ("seeds", "positions")})
        alone = op(logits[rows], drafts[rows], batch_of([shape], device, max_nodes=99, max_depth=50), params, **mine)
        width = expected.tokens.shape[1]
        assert torch.equal(alone.tokens[0, :width], expected.tokens[b])
        assert torch.equal(alone.accept_index[0, :width], expected.accept_index[b])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert same(op(logits, drafts, trees, params, **keywords), expected)
    finally:
        torch.set_num_threads(threads)


def called(op: Callable, arguments: tuple, keywords: dict, **more: Tensor) -> Verdict:
    """Calls any verify op with as much of this as it takes."""
    keywords = {"seeds": keywords["seeds"], "positions": keywords["positions"]} if op is verify_sampled else keywords
    keywords = {"epsilon": 0.0} if op is verify_typical else {} if op is verify_greedy else keywords
    return op(*arguments[: 3 if op is verify_greedy else 4], **keywords, **more)


@pytest.mark.parametrize("op", [*OPS, verify_greedy, verify_sampled, verify_typical], ids=lambda op: op.__name__)
def test_limits_cut_the_path(device, op):
    """What comes out under a limit is the beginning of what comes out without one; commit cuts alike."""
    batch = 60
    (logits, drafts, trees, params), keywords = forest(op, batch, 7, device, seed=2)
    if op in (verify_greedy, verify_sampled, verify_typical):  # drafts that these accept
        row = torch.arange(batch, device=device) * 7
        for _ in range(2):
            drafts[row + 1] = called(op, (logits, drafts, trees, params), keywords).tokens[:, 0]
            drafts[row + 3] = called(op, (logits, drafts, trees, params), keywords).tokens[:, 1].clamp(min=0)
    arguments = (logits, drafts, trees, params)
    whole = called(op, arguments, keywords)
    limits = torch.arange(batch, dtype=torch.int32).remainder(7).sub(1).to(device)
    cut = called(op, arguments, keywords, tokens_left=limits)
    kept = torch.minimum(limits.clamp(min=0), whole.num_accepted + 1)
    assert {1, 2, 3} <= set((whole.num_accepted + 1 - kept).tolist())
    place = torch.arange(whole.tokens.shape[1], device=device)
    for name in ("tokens", "accept_index"):
        before = torch.where(place < kept[:, None], getattr(whole, name), -1)
        assert torch.equal(getattr(cut, name), before)
    assert torch.equal(cut.num_accepted, (kept - 1).clamp(min=0)) and torch.equal(cut.status, whole.status)
    start = torch.arange(batch, dtype=torch.int32, device=device)
    taken = [commit(verdict, trees, start, tokens_left=limits) for verdict in (cut, whole)]
    for mine, other in zip(taken[0][:6], taken[1][:6], strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(taken[0].num_tokens, kept) and torch.equal(taken[0].finished, kept >= limits)
    assert not taken[0].finished.all() and torch.equal(commit(whole, trees, start).finished, kept < 0)


@pytest.mark.parametrize("op", [*OPS, verify_sampled], ids=lambda op: op.__name__)
def test_positions_of_either_width(device, op):
    arguments, keywords = forest(op, 5, 40, device)
    positions = torch.tensor([0, 7, 2**31 - 1, -1, -(2**31)], dtype=torch.int32, device=device)
    wide = {**keywords, "positions": positions.long()}
    assert same(called(op, arguments, {**keywords, "positions": positions}), called(op, arguments, wide))
    rows, drawn = (arguments[0][:5], arguments[3]), {"seeds": keywords["seeds"]}
    assert torch.equal(sample(*rows, **drawn, positions=positions), sample(*rows, **drawn, positions=positions.long()))


@each_op
def test_instruction_sets_agree(device, monkeypatch, isa, op):
    (logits, drafts, trees, params), keywords = forest(op, 30, 2100, device)
    got = op(logits, drafts, trees, params, **keywords)
    monkeypatch.setenv("PAGEDTREE_CPU_ISA", "portable")
    assert same(got, op(logits, drafts, trees, params, **keywords))


@each_op
def test_draft_vocabulary(device, op):
    (logits, drafts, trees, params), keywords = forest(op, 10, 40, device)
    table = torch.randperm(40, generator=torch.Generator().manual_seed(0)).to(device)
    expected = op(logits, drafts, trees, params, **keywords)
    got = op(logits, table.argsort()[drafts], trees, params, draft_to_target=table, **keywords)
    assert same(got, expected)


def test_chains_end_before_the_first_missing_draft(device):
    logits = torch.zeros(5, 4, device=device)
    logits[:, 1] = 50.0
    probs = torch.full((5, 4), 0.25, device=device)
    trees = batch_of([[-1, 0, 1, 2, 3]], device)
    for missing in range(1, 5):
        drafts = torch.ones(5, dtype=torch.int64, device=device)
        drafts[missing] = -1
        for law, laws in (("iid", {"draft_probs": probs}), ("onehot", {})):
            verdict = verify_block(logits, drafts, trees, PARAMS, draft_law=law, **streams(1, device), **laws)
            check(verdict, 0, list(range(missing)), [1] * missing)


def test_block_follows_first_children_only(device, value_checks, monkeypatch):
    trees = batch_of([[-1, 0, 0, 1, 3], [-1, 0, 1, 2]], device)
    logits = torch.zeros(9, 4, device=device)
    logits[:, 1] = 50.0
    drafts = torch.ones(9, dtype=torch.int64, device=device)
    given = {"draft_law": "onehot", **streams(2, device)}
    with pytest.raises(ValueError, match="`trees` must be chains, got a sibling of row 1"):
        verify_block(logits, drafts, trees, SamplingParams(), **given)
    monkeypatch.delenv("PAGEDTREE_CHECK")
    verdict = verify_block(logits, drafts, trees, SamplingParams(), **given)
    check(verdict, 0, [0, 1, 3, 4], [1, 1, 1, 1], status=MALFORMED)
    check(verdict, 1, [0, 1, 2, 3], [1, 1, 1, 1])


@given(st.integers(0, 2**32))
def test_hostile_values_stay_inside(device, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, batch, vocab, max_nodes, max_depth = 12, 4, 3, 8, 5
    mixed = [-(2**31), -5, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 2**31 - 1]
    strange = [math.nan, math.inf, -math.inf, -1.0, 0.0, 0.2, 0.5, 1.0, 3e38, 1e-45]

    def garbage(size: int) -> Tensor:
        picks = torch.randint(0, len(mixed), (size,), generator=generator)
        return torch.tensor(mixed, dtype=torch.int64)[picks].int().to(device)

    def floats(*shape: int) -> Tensor:
        return torch.tensor(strange)[torch.randint(0, len(strange), shape, generator=generator)].to(device)

    trees = TreeBatch(
        cu_nodes=garbage(batch + 1), parents=garbage(rows), depths=garbage(rows), first_child=garbage(rows),
        next_sibling=garbage(rows), mask=garbage(rows)[:, None],
        valid=torch.ones(batch, dtype=torch.bool, device=device), max_nodes=max_nodes, max_depth=max_depth,
    )  # fmt: skip
    logits, drafts = floats(rows, vocab), garbage(rows) % 4
    verdicts = [verify_typical(logits, drafts, trees, SamplingParams())]
    for op in OPS:
        for law in ("iid", "swor", "onehot"):
            given = {} if law == "onehot" else {"draft_probs": floats(rows, vocab), "draft_rows": garbage(rows)}
            if op is verify_traversal and law == "onehot":
                continue
            verdicts.append(op(
                logits, drafts, trees, SamplingParams(), draft_law=law, **streams(batch, device), **given,
                coins=floats(rows), final_coins=floats(batch),
            ))  # fmt: skip
    for verdict in verdicts:
        check_bounds(verdict, max_nodes, max_depth, vocab)


def test_thousand_nodes_deep_and_wide(device):
    count = 1024
    logits = torch.zeros(count, 5, device=device)
    logits[:, 2] = 60.0
    drafts = torch.full((count,), 2, device=device)
    probs = torch.full((count, 5), 0.2, device=device)
    given = {"draft_probs": probs, **streams(1, device)}
    chain, star = ([list(range(-1, count - 1))], [[-1] + [0] * (count - 1)])
    for op in OPS:
        verdict = op(logits, drafts, batch_of(chain, device), SamplingParams(), draft_law="iid", **given)
        check(verdict, 0, list(range(count)), [2] * count)
    check(verify_typical(logits, drafts, batch_of(chain, device), SamplingParams()), 0, list(range(count)), [2] * count)
    drafts[:-1] = 1
    for op in (verify_rejection, verify_traversal):
        verdict = op(logits, drafts, batch_of(star, device), SamplingParams(), draft_law="iid", **given)
        assert verdict.tokens[0, 0] == 2
    verdict = verify_rejection(
        logits, drafts, batch_of(star, device), SamplingParams(), draft_law="onehot", **streams(1, device)
    )
    check(verdict, 0, [0, count - 1], [2, 2])


# verify_typical -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [{}, {"epsilon": 0.3, "delta": 0.5}, {"epsilon": 1.0}, {"epsilon": 0.0}], ids=str)
def test_typical(device, bounds):
    generator = torch.Generator().manual_seed(0)
    shapes = [[-1] + [int(torch.randint(i + 1, (), generator=generator)) for i in range(12)] for _ in range(40)]
    trees = batch_of(shapes, device)
    logits = torch.randn(13 * 40, 9, generator=generator) * 2
    drafts = torch.randint(-1, 9, (13 * 40,), generator=generator)
    for sampling in ({}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}):
        verdict = verify_typical(logits.to(device), drafts.to(device), trees, SamplingParams(**sampling), **bounds)
        for b, shape in enumerate(shapes):
            rows = slice(13 * b, 13 * b + 13)
            p = np.stack([reference.distribution(reference.clean_logits(row), **sampling) for row in logits[rows]])
            path = reference.typical(
                shape, drafts[rows].tolist(), p, bounds.get("epsilon", 0.09), bounds.get("delta", 0.3)
            )
            tokens = [*(int(drafts[rows][n]) for n in path[1:]), int(p[path[-1]].argmax())]
            check(verdict, b, path, tokens)
        if bounds.get("epsilon", 0.09) < 1 and sampling == {}:
            assert (verdict.num_accepted > 1).any()


def test_typical_status_and_refusals(device):
    trees = batch_of([[-1, 0, 0]] * 2, device)
    logits = torch.zeros(6, 4, device=device)
    logits[:, 1] = 9.0
    logits[2, 0] = math.nan  # a leaf that is not chosen
    logits[4] = -math.inf
    drafts = torch.tensor([0, 1, 2, 0, 1, 2], device=device)
    verdict = verify_typical(logits, drafts, trees, SamplingParams())
    check(verdict, 0, [0, 1], [1, 1])
    check(verdict, 1, [0, 1], [1, 0], status=BAD_ROW)
    assert verify_typical(logits, drafts, trees, SamplingParams(), epsilon=np.float32(0.1)).status.tolist() == [0, 2]
    for name, value, error in (
        ("epsilon", -0.1, ValueError), ("epsilon", 1.5, ValueError), ("epsilon", math.nan, ValueError),
        ("delta", -1.0, ValueError), ("delta", math.inf, ValueError), ("delta", "0.3", TypeError),
        ("params", 1.0, TypeError),
    ):  # fmt: skip
        with pytest.raises(error, match=name):
            verify_typical(
                **{"logits": logits, "draft_tokens": drafts, "trees": trees, "params": SamplingParams(), name: value}
            )


# Refusals, torch ------------------------------------------------------------------------------------------------------


@each_op
def test_refusals(device, op):
    (logits, drafts, trees, params), keywords = forest(op, 2, 40, device)
    rows = drafts.shape[0]
    good = {"logits": logits, "draft_tokens": drafts, "trees": trees, "params": params, **keywords}
    op(**good)
    probs = good["draft_probs"]
    wrong = [
        ("draft_law", "topk", ValueError, "`draft_law` must be"),
        ("draft_law", 3, TypeError, "draft_law: expected a str, got int"),
        ("draft_probs", None, ValueError, "`draft_probs` must be a Tensor, the .*, got None"),
        ("draft_probs", probs.double(), ValueError, "`draft_probs` must be of dtype torch.float32 or .*bfloat16"),
        ("draft_probs", probs[:, :39], ValueError, rf"`draft_probs` must be of shape \[{rows}, 40\]"),
        ("draft_probs", probs[1:], ValueError, rf"`draft_probs` must be of shape \[{rows}, 40\]"),
        ("draft_probs", probs.t().contiguous().t(), ValueError, "`draft_probs` must be contiguous in its last"),
        ("draft_rows", drafts[1:], ValueError, rf"`draft_rows` must be of shape \[{rows}\]"),
        ("draft_rows", drafts.float(), ValueError, "`draft_rows` must be of dtype torch.int32 or torch.int64"),
        ("coins", drafts, ValueError, "`coins` must be of dtype torch.float32, got torch.int64"),
        ("coins", torch.zeros(rows + 1, device=device), ValueError, rf"`coins` must be of shape \[{rows}\]"),
        ("final_coins", torch.zeros(3, device=device), ValueError, r"`final_coins` .* shape \[2\] .*, got \[3\]"),
        ("seeds", good["seeds"].int(), ValueError, "`seeds` must be of dtype torch.int64, got torch.int32"),
        ("positions", good["positions"][:1], ValueError, r"`positions` must be of shape \[2\] .*, got \[1\]"),
        ("params", {}, TypeError, "params: expected a SamplingParams, got dict"),
        ("draft_params", {"temperature": 1}, TypeError, "draft_params: expected a SamplingParams, got dict"),
        ("draft_params", SamplingParams(top_k=torch.zeros(3, dtype=torch.int32, device=device)), ValueError,
         r"`draft_top_k` must be of shape \[1\] or \[2\], got \[3\]"),
        ("logits", logits.int(), ValueError, "`logits` must be of dtype torch.float32 or .*bfloat16, got torch.int32"),
        ("trees", DraftTree([-1, 0]), TypeError, "trees: expected a TreeBatch, got DraftTree"),
        ("trees", replace(trees, max_depth=-1), ValueError, r"`max_depth` must be in 0..1023, got -1"),
    ]  # fmt: skip
    for name, value, error, message in wrong:
        with pytest.raises(error, match=message):
            op(**{**good, name: value})
    # Probabilities of drafts that were chosen without chance would bias the result.
    refused = "draft_law" if op is verify_traversal else "draft_probs"
    with pytest.raises(ValueError, match=f"{op.__name__}: `{refused}` must be"):
        op(**{**good, "draft_law": "onehot"})
    if op is not verify_traversal:
        chosen = {**good, "draft_law": "onehot", "draft_probs": None}
        op(**chosen)
        with pytest.raises(ValueError, match="`draft_params` must be None"):
            op(**chosen, draft_params=SamplingParams())
        with pytest.raises(ValueError, match="`draft_rows` must be None"):
            op(**chosen, draft_rows=drafts)


def test_value_checks(device, value_checks):
    (logits, drafts, trees, params), keywords = forest(verify_rejection, 2, 9, device)
    for dtype in (torch.int32, torch.int64):
        rows = torch.arange(len(drafts), dtype=dtype, device=device)
        verify_rejection(logits, drafts, trees, params, draft_rows=rows, **keywords)
        rows[3] = len(drafts)
        with pytest.raises(ValueError, match=r"`draft_rows\[3\]` must be in 0\.\.13, got 14"):
            verify_rejection(logits, drafts, trees, params, draft_rows=rows, **keywords)
