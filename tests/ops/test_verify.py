"""Kernels of verify_sampled and verify_greedy; verify_tokens."""

from __future__ import annotations

import re

import pytest
import torch
from support.doubles import base_of, intercepted_launches, simt_library, symbols_of

from pagedtree import DraftTree, SamplingParams, TreeBatch, sample, verify_greedy, verify_sampled, verify_tokens
from pagedtree.testing import use_backend


@pytest.mark.skipif(simt_library() is None, reason="built without simt")
@pytest.mark.parametrize(
    ("case", "kernels"),
    [("greedy", ["walk_sm90"]), ("sampled", ["walk_sm90", "walk"]), ("shifted", ["walk"]), ("masked", ["walk_sm90"]),
     ("untested", ["walk"]), ("odd", ["walk"]), ("large", ["walk"])],
)  # fmt: skip
def test_kernel_choice_by_shared_memory(monkeypatch, case, kernels):
    """A cluster's memory holds the rows; filtered ones go to the other kernel."""
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "4:99:4")
    monkeypatch.setenv("PAGEDTREE_ENGINE", "mma.sync" if case == "untested" else "wgmma")
    library, launched = simt_library(), []

    def note(kernel, *_):
        launched.append(symbols_of(library)[kernel - base_of(library)])
        return 1

    trees, at = TreeBatch.from_trees([DraftTree.chain(2)] * 4), torch.arange(4)
    vocab = {"odd": 4001, "large": 40_000}.get(case, 4000)
    rows = torch.zeros(12 * vocab + 1)[case == "shifted" :][: 12 * vocab].view(12, vocab), torch.zeros(12, dtype=int)
    mask = torch.ones(12, vocab, dtype=torch.bool) if case == "masked" else None
    with use_backend("simt"), intercepted_launches(library, note):
        if case == "sampled":
            verify_sampled(*rows, trees, SamplingParams(), seeds=at, positions=at)
        else:
            verify_greedy(*rows, trees, grammar_mask=mask)
    assert re.findall(r"(walk\w*?)_kernel", " ".join(launched)) == kernels


@pytest.mark.parametrize("params", [None, SamplingParams(temperature=0.7, top_p=0.9)], ids=["greedy", "top-p"])
def test_tokens_of_another_sampler(on_device, device, params):
    """Argmax tokens, or draws at verify_sampled's positions, give its verdict."""
    trees = TreeBatch.from_trees([DraftTree.full([4, 3, 2]), DraftTree.chain(5)], device=device)
    rows = len(trees.depths)
    logits, drafts = torch.randn(rows, 2) * 3, torch.arange(rows) % 2
    seeds, start = torch.tensor([3, -9]), torch.tensor([7, 2**40])
    if params is None:
        tokens, expected = logits.argmax(1), verify_greedy(logits, drafts, trees)
    else:
        sequence = torch.arange(2).repeat_interleave(trees.cu_nodes.diff(), output_size=rows)
        tokens = sample(logits, params, seeds=seeds[sequence], positions=start[sequence] + trees.depths)
        expected = verify_sampled(logits, drafts, trees, params, seeds=seeds, positions=start)
    assert all(map(torch.equal, verify_tokens(tokens, drafts, trees), expected))
    assert expected.num_accepted.sum() > 0
