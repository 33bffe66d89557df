"""Fills SGLang 0.5.23's gaps on CPUs, for engines with pagedtree's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagedtree.integrations.sglang.verify import tree_speculative_sampling_target_only


def last_loc(req_to_token: Tensor, req_pool_indices_tensor: Tensor, prefix_lens_tensor: Tensor) -> Tensor:
    """Returns the slot before each request's new ones, -1: none. Replaces `mem_cache.allocation.get_last_loc`."""
    last = req_to_token[req_pool_indices_tensor, (prefix_lens_tensor - 1).clamp(min=0)]
    return torch.where(prefix_lens_tensor > 0, last, -1)


def verify_uses_greedy(original: Callable[..., bool], *, is_all_greedy: bool, is_cpu: bool, **rest: Any) -> bool:
    """Wraps `speculative.eagle_utils._verify_uses_greedy` so that requests that SGLang would verify greedily on CPUs
    are sampled."""
    if is_cpu:
        from sglang.srt.speculative import eagle_utils

        for name, function in SAMPLING.items():
            if getattr(eagle_utils, name) is None:
                setattr(eagle_utils, name, function)
    return original(is_all_greedy=is_all_greedy, is_cpu=False, **rest)


def top_k_renorm(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Keeps the top_ks [N] largest of each row of probs [N, V], including ties with the last, and normalizes rows."""
    last = (top_ks.long() - 1).clamp(0, probs.shape[-1] - 1)
    return _kept(probs, probs.sort(-1, descending=True).values.gather(-1, last[:, None]))


def top_p_renorm(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Keeps the fewest largest entries per row with a mass of top_ps [N], including ties, and normalizes rows."""
    sorted_probs = probs.sort(-1, descending=True).values
    needed = sorted_probs.cumsum(-1) - sorted_probs < top_ps[:, None]
    return _kept(probs, torch.where(needed, sorted_probs, torch.inf).amin(-1, keepdim=True))


def _kept(probs: Tensor, least: Tensor) -> Tensor:
    kept = torch.where(probs >= least, probs, 0)
    return kept / kept.sum(-1, keepdim=True)


SAMPLING = {
    "tree_speculative_sampling_target_only": tree_speculative_sampling_target_only,
    "top_k_renorm_prob": top_k_renorm,
    "top_p_renorm_prob": top_p_renorm,
}
