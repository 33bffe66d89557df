"""commit with offsets that are wrong, and with one history for two sequences; check has the rest."""

from __future__ import annotations

import pytest
import torch
from step_case import batch_of, commit_arguments, int32, int64

from pagedtree import Verdict, commit


def test_commit_bad_offsets(backend, device) -> None:
    trees = batch_of([[-1, 0], [-1]], device)
    verdict = Verdict(int32([[0, 1], [0, 1]], device), int32([1, 1], device), int64([[1, 2]] * 2, device), None)
    node_map = int32([0, 1, 0], device)
    for offsets in ([0, 99, 3], [9, -4, 2], [-(2**31), 2**31 - 1, 0], [3, 2, 1]):
        trees.cu_nodes.copy_(int32(offsets, device))
        result = commit(verdict, trees, int32([0, 0], device), node_map=node_map)
        assert all(-1 <= row < 3 for row in result.accept_rows.flatten().tolist())


def test_two_sequences_have_two_histories(value_checks, device) -> None:
    arguments = commit_arguments(device)
    arguments["verdict"] = Verdict(*(torch.cat([part, part]) for part in arguments["verdict"]))
    arguments |= {"trees": batch_of([[-1, 0, 0]] * 2, device), "start": int32([4, 4], device)}
    with pytest.raises(ValueError, match="`history_rows` must be another row for each sequence, got 0 twice"):
        commit(**arguments, history_rows=int32([0, 0], device))
    commit(**arguments, history_rows=int32([-1, -1], device))
    assert arguments["history_lens"].tolist() == [3]
