"""Tensor parallel: vocabularies in parts, and a draft model on fewer ranks than its target.

The ranks of a torch.distributed group (gloo on CPUs, NCCL on GPUs) call each function together, with the same arguments
except their own columns of the logits, and get the same result.
"""

from pagedtree.distributed.draft_group import DraftGroup, DraftStats
from pagedtree.distributed.group import GroupError, Traffic
from pagedtree.distributed.shards import VocabShards
from pagedtree.distributed.verify import sample, verify_greedy, verify_rejection, verify_sampled

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
