"""The target's hidden states of kept tokens, for drafters that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.interfaces import supports_eagle3

from pagedtree._arguments import refusal


@dataclass
class Accepted:
    """The accepted nodes of one step's trees. last_rows: int64 [R], the logits' row of each request's newest token.
    num_drafts: [R], nodes besides the root; None where no request has a tree. accept_index: int32 [R, max_depth + 1],
    the accepted path's nodes, the root first."""

    last_rows: Tensor
    num_drafts: Sequence[int] | None = None
    accept_index: Tensor | None = None


def check_features(vllm_config: Any, model: Any, layers: Sequence[int]) -> None:
    """Raises ValueError, naming the requirement, where a drafter's `feature_layers` are not available."""
    if not layers:
        return
    if not supports_eagle3(model):
        raise refusal("feature_layers", "a target with vLLM's SupportsEagle3", type(model).__name__)
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if min(layers) < 0 or max(layers) >= num_layers:
        raise refusal("feature_layers", f"layers in 0..{num_layers - 1}", list(layers))
    if vllm_config.cache_config.enable_prefix_caching:
        wanted = "enable_prefix_caching = False, as the target does not compute the tokens that it finds in its cache"
        raise refusal("feature_layers", wanted, "True")


def kept_rows(counts: Sequence[int], num_new: Sequence[int], accepted: Accepted) -> list[list[int]]:
    """Returns the rows whose tokens are kept, for each of R requests with `counts` queries and `num_new` new tokens."""
    paths = accepted.accept_index.tolist() if accepted.accept_index is not None else []
    rows, begin = [], 0
    for request, count in enumerate(counts):
        nodes: Sequence[int] = range(count)
        if accepted.num_drafts is not None and accepted.num_drafts[request]:
            nodes = paths[request][: num_new[request]]  # the new tokens stand behind these
        rows.append([begin + node for node in nodes])
        begin += count
    return rows


def kept_features(streams: Sequence[Tensor], layers: Sequence[int], rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Returns [number of rows, layers * H] of each request. streams: [T, H] of each layer, ascending."""
    ascending = sorted(set(layers))
    index = torch.tensor([row for of_request in rows for row in of_request], dtype=torch.int64)
    index = index.to(streams[0].device)
    features = torch.cat([streams[ascending.index(layer)].index_select(0, index) for layer in layers], dim=1)
    return list(features.split([len(of_request) for of_request in rows]))
