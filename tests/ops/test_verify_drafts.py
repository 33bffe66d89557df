"""Rules that compare target with draft are lossless by enumeration; ops decide as they do."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from support.batches import batch_of, streams
from support.doubles import base_of, intercepted_launches, simt_library, symbols_of
from support.exact import CHAIN, LOSSLESS, PAIR, RULES, STAIR, TREE, Questions, ToyPair

from pagedtree import (
    SamplingParams,
    reference,
    verify_block,
    verify_rejection,
    verify_sampled,
    verify_traversal,
    verify_typical,
)
from pagedtree.testing import use_backend

CPU = torch.device("cpu")


@pytest.mark.parametrize(("rule", "law", "tree"), LOSSLESS, ids=str)
def test_rules_are_lossless(rule, law, tree):
    """Total variation is 0 over every draft, coin and bonus."""
    for seed in range(2):
        assert ToyPair(3, seed).error(RULES[rule][0], tree, law) == 0


# Broken rules, and drafts of another law ------------------------------------------------------------------------------


def no_renormalisation(node, children, drafts, p, q, draft_law, below):
    for child in children:
        x = drafts[child]
        if q[x] > 0 and below(child, p[x] / q[x]):
            return child, p
        p = reference.excess(p, q)
    return None, reference.normalised(p)


def capped_ratio(z, weight):
    return min(z / weight, 1) if weight else 0


MUTANTS = {
    "no_renormalisation": ("judge_in_turn", no_renormalisation, "rejection", "iid", None, PAIR),
    "capped_ratio": ("acceptance", capped_ratio, "traversal", "iid", None, TREE),
    "iid_told_swor_drawn": (None, None, "rejection", "iid", "swor", PAIR),
    "swor_told_iid_drawn": (None, None, "traversal", "swor", "iid", PAIR),
    "drawn_told_chosen": (None, None, "block", "iid", "onehot", CHAIN),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_enumeration_sees_broken_rules(monkeypatch, mutant):
    part, broken, rule, law, draw_law, tree = MUTANTS[mutant]
    if part is not None:
        monkeypatch.setattr(reference.verify, part, broken)
    errors = [ToyPair(4, seed).error(RULES[rule][0], tree, law, draw_law) for seed in range(2)]
    assert max(errors) > Fraction(1, 1000)


def test_onehot_forgives_how_drafts_were_chosen():
    for manner in ("iid", "swor"):
        assert ToyPair(3, 1).error(reference.rejection, PAIR, "onehot", manner) == 0


def mean_accepted(rule: Callable, pair: ToyPair, tree: list[int], law: str) -> Fraction:
    mean, total = Fraction(0), Fraction(0)
    for chance, tokens in pair.drafts(tree, law):
        p, q = pair.distributions(tree, tokens)
        total += chance
        for weight, _, (path, _) in reference.branches(
            lambda below, tokens=tokens, p=p, q=q: rule(tree, tokens, p, q, law, below)
        ):
            mean += chance * weight * (len(path) - 1)
    return mean / total


def test_joint_rules_accept_no_less():
    gained = 0
    for seed in range(2):
        pair = ToyPair(3, seed)
        token = mean_accepted(reference.rejection, pair, CHAIN, "iid")
        assert mean_accepted(reference.block, pair, CHAIN, "iid") >= token
        assert mean_accepted(reference.traversal, pair, CHAIN, "iid") >= token
        gained += mean_accepted(reference.block, pair, CHAIN, "iid") > token
        one_hot = [mean_accepted(rule, pair, CHAIN, "onehot") for rule in (reference.rejection, reference.block)]
        assert one_hot[0] == one_hot[1]
        for law in ("iid", "swor"):
            for tree in (TREE, STAIR):
                traversal = mean_accepted(reference.traversal, pair, tree, law)
                assert traversal >= mean_accepted(reference.rejection, pair, tree, law)
    assert gained > 0


# The ops --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "law", "tree"), LOSSLESS, ids=str)
def test_ops_match_exact_rules(device, rule, law, tree):
    """Injected coins test both sides of every bound."""
    exact, op = RULES[rule]
    questions = Questions.of_pairs(exact, law, tree, every=9)
    dtype = {"rejection": torch.float32, "block": torch.float16, "traversal": torch.bfloat16}[rule]
    assert len(questions.expected) > 50
    questions.check(questions.answer(op, law, device, dtype))


def test_coins_stay_below_one(device):
    """This coin, 1 - 3e-9, would round to 1 in float32; where p == q every coin accepts."""
    logits = torch.full((2, 4), -math.inf, device=device)
    logits[:, 1:3] = 1.5
    drafts, trees = torch.tensor([0, 1], device=device), batch_of([[-1, 0]], device)
    words = {"draft_law": "iid", "draft_probs": logits.softmax(1), "positions": torch.zeros_like(drafts[:1])}
    seeds = torch.tensor([61551765], device=device)
    assert verify_rejection(logits, drafts, trees, SamplingParams(), **words, seeds=seeds).num_accepted.tolist() == [1]


@pytest.mark.parametrize("vocab", [4, 33, 2500])
@pytest.mark.parametrize("law", ["iid", "swor"])
def test_residual_of_rounding_is_the_target(device, law, vocab):
    """Where p == q up to rounding, and q cannot have drawn the last draft, the bonus comes from p."""
    count, generator = 40, torch.Generator().manual_seed(vocab)
    logits = torch.randn(4 * count, vocab, generator=generator) * 2
    logits[:, 1] = -math.inf
    q = logits.softmax(dim=1)
    drafts = torch.multinomial(q, 1, generator=generator)[:, 0].roll(1)
    drafts[3::4] = 1
    cumulative = q[2::4].double().cumsum(dim=1)
    bonus = q[2::4].argmax(dim=1)
    finals = (cumulative - q[2::4].double() / 2).gather(1, bonus[:, None])[:, 0].float()
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    for op in (verify_rejection, verify_block, verify_traversal):
        verdict = op(
            logits.to(device), drafts.to(device), batch_of([[-1, 0, 1, 2]] * count, device), SamplingParams(),
            draft_law=law, draft_probs=q.to(device), seeds=zeros, positions=zeros,
            coins=torch.full((4 * count,), 0.9, device=device), final_coins=finals.to(device),
        )  # fmt: skip
        assert (verdict.num_accepted == 2).all(), op
        assert torch.equal(verdict.tokens[:, 2].cpu(), bonus), op


LISTED = {
    "sampled": (verify_sampled, [None]),
    "rejection": (verify_rejection, ["iid", "swor", "onehot"]),
    "block": (verify_block, ["iid", "onehot"]),
    "traversal": (verify_traversal, ["iid", "swor"]),
    "typical": (verify_typical, [None]),
}
FILTERS = [
    {"top_p": 0.9},
    {"top_p": 0.97, "top_k": 20, "temperature": 0.7},
    {"top_p": 0.7, "top_k": 9, "min_p": 0.01, "filter_order": "joint"},
    {"min_p": 0.05},
    {"temperature": 0.0},
]


@pytest.mark.skipif(simt_library() is None, reason="built without simt")
@pytest.mark.parametrize(("dtype", "ctas"), [(torch.float32, 1), (torch.bfloat16, 4)], ids=str)
@pytest.mark.parametrize("name", LISTED)
def test_lists_of_kept_tokens(monkeypatch, name, dtype, ctas):
    """Peaked rows (masked, unaligned, half with ties, drafts with logits) need no kernel over whole rows; flat rows and
    NaN do."""
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", f"32:227:{ctas}")
    op, laws = LISTED[name]
    parents = [-1, 0, 1, 2] if name == "block" else [-1, 0, 0, 0, 1, 1, 5]
    rows, vocab, generator = 2 * len(parents), 16389, torch.Generator().manual_seed(0)
    likely = torch.rand(rows, vocab, generator=generator).topk(24).indices
    peaked = torch.randn(rows, vocab, generator=generator).scatter_(
        1, likely, 12 - torch.arange(24 * rows).view(rows, -1) % 24 / 5
    )
    peaked[rows // 2 :] = (peaked[rows // 2 :] * 4).round() / 4
    hostile = peaked.clone()
    hostile[1::4, ::2], hostile[2::7, 5], hostile[3::5] = math.nan, math.inf, 0.25
    above = torch.arange(rows) // len(parents) * len(parents) + torch.tensor(parents * 2).clamp(min=0)
    drafts = likely[above, torch.randint(3, (rows,), generator=generator)]
    guesses = peaked + torch.randn(rows, vocab, generator=generator)
    trees, library = batch_of([parents] * 2, CPU), simt_library()

    def leave_out(kernel, *_):
        return int("rules_kernel" in symbols_of(library)[kernel - base_of(library)])

    for law in laws:
        words = ({} if name == "typical" else streams(2, CPU)) | ({"draft_law": law} if law else {})
        words["grammar_mask"] = torch.rand(rows, vocab, generator=generator) < 0.9
        for params in FILTERS:
            if law in ("iid", "swor"):
                of_logits = "top_k" in params
                words["draft_probs"] = (guesses if of_logits else torch.softmax(guesses, 1)).to(dtype)
                words["draft_params"] = SamplingParams(**params) if of_logits else None
            for logits in (peaked, hostile):
                call = (logits.to(dtype), drafts, trees, SamplingParams(**params))
                with use_backend("cpu"):
                    expected = op(*call, **words)
                skips = intercepted_launches(library, leave_out) if logits is peaked else nullcontext()
                with use_backend("simt"), skips:
                    verdict = op(*call, **words)
                assert all(torch.equal(*pair) for pair in zip(verdict, expected, strict=True)), (law, params)
