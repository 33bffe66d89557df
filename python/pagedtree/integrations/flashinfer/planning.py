"""The planned dtypes and query counts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pagedtree._arguments import argument_error, expect_shape, refusal

TYPES = ("q_data_type", "kv_data_type", "o_data_type")


class PlannedTypes:
    """The dtypes passed to plan(), as dtypes or names; None: any dtype."""

    def __init__(self, q_data_type: Any, kv_data_type: Any, o_data_type: Any) -> None:
        kinds = zip(TYPES, (q_data_type, kv_data_type, o_data_type), strict=True)
        self._told = {name: getattr(torch, kind) if isinstance(kind, str) else kind for name, kind in kinds if kind}

    def check(self, q: Tensor, cache: Tensor) -> None:
        """Raises ValueError where run()'s tensors contradict it, NotImplementedError for an o_data_type not q's."""
        dtypes = dict(zip(TYPES, (q.dtype, cache.dtype, q.dtype), strict=True))
        for name, kind in self._told.items():
            if kind != dtypes[name]:
                error = NotImplementedError if name == "o_data_type" else ValueError
                raise argument_error(name, f"plan() was told {kind}, run() got {dtypes[name]}", error)


def count_queries(qo_indptr: Tensor, num_sequences: int) -> tuple[int, int]:
    expect_shape([num_sequences + 1], qo_indptr=qo_indptr)
    begins = qo_indptr.tolist()
    counts = [end - begin for begin, end in pairwise(begins)]
    if begins[0] != 0 or min(counts, default=0) < 0:
        raise refusal("qo_indptr", "offsets from 0 that do not descend", begins)
    if begins[-1] > torch.iinfo(torch.int32).max:
        raise refusal("qo_indptr", "offsets that int32 can hold", begins)
    return begins[-1], max(counts, default=0)
