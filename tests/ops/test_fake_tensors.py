"""Fake tensors yield shapes and dtypes, and leave no cached state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pagedtree import DraftTree, SamplingParams, medusa_propose, sample, verify_rejection

TREE = DraftTree.full([2, 2])
HEADS = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(0))


def draw(heads: Tensor) -> Tensor:
    # A temperature not yet cached on the device.
    streams = torch.arange(heads.shape[0], device=heads.device)
    return sample(heads[:, 0], SamplingParams(temperature=0.8125, top_k=5), seeds=streams, positions=streams)


def propose_and_verify(heads: Tensor) -> Tensor:
    draft = medusa_propose(heads, TREE)
    streams = torch.arange(heads.shape[0], device=heads.device)
    rows = heads[:, :1].expand(-1, TREE.num_nodes, -1).reshape(-1, heads.shape[2])
    verdict = verify_rejection(
        rows, draft.draft_tokens, draft.trees, SamplingParams(min_p=0.015625), draft_law="onehot",
        seeds=streams, positions=streams,
    )  # fmt: skip
    return verdict.tokens


@pytest.mark.parametrize("call", [draw, propose_and_verify])
@pytest.mark.parametrize("first", ["fake", "real"])
def test_fake_and_real_calls_do_not_meet(backend, device, call: Callable[[Tensor], Tensor], first: str) -> None:
    heads = HEADS.to(device)
    expected = call(heads) if first == "real" else None
    with FakeTensorMode() as mode:
        fake = call(mode.from_tensor(heads))
    real = call(heads)
    assert fake.shape == real.shape and fake.dtype == real.dtype and fake.stride() == real.stride()
    assert expected is None or torch.equal(real, expected)
