"""Ops on the CPU are noticed in tests of a device."""

from __future__ import annotations

import pytest
import torch
from device_case import only_on

from pagedtree import DraftTree, TreeBatch, merge_states
from pagedtree._ops import ops
from pagedtree.testing import use_backend


def test_tests_of_cuda_do_not_run_on_the_cpu() -> None:
    out, lse = torch.zeros(3, 2, 64), torch.zeros(3, 2)
    with only_on("cuda"):
        with pytest.raises(RuntimeError, match="is for the backend cuda, but the op's tensors are on the CPU"):
            merge_states(out, lse, out, lse)
        with only_on("cuda"), pytest.raises(RuntimeError, match="on the CPU"):
            TreeBatch.from_trees([DraftTree([-1, 0])])
        with use_backend("cpu"):
            assert merge_states(out, lse, out, lse)[0].shape == out.shape
        with pytest.raises(RuntimeError, match="on the CPU"):
            ops.merge_states(out, lse, out, lse)
        assert DraftTree([-1, 0, 0]).depths.tolist() == [0, 1, 1]
    assert merge_states(out, lse, out, lse)[0].shape == out.shape
    assert TreeBatch.from_trees([DraftTree([-1, 0])]).valid.all()
