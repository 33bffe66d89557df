"""Tensor parallel: vocabularies in parts, and a draft model on fewer ranks than its target.

The ranks of a torch.distributed group (gloo on CPUs, NCCL on GPUs) call each function together, with the same arguments
except their own columns of the logits and of grammar_mask, and get the same result. `sample`, `verify_greedy`,
`verify_sampled` and `verify_rejection` are pagedtree's, whose argument `shards` they need: logits [N,
shards.num_tokens], ids and `options` of the whole vocabulary.

Noise depends on the token alone, masses are integers (of units of 2^-42 of the likeliest token's), and other decisions
are maxima: results do not depend on the split. They are the whole op's bit for bit, under `verify_rejection` unless a
coin is within about 1e-6 of a boundary, as the whole op adds floats.

All rows are read at once, so the number of exchanges is fixed. Traffic per row, in bytes:

    16 for the largest logit
    if not greedy:
        128 for each digit of the threshold, if there is a top_k, and as many if there is a top_p (bfloat16 has 4
            digits, float16 5, float32 8, and any dtype 8 under options); 8 for the tokens that tie at it
        8 for the winner of the race; 8 more if options have stop ids
    under verify_rejection, in place of the race:
        16 for the masses of target and drafts; 16 for each child after the first (not under "onehot"); 24 a tree

Host scalars top_k and top_p that filter nothing cost nothing; tensors always count.

Raises ValueError where the ranks' arguments differ (compared where tensors are on the CPU, or with PAGEDTREE_CHECK=1),
GroupError where a rank does not answer.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import pagedtree
from pagedtree._arguments import expect_type
from pagedtree.distributed.draft_group import DraftGroup, DraftStats
from pagedtree.distributed.group import GroupError, Traffic
from pagedtree.distributed.shards import VocabShards

__all__ = [
    "DraftGroup",
    "DraftStats",
    "GroupError",
    "Traffic",
    "VocabShards",
    "sample",
    "verify_greedy",
    "verify_rejection",
    "verify_sampled",
]

P = ParamSpec("P")
R = TypeVar("R")


def _on_shards(function: Callable[P, R]) -> Callable[P, R]:
    """Makes `shards` required."""

    @wraps(function)
    def on_shards(*args: P.args, **kwargs: P.kwargs) -> R:
        expect_type("shards", kwargs.get("shards"), VocabShards)
        return function(*args, **kwargs)

    return on_shards


sample, verify_greedy = _on_shards(pagedtree.sample), _on_shards(pagedtree.verify_greedy)
verify_rejection, verify_sampled = _on_shards(pagedtree.verify_rejection), _on_shards(pagedtree.verify_sampled)
