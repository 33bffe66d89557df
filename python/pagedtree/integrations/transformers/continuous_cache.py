"""Attention over the paged cache of transformers' continuous batching (`model.generate_batch`)."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pagedtree import append_kv, tree_attention

__all__ = ["attend_continuous"]


class LayerCache(NamedTuple):
    """transformers' cache entries for one layer.

    group: place in read_index and write_index. kind: place in values per layer type. window: 0 = none. pages: K and V
    [pages, page_size, Hkv, D]; None for a window's ring buffer, whose pages are not in order.
    """

    group: int
    kind: str
    window: int
    pages: tuple[Tensor, Tensor] | None


def attend_continuous(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    options: dict[str, Any],
    kwargs: dict[str, Any],
) -> Tensor:
    """Attends in a packed pass of continuous batching: query [1, Hq, T, D], key, value [1, Hkv, T, D] -> [1, T, Hq, D].

    window: 0 = none, None = the cache's. kwargs: transformers', with the slots to write (write_index) and of each
    request's whole sequence (read_index). Full attention uses the cache in place, by pages; a window's keys are
    gathered from its ring buffer. Raises ValueError for cache layouts other than in transformers 4.57 and 5.23.
    """
    cache = kwargs["cache"]
    if kwargs.get("block_table") is not None:
        raise ValueError("continuous batching: expected read and write indices, got a block_table")
    of_layer = _layer_cache(cache, layer)
    cu_seqlens_k = _of_kind(kwargs["cu_seq_lens_k"], of_layer.kind)
    longest = _of_kind(kwargs["max_length_k"] if "max_length_k" in kwargs else kwargs["max_seqlen_k"], of_layer.kind)
    if of_layer.pages is not None:
        k_cache, v_cache = of_layer.pages
        slots = kwargs["write_index"][of_layer.group].long()
        append_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), k_cache, v_cache, slots)
        # No request has a past: the slots just written are all there is, and there is no read_index.
        index = kwargs["read_index"][of_layer.group]
        index = index if index.numel() else slots
    else:
        k_cache, v_cache = _gathered(cache, key, value, layer, kwargs)
        index = torch.arange(k_cache.shape[0], device=query.device, dtype=torch.int64)
    table = _page_table(index, cu_seqlens_k, int(longest), k_cache.shape[1])
    lens, offsets = cu_seqlens_k.diff().int(), kwargs["cu_seq_lens_q"].int()
    options = {**options, "window": of_layer.window if window is None else window}
    out = tree_attention(query[0].transpose(0, 1), k_cache, v_cache, table, lens, offsets, **options)
    return cast(Tensor, out).unsqueeze(0)


def _page_table(index: Tensor, cu_seqlens_k: Tensor, longest: int, page_size: int) -> Tensor:
    """Returns int32 [B, max_pages] of sequences with consecutive slots in `index`, from a page boundary."""
    first = cu_seqlens_k[:-1, None] + torch.arange(0, longest, page_size, device=index.device, dtype=torch.int64)
    return (index[first.clamp(max=index.shape[0] - 1)] // page_size).int()


def _of_kind(values: Any, kind: str) -> Any:
    """Returns the entry of a layer type; transformers 4.57 leaves the dict out where a model has only one."""
    return values[kind] if isinstance(values, dict) else values


def _layer_cache(cache: Any, layer: int) -> LayerCache:
    if hasattr(cache, "layer_to_allocator"):  # transformers 5.23
        allocator = cache.layer_to_allocator[layer]
        pages = allocator.get_cache_for_block_table(layer) if allocator.supports_block_table else None
        return LayerCache(allocator.index, allocator.layer_type, getattr(allocator, "sliding_window", 0), pages)
    if hasattr(cache, "layer_index_to_group_indices"):  # transformers 4.57
        group, place = cache.layer_index_to_group_indices[layer]
        window = cache.sliding_windows[layer]
        if window != 1:
            return LayerCache(group, "sliding_attention", window, None)
        # The last row is for padding.
        pools = (cache.key_cache[place], cache.value_cache[place])
        k_pages, v_pages = (pool[:-1].unflatten(0, (-1, cache.block_size)) for pool in pools)
        return LayerCache(group, "full_attention", 0, (k_pages, v_pages))
    raise ValueError(f"continuous batching: expected the cache of transformers 4.57 or 5.23, got {type(cache)}")


def _gathered(cache: Any, key: Tensor, value: Tensor, layer: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns all requests' keys and values, past and new: [S, 1, Hkv, D]."""
    if hasattr(cache, "layer_to_allocator"):
        pair = cache.update(key, value, layer, dict(kwargs))  # [1, Hkv, S, D]
        keys, values = (states[0].transpose(0, 1) for states in pair)
    else:
        keys, values = cache.update(key, value, layer, kwargs["read_index"], kwargs["write_index"])
    return keys.unsqueeze(1), values.unsqueeze(1)
