"""merge_states joins attention over disjoint keys."""

from __future__ import annotations

import pytest
import torch
from attention_case import Target
from device_case import to_device

from pagedtree import DraftTree, merge_states, reference, tree_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [1, 5, 64, 96, 130])
def test_against_reference(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    wide = torch.randn(2, 30, 7, head_dim + 3, generator=generator).to(dtype)
    out_a, out_b = wide[0, :, 1:6, 2 : 2 + head_dim], wide[1, :, 1:6, 1 : 1 + head_dim]
    lse_a, lse_b = (10 * torch.randn(2, 5, 30, generator=generator)).transpose(1, 2).unbind(0)
    lse_a[:5], lse_b[3:8] = -torch.inf, -torch.inf
    out_a[:5], out_b[3:8] = torch.nan, torch.inf  # sides of no weight are not read
    out, lse = (x.cpu() for x in merge_states(*to_device((out_a, lse_a, out_b, lse_b), device)))
    expected, expected_lse = reference.merge_states(out_a, lse_a, out_b, lse_b)
    assert out.dtype == dtype and out.shape == out_a.shape
    unit = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(out.double(), expected, atol=unit * 0.1, rtol=unit)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-6, rtol=1e-6)
    assert not out[3:5].any() and (lse[3:5] == -torch.inf).all()


def test_fp16_results_are_rounded_to_nearest_even(isa: str) -> None:
    """Means of neighbouring fp16 numbers are ties; those of any two come to every exponent, subnormals included."""
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
    """Prefix and tree apart, merged, equal attention over both; the sink goes to one part."""
    tree = DraftTree.full([3, 2])
    case = target.case([64], [tree], page_size=16).build()
    sinks = torch.tensor([0.1, 2.0, -torch.inf, -1.0]).repeat(6)[: case["q"].shape[1]]
    whole, whole_lse = tree_attention(**case, sinks=sinks, return_lse=True)
    n = tree.num_nodes
    prefix = dict(case, seq_lens=torch.tensor([64], dtype=torch.int32), tree_lens=torch.zeros(1, dtype=torch.int32))
    own = dict(case, seq_lens=torch.tensor([n], dtype=torch.int32), page_table=case["page_table"][:, 4:])
    parts = tree_attention(**prefix, return_lse=True), tree_attention(**own, sinks=sinks, return_lse=True)
    out, lse = merge_states(*parts[0], *parts[1])
    torch.testing.assert_close(out, whole, **target.tolerance)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4, 64), (3, 0, 64), (3, 4, 0)])
def test_empty(on_device: None, shape: tuple[int, ...]) -> None:
    out, lse = merge_states(*(torch.zeros(shape), torch.zeros(shape[:2])) * 2)
    assert out.shape == shape and lse.shape == shape[:2]


def test_refusals(on_device: None) -> None:
    out, lse = torch.randn(3, 4, 64), torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"merge_states: `out_b` must be of shape \[3, 4, 64\], got \[3, 4, 32\]"):
        merge_states(out, lse, out[..., :32], lse)
    with pytest.raises(ValueError, match="`out_b` must be of dtype Float, got Half"):
        merge_states(out, lse, out.half(), lse)
    with pytest.raises(ValueError, match="`lse_b` must be of dtype Float, got Double"):
        merge_states(out, lse, out, lse.double())
    with pytest.raises(ValueError, match="`out_a` must be contiguous in its last dimension"):
        merge_states(out.transpose(1, 2), lse, out, lse)
