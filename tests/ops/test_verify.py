"""verify_greedy and verify_sampled: the tokens are those of decoding without drafts, whatever is drafted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from verify_case import BAD_ROW, PARAMS, batch_of, check, streams

from pagedtree import (
    DraftTree,
    SamplingParams,
    TreeBatch,
    reference,
    sample,
    verify_greedy,
    verify_sampled,
)


def without_drafts(logits: Tensor, params: SamplingParams, seed: Tensor, position: Tensor):
    """next_token for the reference walk: `sample` at one node's row."""

    def next_token(node: int, depth: int) -> int:
        at = {"seeds": seed.reshape(1), "positions": position.reshape(1) + depth}
        return int(sample(logits[node : node + 1], params, **at))

    return next_token


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    shapes = draw(st.lists(st.lists(st.integers(0, 2**20), max_size=24), min_size=1, max_size=4))
    return [[-1] + [word % (i + 1) for i, word in enumerate(shape)] for shape in shapes], draw(st.integers(0, 2**30))


def likely_drafts(logits: Tensor, parents: list[list[int]], params: SamplingParams, at: dict, generator) -> Tensor:
    """Drafts that follow the target often enough for long paths, and repeat among siblings."""
    drafts, begin = [], 0
    for b, tree in enumerate(parents):
        depths = DraftTree(tree).depths
        for node, parent in enumerate(tree):
            if node == 0 or torch.rand((), generator=generator) < 0.4:
                drafts.append(int(torch.randint(-2, logits.shape[1] + 2, (), generator=generator)))
            else:
                follow = without_drafts(logits[begin:], params, at["seeds"][b], at["positions"][b])
                drafts.append(follow(parent, int(depths[parent])))
        begin += len(tree)
    return torch.tensor(drafts)


@given(forests())
def test_sampled_tokens_are_those_without_drafts(device, forest):
    parents, seed = forest
    generator = torch.Generator().manual_seed(seed)
    trees = batch_of(parents, device)
    rows = trees.parents.shape[0]
    logits = (torch.randn(rows, 11, generator=generator) * 2).to(device)
    at = streams(len(parents), device, seed)
    drafts = likely_drafts(logits, parents, PARAMS, at, generator).to(device)
    verdict = verify_sampled(logits, drafts, trees, PARAMS, **at)
    begin = 0
    for b, tree in enumerate(parents):
        follow = without_drafts(logits[begin:], PARAMS, at["seeds"][b], at["positions"][b])
        path, tokens = reference.walk(tree, drafts[begin : begin + len(tree)].tolist(), follow)
        check(verdict, b, path, tokens)
        begin += len(tree)


@given(forests())
def test_greedy_tokens_are_argmaxes(device, forest):
    parents, seed = forest
    generator = torch.Generator().manual_seed(seed)
    trees = batch_of(parents, device)
    logits = torch.randint(-3, 4, (trees.parents.shape[0], 6), generator=generator).to(torch.bfloat16)
    drafts = torch.randint(-1, 4, (logits.shape[0],), generator=generator, dtype=torch.int32)
    verdict = verify_greedy(logits.to(device), drafts.to(device), trees)
    sampled = verify_sampled(
        logits.to(device), drafts.to(device), trees, SamplingParams(temperature=0), **streams(len(parents), device)
    )
    assert all(torch.equal(a, b) for a, b in zip(verdict, sampled, strict=True))
    best = logits.float().numpy().argmax(axis=1)
    begin = 0
    for b, tree in enumerate(parents):
        local = best[begin : begin + len(tree)].tolist()
        path, tokens = reference.walk(tree, drafts[begin:].tolist(), lambda node, depth, local=local: local[node])
        check(verdict, b, path, tokens)
        begin += len(tree)


@pytest.mark.parametrize("drafter", ["best", "worst", "all_siblings", "duplicates", "none"])
def test_output_does_not_depend_on_the_drafter(device, drafter):
    """A seeded generation step by step: always the tokens of plain sampling."""
    vocab, length, generator = 7, 24, torch.Generator().manual_seed(1)
    table = (torch.randn(vocab, vocab, generator=generator) * 1.5).to(device)  # logits after each token
    seed = torch.tensor([42], device=device)
    params = SamplingParams(top_p=0.9)

    def plain() -> list[int]:
        tokens, last = [], 0
        for position in range(length):
            at = torch.tensor([position], device=device)
            last = int(sample(table[last : last + 1], params, seeds=seed, positions=at))
            tokens.append(last)
        return tokens

    tokens, position, steps = [0], 0, 0
    while position < length:
        last = tokens[-1]
        if drafter == "all_siblings":
            parents, drafts = [-1] + [0] * vocab, [last, *range(vocab)]
        elif drafter == "duplicates":
            parents, drafts = [-1, 0, 0, 0, 1, 2, 2, 5], [last, 3, 3, 3, 1, 3, 3, 3]
        elif drafter == "none":
            parents, drafts = [-1], [last]
        else:  # a chain of the likeliest or the least likely successors
            parents, drafts = [-1, 0, 1, 2], [last]
            for _ in range(3):
                row = table[drafts[-1]]
                drafts.append(int(row.argmax() if drafter == "best" else row.argmin()))
        trees = batch_of([parents], device)
        verdict = verify_sampled(
            table[drafts], torch.tensor(drafts, device=device), trees, params,
            seeds=seed, positions=torch.tensor([position], device=device),
        )  # fmt: skip
        count = int(verdict.num_accepted[0]) + 1
        tokens += verdict.tokens[0, :count].tolist()
        position += count
        steps += 1
    assert tokens[1 : length + 1] == plain()
    assert steps < length if drafter in ("best", "all_siblings") else steps <= length


def test_bonus_comes_from_the_row_of_the_leaf(device):
    trees = batch_of([[-1, 0, 0, 1, 2]], device)
    logits = torch.full((5, 6), -9.0, device=device)
    for node, token in enumerate([2, 0, 3, 1, 5]):
        logits[node, token] = 9.0
    drafts = torch.tensor([4, 1, 2, 0, 3], device=device)
    check(verify_greedy(logits, drafts, trees), 0, [0, 2, 4], [2, 3, 5])


def test_siblings_that_repeat_a_token(device):
    trees = batch_of([[-1, 0, 0, 2]], device)
    logits = torch.zeros(4, 3, device=device)
    logits[:, 1] = 1.0
    check(verify_greedy(logits, torch.tensor([0, 1, 1, 1], device=device), trees), 0, [0, 1], [1, 1])


@pytest.mark.parametrize("draft", [-1, 3, -(2**31), 2**31 - 1])
def test_ids_outside_the_vocabulary_are_no_drafts(device, draft):
    trees = batch_of([[-1, 0, 0, 1]], device)
    logits = torch.tensor([0.0, 1.0, 0.0], device=device).expand(4, 3)
    for dtype in (torch.int32, torch.int64):
        drafts = torch.tensor([draft, draft, 1, 1], dtype=dtype, device=device)
        check(verify_greedy(logits, drafts, trees), 0, [0, 2], [1, 1])
    if draft == -1:
        drafts = torch.tensor([0, 2**32 + 1, 1 - 2**32, 1], device=device)
        check(verify_greedy(logits, drafts, trees), 0, [0], [1])


def packed(mask: Tensor) -> Tensor:
    rows, vocab = mask.shape
    bits = np.zeros((rows, -(-vocab // 32) * 32), dtype=bool)
    bits[:, :vocab] = mask.cpu().numpy()
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)).to(mask.device)


@pytest.mark.parametrize("vocab", [1, 7, 31, 32, 33, 63, 64, 65, 100, 1061])
def test_grammar_masks(device, vocab):
    """A mask is the same as -inf in the logits, in either form and at any row stride."""
    generator = torch.Generator().manual_seed(vocab)
    trees = batch_of([[-1, 0, 0, 1, 3], [-1], [-1, 0]], device)
    rows = trees.parents.shape[0]
    logits = torch.randn(rows, vocab, generator=generator).to(torch.bfloat16)
    logits[2, 0] = math.nan
    mask = torch.rand(rows, vocab, generator=generator) < 0.5
    mask[0] = False
    masked = logits.masked_fill(~mask, -math.inf).to(device)
    logits, mask = logits.to(device), mask.to(device)
    drafts = torch.randint(0, vocab, (rows,), generator=generator).to(device)
    at = streams(3, device)
    wide = torch.ones(rows, vocab + 5, dtype=torch.bool, device=device)
    wide[:, 3 : 3 + vocab] = mask
    for form in (mask, packed(mask), wide[:, 3 : 3 + vocab]):
        for params in (SamplingParams(), SamplingParams(top_p=0.7, top_k=20)):
            got = verify_sampled(logits, drafts, trees, params, **at, grammar_mask=form)
            expected = verify_sampled(masked, drafts, trees, params, **at)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        got = verify_greedy(logits, drafts, trees, grammar_mask=form)
        assert all(torch.equal(a, b) for a, b in zip(got, verify_greedy(masked, drafts, trees), strict=True))
        assert got.status[0] == BAD_ROW and got.tokens[0, 0] == 0
        if vocab > 1:
            assert mask[5, got.tokens[1, 0]] or not mask[5].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_draft_vocabulary(device, dtype):
    trees = batch_of([[-1, 0, 0, 0, 0, 4]], device)
    logits = torch.zeros(6, 50, device=device)
    logits[:, 40] = 1.0
    table = torch.tensor([40, 7, 99, -3, 40], dtype=dtype, device=device)
    for drafts, path in (
        ([0, 1, 2, 3, 4, 0], [0, 4, 5]),
        ([40, 40, 40, 40, 0, 5], [0, 4]),
        ([0, -1, 5, 6, 1, 0], [0]),
        ([0, 1, 0, 4, 4, 0], [0, 2]),
    ):
        verdict = verify_greedy(logits, torch.tensor(drafts, dtype=dtype, device=device), trees, draft_to_target=table)
        check(verdict, 0, path, [40] * len(path))
    drafts = torch.full((6,), 40, dtype=dtype, device=device)
    check(verify_greedy(logits, drafts, trees, draft_to_target=table[:0]), 0, [0], [40])  # no draft vocabulary at all


def test_status_of_bad_rows(device):
    """Only rows that the walk read count."""
    trees = batch_of([[-1, 0, 0]] * 5, device)
    logits = torch.zeros(5, 3, 4)
    logits[:, :, 1] = 1.0
    logits[1, 1, 3] = math.nan  # on the path
    logits[2, 2, 3] = math.nan  # not on the path
    logits[3, 1] = -math.inf
    logits[4, 1, 3] = math.inf
    drafts = torch.tensor([0, 1, 2] * 5, device=device)
    flat = logits.reshape(15, 4).to(device)
    assert verify_greedy(flat, drafts, trees).status.tolist() == [0, BAD_ROW, 0, BAD_ROW, 0]
    assert verify_greedy(flat, drafts, trees).tokens[:, 1].tolist() == [1, 1, 1, 0, 3]
    verdict = verify_sampled(flat, drafts, trees, SamplingParams(top_k=1), **streams(5, device))
    assert verdict.status.tolist() == [0, BAD_ROW, 0, BAD_ROW, 0]
    assert 0 <= int(verdict.tokens[3, 1]) < 4


def test_greedy_and_sampled_rows_in_one_batch(device):
    generator = torch.Generator().manual_seed(0)
    trees = batch_of([[-1, 0, 1, 1]] * 6, device)
    logits = (torch.randn(24, 30, generator=generator) * 4).to(device)
    at = streams(6, device)
    temperature = torch.tensor([0.0, 1.0, 0.0, 0.5, 0.0, 3.0], device=device)
    drafts = logits.argmax(dim=1)[torch.tensor([0, 0, 1, 1] * 6) + torch.arange(6).repeat_interleave(4) * 4]
    mixed = verify_sampled(logits, drafts, trees, SamplingParams(temperature=temperature), **at)
    greedy = verify_greedy(logits, drafts, trees)
    for b in range(6):
        params = SamplingParams(temperature=float(temperature[b]))
        alone = verify_sampled(logits, drafts, trees, params, **at)
        for column, mine, its_own in zip(mixed, alone, greedy, strict=True):
            assert torch.equal(column[b], mine[b])
            if b % 2 == 0:
                assert torch.equal(column[b], its_own[b])


def test_batch_and_tree_change_nothing(device):
    """Bitwise the same in another slot, in a bigger tree, with other bounds, with one thread, from strided logits."""
    generator = torch.Generator().manual_seed(0)
    parents = [[-1] + [int(torch.randint(i + 1, (), generator=generator)) for i in range(n)] for n in (0, 3, 9, 20, 40)]
    sizes = [len(tree) for tree in parents]
    blocks = [(torch.randn(size, 300, generator=generator) * 3).to(torch.float16).to(device) for size in sizes]
    drafts = [torch.randint(0, 300, (size,), generator=generator).to(device) for size in sizes]
    for tree, block, tokens in zip(parents, blocks, drafts, strict=True):
        tokens[1:] = block.argmax(dim=1)[torch.tensor(tree[1:], dtype=torch.int64)]
    at = streams(5, device)

    def run(order: list[int], **bounds: int) -> list[tuple]:
        trees = batch_of([parents[b] for b in order], device, **bounds)
        pad = trees.parents.shape[0] - sum(sizes[b] for b in order)
        logits = torch.full((trees.parents.shape[0], 333), math.nan, dtype=torch.float16, device=device)[:, 7:307]
        tokens = torch.zeros(trees.parents.shape[0], dtype=torch.int64, device=device)
        logits[: logits.shape[0] - pad] = torch.cat([blocks[b] for b in order])
        tokens[: logits.shape[0] - pad] = torch.cat([drafts[b] for b in order])
        picked = {name: stream[order] for name, stream in at.items()}
        verdict = verify_sampled(logits, tokens, trees, SamplingParams(temperature=0.4, top_p=0.8), **picked)
        rows = [tuple([entry for entry in row if entry >= 0] for row in (verdict.tokens[i].tolist(),
                verdict.accept_index[i].tolist())) for i in range(len(order))]  # fmt: skip
        return [rows[order.index(b)] for b in sorted(order)]

    expected = run([0, 1, 2, 3, 4])
    assert sum(len(tokens) for tokens, _ in expected) > 8
    assert run([3, 0, 4, 2, 1]) == expected
    assert run([0, 1, 2, 3, 4], max_nodes=1000, max_depth=700, capacity=99) == expected
    assert [run([b])[0] for b in range(5)] == expected
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert run([0, 1, 2, 3, 4]) == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
def test_distribution_of_the_first_tokens(device, draws, dtype):
    """The joint distribution of the first two tokens of many seeds, with adversarial drafts: p(a) p(b | a)."""
    count, vocab = draws(30_000), 4
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocab + 1, vocab, generator=generator).to(dtype)  # the last row is the prompt's
    params = {"temperature": 0.9, "top_p": 0.95}
    order = table[vocab].float().argsort()  # the least likely token first
    drafts = torch.stack([order.new_tensor(0), order[0], order[2]])
    logits = table[torch.tensor([vocab, int(order[0]), int(order[2])])]
    trees = TreeBatch.from_trees([DraftTree([-1, 0, 0])] * count, device=device)
    at = {"seeds": torch.arange(count, device=device), "positions": torch.full((count,), 3, device=device)}
    verdict = verify_sampled(
        logits.to(device).repeat(count, 1), drafts.to(device).repeat(count), trees, SamplingParams(**params), **at
    )
    first = verdict.tokens[:, 0].cpu()
    second = verdict.tokens[:, 1].cpu()
    rest = sample(
        table[first].to(device), SamplingParams(**params), seeds=at["seeds"], positions=at["positions"] + 1
    ).cpu()
    assert (second >= 0).float().mean() > 0.05
    second = torch.where(second >= 0, second, rest)
    distributions = np.stack([reference.distribution(reference.clean_logits(row), **params) for row in table])
    expected = distributions[vocab][:, None] * distributions[:vocab] * count
    seen = np.bincount((first * vocab + second).numpy(), minlength=vocab * vocab).reshape(vocab, vocab)
    assert seen[expected == 0].sum() == 0
    bins = expected >= 5
    statistic = ((seen[bins] - expected[bins]) ** 2 / expected[bins]).sum()
    assert statistic < bins.sum() + 10 * math.sqrt(2 * bins.sum())
