"""Verification of tree logits and cache compaction, shared by both of vLLM's model runners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.logger import init_logger

from pagedtree import (
    PreparedCompaction,
    RequestOptions,
    SamplingParams,
    TreeBatch,
    Verdict,
    sample,
    verify_greedy,
    verify_sampled,
)
from pagedtree._arguments import refusal
from pagedtree.integrations.vllm.attention import PagedTreeBackend

logger = init_logger("vllm.pagedtree")  # below the logger that vLLM sets up


def choose_tokens(
    logits: Tensor,
    trees: TreeBatch | None,
    draft_tokens: Tensor | None,
    params: SamplingParams | None,
    options: RequestOptions | None,
    *,
    seeds: Tensor,
    positions: Tensor,
    grammar_mask: Tensor | None,
) -> Verdict:
    """Verifies R trees, or samples a token for each of R rows without trees. logits: [N, V], a row for each node.
    params: None = the argmax of unmodified logits. positions: int64 [R], of the roots or rows."""
    how: dict[str, Any] = {"seeds": seeds, "positions": positions, "grammar_mask": grammar_mask, "options": options}
    if trees is None:
        tokens = sample(logits, params or SamplingParams(temperature=0.0), **how)[:, None]
        zeros = torch.zeros_like(tokens, dtype=torch.int32)
        return Verdict(zeros, zeros[:, 0], tokens, zeros[:, 0])
    assert draft_tokens is not None
    if params is None:
        return verify_greedy(logits, draft_tokens, trees, grammar_mask=grammar_mask)
    return verify_sampled(logits, draft_tokens, trees, params, **how)


def grammar_rows(grammar_output: Any, request_ids: Sequence[str], sizes: np.ndarray) -> np.ndarray:
    """Returns int32 [N, ceil(V / 32)]: the scheduler's rows in batch order, all bits set without a grammar. sizes: [R],
    nodes per request of the batch."""
    bitmask: np.ndarray = grammar_output.grammar_bitmask
    if grammar_output.structured_output_request_ids == request_ids:
        return bitmask
    begin = dict(zip(request_ids, np.cumsum(sizes) - sizes, strict=True))
    size = dict(zip(request_ids, sizes, strict=True))
    rows = [begin[i] + np.arange(size[i]) for i in grammar_output.structured_output_request_ids]
    mask = np.full((sizes.sum(), bitmask.shape[1]), -1, dtype=np.int32)
    mask[np.concatenate(rows)] = bitmask
    return mask


class Compactions:
    """Moves accepted rows together, in all target layers of a cache group at once. layers: by name. groups:
    KVCacheGroupSpec."""

    def __init__(self, layers: dict[str, Any], groups: Sequence[Any]) -> None:
        layer_lists = ([layers[name] for name in group.layer_names if not _drafts(layers[name])] for group in groups)
        self._groups = {index: members for index, members in enumerate(layer_lists) if members}
        # By a group of layers: their caches, and the moves in these.
        self._prepared: dict[int, tuple[list[Tensor], PreparedCompaction]] = {}

    def __call__(self, table_of: Callable[[int], Tensor], roots: Tensor, verdict: Verdict) -> None:
        """table_of: the block table of a group, [R, max_blocks]. roots: integers [R], their positions."""
        for index, members in self._groups.items():
            caches = [layer.kv_cache for layer in members]
            tensors, compaction = self._prepared.get(index, ([], None))
            if compaction is None or any(cache is not before for cache, before in zip(caches, tensors, strict=True)):
                # [blocks, heads, block_size, K and V], latent caches [blocks, block_size, 576]; layers may share one.
                rows = {c.data_ptr(): c.transpose(1, 2) if c.dim() == 4 else c for c in caches}
                compaction = PreparedCompaction([*rows.values()])
                self._prepared[index] = caches, compaction
            compaction(table_of(index), roots.int(), verdict.accept_index, verdict.num_accepted)


def _drafts(layer: Any) -> bool:
    return getattr(layer, "is_draft_layer", False)


def target_groups(attn_groups: Sequence[Sequence[Any]], layers: dict[str, Any], vllm_config: Any) -> list[Any]:
    """Returns the target's groups of attention layers. Raises ValueError for another backend than ours.

    layers: vLLM's attention layers by name.
    """
    found = [group for groups in attn_groups for group in groups if not _drafts(layers[group.layer_names[0]])]
    for group in found:
        backend, builder = group.backend, group.backend.get_builder_cls()
        if not issubclass(backend, PagedTreeBackend):
            raise refusal("draft trees: attention_backend", "CUSTOM", backend.get_name())
        if not builder.__module__.startswith("pagedtree."):  # vLLM's wrappers change the batch before ours sees it
            raise refusal("draft trees", "layers of PagedTreeBackend itself", backend.__name__)
    speculation = vllm_config.speculative_config
    logger.info(
        "pagedtree: model runner %s, worker %s, attention backend CUSTOM (%s), drafter %s",
        "V2" if vllm_config.use_v2_model_runner else "V1",
        vllm_config.parallel_config.worker_cls,
        f"{PagedTreeBackend.__module__}.{PagedTreeBackend.__name__}",
        speculation.model if speculation is not None else None,
    )
    return found
