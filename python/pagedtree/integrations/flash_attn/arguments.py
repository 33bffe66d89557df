"""Shared helpers of FlashAttention's functions: refusals, masks, scales, and rows of ragged batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedtree._arguments import refusal
from pagedtree.integrations.masks import all_visible


def refuse(**arguments: Any) -> None:
    """Raises NotImplementedError for an argument that is neither None, 0 nor False."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) or value:
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise refusal(name, "its default, as others are not supported", got, NotImplementedError)


def refuse_gradients(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise refusal(name, "a tensor without requires_grad (there is no backward)", kind=NotImplementedError)


def one_of(**names: Tensor | None) -> Tensor | None:
    arguments = {name: value for name, value in names.items() if value is not None}
    if len(arguments) > 1:
        raise refusal(" and ".join(arguments), "one of the two", "both")
    return next(iter(arguments.values()), None)


def scale_of(name: str, descale: Tensor | None) -> Tensor | None:
    """Returns the scale of `tree_attention`, one per head, from FlashAttention 3's [batch, heads]."""
    if descale is None or descale.dim() < 2:
        return descale
    if descale.dim() > 2 or (descale.shape[0] > 1 and descale.stride(0) != 0):
        wanted = "the same scales for all sequences ([heads], also expanded to [batch, heads])"
        raise refusal(name, wanted, f"shape {[*descale.shape]}", NotImplementedError)
    return descale[0].contiguous() if descale.shape[0] else None


def even_offsets(batch: int, each: int, device: torch.device) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * each


def rows_in_sequences(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Returns int64 [rows] each: every ragged row's sequence, and its index there."""
    row = torch.arange(rows, device=offsets.device, dtype=torch.int64)
    sequence = torch.searchsorted(offsets[1:].long(), row, right=True).clamp(max=max(offsets.numel() - 2, 0))
    return sequence, row - offsets.long()[sequence]


def visibility(
    num_queries: int, cu_seqlens_q: Tensor, seq_lens: Tensor, max_keys: int, causal: bool, window_size: tuple[int, int]
) -> dict[str, Any]:
    """Returns the arguments of `tree_attention` for FlashAttention's causal and window_size."""
    left, right = window_size
    if causal or right == 0:  # FlashAttention takes these for the same, too
        return {"window": max(left, -1) + 1}
    if left < 0 and right < 0:
        return all_visible(num_queries, seq_lens)
    left, right = (num_queries + max_keys if side < 0 else side for side in window_size)
    query = torch.arange(num_queries, dtype=cu_seqlens_q.dtype, device=seq_lens.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:], query, right=True)
    lens = seq_lens.clamp(max=max_keys)
    own_key = query + torch.nn.functional.pad(lens - cu_seqlens_q[1:], (0, 1))[sequence]  # the last query's is last
    return {"tree_mask": _intervals(own_key - left, own_key + right + 1, max_keys), "tree_lens": lens}


def _intervals(begin: Tensor, end: Tensor, n: int) -> Tensor:
    """Returns int32 [..., ceil(n / 32)]: the words of a mask that is True from begin to end - 1, both int [...]."""
    first = torch.arange(0, n, 32, device=begin.device, dtype=torch.int64)
    below_begin, below_end = ((1 << (x[..., None] - first).clamp(0, 32)) - 1 for x in (begin, end))
    return (below_end & ~below_begin).int()
