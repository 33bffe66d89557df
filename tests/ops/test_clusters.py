"""Rows that clusters of CTAs read together give the same tokens and paths as the CPU backend, bit for bit.

Those that one CTA reads: `test_cases.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from device_case import placed
from sampling_case import HALF_TYPES, SAMPLINGS, random_words
from torch import Tensor

from pagedtree import (
    DraftTree,
    SamplingParams,
    TreeBatch,
    expand_tree,
    medusa_propose,
    sample,
    start_draft,
    token_logprobs,
    verify_block,
    verify_greedy,
    verify_rejection,
    verify_sampled,
    verify_traversal,
    verify_typical,
)
from pagedtree.check.cases.verification import hostile_rows
from pagedtree.testing import backends, use_backend

pytestmark = pytest.mark.skipif(backends() == ["cpu"], reason="this build has one backend")


def compare_sampling(other, dtype, vocab, samplings=SAMPLINGS):
    device = "cuda" if other == "cuda" else "cpu"
    logits, seeds, positions = hostile_rows(vocab, dtype), random_words(12), random_words(12, 1)
    for sampling in samplings:
        expected = sample(logits, SamplingParams(**sampling), seeds=seeds, positions=positions)
        with use_backend(other):
            got = sample(
                placed(logits, device),
                SamplingParams(**sampling),
                seeds=seeds.to(device),
                positions=positions.to(device),
            )
        assert got.cpu().equal(expected), sampling


def compare_verification(other, batch, vocab, samplings=SAMPLINGS):
    device = "cuda" if other == "cuda" else "cpu"
    generator = torch.Generator().manual_seed(batch)
    shapes = [DraftTree([-1, *[int(torch.randint(i, (), generator=generator)) for i in range(1, 9)]])] * batch
    results = []
    for name, place in (("cpu", "cpu"), (other, device)):
        generator.manual_seed(batch)
        trees = TreeBatch.from_trees(shapes, max_depth=8, device=place)
        rows = trees.parents.shape[0]
        logits = (torch.randn(rows, vocab, generator=generator) * 2).to(torch.bfloat16)
        allowed = torch.rand(rows, vocab, generator=generator) < 0.8
        parent_rows = trees.parents.cpu().clamp(min=0) + torch.arange(rows) // 9 * 9
        best = logits.masked_fill(~allowed, -math.inf).argmax(1)[parent_rows]
        drafts = torch.where(torch.rand(rows, generator=generator) < 0.9, best, 3)
        seeds, positions = random_words(batch).to(place), random_words(batch, 1).to(place)
        arguments = (logits.to(place), drafts.to(place), trees)
        with use_backend(name):
            results.append(verify_greedy(*arguments, grammar_mask=allowed.to(place)))
            for sampling in samplings:
                results.append(verify_sampled(*arguments, SamplingParams(**sampling), seeds=seeds, positions=positions))
    half = len(results) // 2
    for expected, got in zip(results[:half], results[half:], strict=True):
        assert all(a.equal(b.cpu()) for a, b in zip(expected, got, strict=True))
    assert any((verdict.num_accepted > 1).any() for verdict in results)


RULES = [
    *((verify_rejection, law) for law in ("iid", "swor", "onehot")),
    *((verify_block, law) for law in ("iid", "onehot")),
    *((verify_traversal, law) for law in ("iid", "swor")),
    (verify_typical, None),
]


def compare_rule(other, op, law, vocab):
    generator = torch.Generator().manual_seed(vocab)
    shapes = (
        [[-1, 0, 1, 2, 3], [-1, 0, 1, 2], [-1, 0, 1]]
        if op is verify_block
        else [[-1, 0, 0, 0, 1, 1, 2], [-1, 0, 1, 1, 2]]
    )
    parents = torch.cat([torch.tensor(shape) + sum(map(len, shapes[:i])) for i, shape in enumerate(shapes)])
    results: dict[str, list[Tensor]] = {"cpu": [], other: []}
    for k, parameters in [*enumerate(SAMPLINGS)][:: 1 if vocab < 10_000 else 5]:
        dtype, draft_dtype = HALF_TYPES[k % 3], HALF_TYPES[(k // 3) % 3]
        logits = hostile_rows(vocab, dtype, seed=k)[torch.randperm(12, generator=generator)]
        near = logits.float().nan_to_num(0, 60, -60) + torch.randn(12, vocab, generator=generator)
        drafts = torch.multinomial(near.softmax(-1)[parents.clamp(min=0)], 1, generator=generator)[:, 0]
        drafts[torch.rand(12, generator=generator) < 0.1] = -1
        given = {"seeds": random_words(len(shapes), k), "positions": random_words(len(shapes), k + 1)}
        if law != "onehot":
            given["draft_probs"] = (near.softmax(-1) if k % 2 else near).to(draft_dtype)
        if k % 5 == 0:
            given["grammar_mask"] = torch.rand(12, vocab, generator=generator) < 0.7
        if op is verify_typical:
            given = {name: x for name, x in given.items() if name == "grammar_mask"}
        for name, found in results.items():
            place = "cuda" if name == "cuda" else "cpu"
            options = {key: x.to(place) for key, x in given.items()}
            if law is not None:
                options["draft_law"] = law
                if law != "onehot" and k % 2 == 0:
                    options["draft_params"] = SamplingParams(**SAMPLINGS[-k])
            trees = TreeBatch.from_trees([DraftTree(shape) for shape in shapes], device=place)
            with use_backend(name):
                found += op(placed(logits, place), drafts.to(place), trees, SamplingParams(**parameters), **options)
    for k, (expected, got) in enumerate(zip(results["cpu"], results[other], strict=True)):
        assert got.cpu().equal(expected), (k, expected, got)
    assert vocab not in (6, 1025) or any((accepted > 0).any() for accepted in results["cpu"][1::4])


def compare_top_tokens(other, dtype, vocab, count):
    """Trees of a draft model and of Medusa heads, and log-probabilities, which all list the best tokens of each row."""
    results: dict[str, list[Tensor]] = {"cpu": [], other: []}
    logits = hostile_rows(vocab, dtype)
    tree = DraftTree.full([count, 2])
    for name, found in results.items():
        place = "cuda" if name == "cuda" else "cpu"
        rows = placed(logits, place)
        with use_backend(name):
            state = expand_tree(start_draft(torch.arange(12).to(place), max_kv_nodes=64), rows, num_children=count)
            draft = medusa_propose(rows.unflatten(0, (4, 3)), tree)
            listed = token_logprobs(rows, torch.arange(12).to(place), top_n=count)
        found += [state.tokens, state.frontier, state.mask, state.scores, draft.draft_tokens, *listed]
    for k, (expected, got) in enumerate(zip(results["cpu"], results[other], strict=True)):
        # The logarithm of a sum is the C library's on the CPU, CUDA's on a GPU.
        near = {"rtol": 1e-6, "atol": 1e-6} if other == "cuda" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(got.cpu(), expected, **near, msg=lambda text, k=k: f"{k}: {text}")


CORE_RULES = [  # each rule and each law
    (verify_rejection, "swor"), (verify_block, "onehot"), (verify_traversal, "iid"), (verify_typical, None),
]  # fmt: skip


@pytest.mark.skipif("simt" not in backends(), reason="built without simt")
@pytest.mark.parametrize(
    ("ctas", "order"),
    [
        pytest.param(2, "forward", marks=pytest.mark.slow),
        pytest.param(8, "random:1", marks=pytest.mark.slow),
        (16, "reverse"),
    ],
)
class TestClusters:
    """Several CTAs that read a row together find what one CTA finds."""

    VOCAB = 66_001  # 16 CTAs at most, the last one with fewer tokens
    samplings = pytest.mark.parametrize(
        "samplings",
        [pytest.param(SAMPLINGS[::5], id="few"), pytest.param(SAMPLINGS, id="all", marks=pytest.mark.slow)],
    )

    @pytest.fixture(autouse=True)
    def device(self, ctas, order, monkeypatch):
        monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", f"{12 * ctas}:227:{ctas}")
        monkeypatch.setenv("PAGEDTREE_SIMT_ORDER", order)

    @samplings
    def test_sample(self, samplings):
        compare_sampling("simt", torch.bfloat16, self.VOCAB, samplings)

    @pytest.mark.parametrize("count", [3, pytest.param(40, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
    def test_top_tokens(self, dtype, count):
        compare_top_tokens("simt", dtype, self.VOCAB, count)

    @samplings
    @pytest.mark.parametrize("batch", [1, 3])
    def test_verify(self, batch, ctas, samplings, monkeypatch):
        """One tree has all rows drawn at once; three, on a device with a cluster for each, are walked row by row."""
        if batch > 1:
            monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", f"{batch * ctas}:227:{ctas}")
        compare_verification("simt", batch, self.VOCAB, samplings)

    @pytest.mark.parametrize(
        ("op", "law"),
        [pytest.param(*rule, marks=[] if rule in CORE_RULES else pytest.mark.slow) for rule in RULES],
        ids=lambda x: getattr(x, "__name__", x),
    )
    def test_rules(self, op, law):
        compare_rule("simt", op, law, self.VOCAB)
