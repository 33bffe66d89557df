from __future__ import annotations

import torch
from support.attention import Target

from pagedtree import DraftTree, merge_states, tree_attention


def test_fp16_results_are_rounded_to_nearest_even(isa: str) -> None:
    """Means of neighbouring numbers tie; random pairs reach every exponent, subnormals included."""
    every = torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(torch.float16)
    a = torch.cat([every, every])
    b = torch.cat([every.roll(1), every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]])
    a, b = (x.view(-1, 8, 64) for x in (a, b))
    lse = torch.zeros(a.shape[:2])
    out, _ = merge_states(a, lse, b, lse)
    expected = (a.float() * 0.5 + b.float() * 0.5).half()
    assert torch.equal(out.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(out[number].view(torch.int16), expected[number].view(torch.int16))


def test_parts_of_one_attention(target: Target) -> None:
    """Prefix and tree, merged, equal attention over both; one has the sink."""
    tree = DraftTree.full([3, 2])
    case = target.case([64], [tree], page_size=16).build()
    sinks = torch.tensor([0.1, 2.0, -torch.inf, -1.0]).repeat(6)[: case["q"].shape[1]]
    whole, whole_lse = tree_attention(**case, sinks=sinks, return_lse=True)
    n = tree.num_nodes
    prefix = dict(case, seq_lens=torch.tensor([64], dtype=torch.int32), tree_lens=torch.zeros(1, dtype=torch.int32))
    suffix = dict(case, seq_lens=torch.tensor([n], dtype=torch.int32), page_table=case["page_table"][:, 4:])
    parts = tree_attention(**prefix, return_lse=True), tree_attention(**suffix, sinks=sinks, return_lse=True)
    out, lse = merge_states(*parts[0], *parts[1])
    torch.testing.assert_close(out, whole, **target.tolerance)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)
