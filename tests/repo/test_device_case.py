"""What tests of a device rely on: tensors keep their strides on the way there, and ops on the CPU are noticed."""

from __future__ import annotations

import pytest
import torch
from attention_case import LAYOUTS
from device_case import only_on, to_device

from pagedtree import DraftTree, TreeBatch, merge_states
from pagedtree._ops import ops
from pagedtree.check.cases.inputs import paged_views
from pagedtree.testing import use_backend


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_kept(layout: str) -> None:
    _, *caches = paged_views(5, 4, 2, 64, torch.float32, layout)
    moved = to_device(caches, torch.device("meta"))
    for cache, there in zip(caches, moved, strict=True):
        assert there.is_meta and there.dtype == cache.dtype and there.shape == cache.shape
        assert there.stride() == cache.stride() and there.storage_offset() == cache.storage_offset()
    assert moved[0].untyped_storage()._cdata == moved[1].untyped_storage()._cdata


def test_broadcast_rows_and_empty_tensors_are_moved() -> None:
    tensors = [torch.ones(3).expand(4, 3), torch.zeros(2, 0, 5), torch.zeros(()), torch.zeros(4, dtype=torch.bool)[::2]]
    moved = to_device(tensors, torch.device("meta"))
    assert [t.stride() for t in moved] == [t.stride() for t in tensors]
    assert [t.shape for t in moved] == [t.shape for t in tensors]


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
