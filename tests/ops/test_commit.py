"""commit with one history for two sequences; check has the rest."""

from __future__ import annotations

import pytest
import torch
from calls.ops import commit_arguments
from support import int32
from support.batches import batch_of

from pagedtree import Verdict, commit


def test_two_sequences_have_two_histories(value_checks, device) -> None:
    arguments = commit_arguments(device)
    arguments["verdict"] = Verdict(*(torch.cat([part, part]) for part in arguments["verdict"]))
    arguments |= {"trees": batch_of([[-1, 0, 0]] * 2, device), "start": int32([4, 4], device)}
    with pytest.raises(ValueError, match="history_rows: expected another row for each sequence, got 0 twice"):
        commit(**arguments, history_rows=int32([0, 0], device))
    commit(**arguments, history_rows=int32([-1, -1], device))
    assert arguments["history_lens"].tolist() == [3]
