"""verify_sampled and verify_greedy: which kernels read the rows; verify_tokens beside them."""

from __future__ import annotations

import pytest
import torch
from simt_case import base_of, intercepted_launches, simt_library, symbols_of

from pagedtree import DraftTree, SamplingParams, TreeBatch, sample, verify_greedy, verify_sampled, verify_tokens
from pagedtree.testing import use_backend


@pytest.mark.skipif(simt_library() is None, reason="built without simt")
@pytest.mark.parametrize(("batch", "at_once"), [(1, True), (8, False)])
@pytest.mark.parametrize("params", [None, SamplingParams(top_p=0.9)], ids=["greedy", "top-p"])
def test_few_rows_are_read_at_once(monkeypatch, params, batch, at_once):
    """11 SMs read 64 rows in 6 rounds; a walk reads 5 rows in 5, but has more to do for each of them."""
    monkeypatch.setenv("PAGEDTREE_SIMT_DEVICE", "11:227:1")
    library, kernels = simt_library(), []

    def note(kernel, *_):
        kernels.append(symbols_of(library)[kernel - base_of(library)])
        return 1

    trees = TreeBatch.from_trees([DraftTree([*range(-1, 8), *[0] * 55])] * batch)
    rows, at = (torch.zeros(64 * batch, 4096), torch.zeros(64 * batch, dtype=torch.int64)), torch.arange(batch)
    with use_backend("simt"), intercepted_launches(library, note):
        verify_sampled(*rows, trees, params, seeds=at, positions=at) if params else verify_greedy(*rows, trees)
    assert any("draw_rows" in name for name in kernels) == at_once


@pytest.mark.parametrize("params", [None, SamplingParams(temperature=0.7, top_p=0.9)], ids=["greedy", "top-p"])
def test_tokens_of_another_sampler(on_device, params):
    """Tokens of all nodes, drawn where verify_sampled draws, or argmax's: the same verdict."""
    trees = TreeBatch.from_trees([DraftTree.full([4, 3, 2]), DraftTree.chain(5)])
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
