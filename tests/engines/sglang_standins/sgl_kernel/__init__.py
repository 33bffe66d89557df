"""Functions that SGLang 0.5.23 imports from sgl_kernel on a CPU, by pagedtree's ops and torch.

Without `convert_weight_packed` SGLang uses torch layers for the rest.
"""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

from pagedtree.integrations.sglang import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, seq_lens: Tensor, out_cache_loc: Tensor, pool_len: int, topk: int,
    num_steps: int,
) -> None:  # fmt: skip
    places = seq_lens[:, None].long() + torch.arange(topk * num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()[:, None], places].flatten())


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor,
    pool_len: int,
) -> None:  # fmt: skip
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    found = torch.cat([req_to_token[row, begin:end] for row, begin, end in spans])
    out_cache_loc[: found.numel()] = found


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor,
    pool_len: int,
) -> None:  # fmt: skip
    at = 0
    for row, begin, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, begin:end] = out_cache_loc[at : at + end - begin]
        at += end - begin


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    accepted = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    for base, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + slot * size, size) for slot in src_loc.tolist()]
        for slot, row in zip(tgt_loc.tolist(), rows, strict=True):
            ctypes.memmove(base + slot * size, row, size)


def rotate_input_ids_cpu(*args: object) -> None:
    raise NotImplementedError("rotate_input_ids_cpu: of multi-layer EAGLE")


if os.environ.get("CAPTURED_GRAPHS"):
    from captured_graphs import install

    install()
