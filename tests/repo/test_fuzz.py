"""Findings of the fuzzer."""

from __future__ import annotations

import re
from typing import Any

import calls
import calls.ops
import pytest
import torch
from calls import changed
from fuzz import run
from support import int32

import pagedtree as pt

pytestmark = pytest.mark.usefixtures("one_rank")
META = torch.zeros(2, dtype=torch.int32, device="meta")
HUGE = 2**70
TREES = pt.TreeBatch.from_trees([pt.DraftTree([-1])])

# (call, changed argument, its value, message's beginning; None: the call returns)
FINDINGS: list[tuple[str, tuple[Any, ...], Any, str | None]] = [
    ("batch_of_trees", ("capacity",), 2**62, "capacity: expected at least 4 rows"),
    ("tree_of_paths", ("paths",), [None], "paths: expected sequences of integers"),
    ("tree_of_paths", ("paths",), [["a"]], "paths: expected"),
    ("tree_of_paths", ("paths",), [[0.5]], "paths: expected"),
    ("tree_of_parents", ("parents",), "ab", "parents: expected"),
    ("tree_of_parents", ("parents",), [-1, 0.0], "parents: expected"),
    ("batch_of_trees", ("trees",), [pt.DraftTree([-1]), [-1, 0]], "trees[1]: expected"),
    ("joined_batches", ("batches",), [TREES, None], "batches[1]: expected"),
    ("joined_batches", ("batches",), TREES, "batches: expected"),
    ("choose_tree", ("max_depth",), 2**62, None),
    ("one_tree_of_a_batch", ("b",), 2, "b: expected 0 to 1"),
    ("flashinfer_append", ("batch_indices",), META, "append_paged_kv_cache: batch_indices: expected "),
    ("flashinfer_append", ("kv_indices",), int32([[1, 3, 0, 4, 2]]), "kv_indices: expected [pages]"),
    ("flashinfer_page_table", ("indptr",), META, "page_table: indices: expected "),
    ("flashinfer_page_table", ("page_size",), HUGE, "page_size: expected an integer of 64 bits"),
    ("flashinfer_page_table", ("page_size",), -1, "page_size: expected 1 to"),
    ("flashinfer_page_table", ("max_pages",), -1, "max_pages: expected 0 to"),
    ("flashinfer_export_mask", ("tree_mask",), torch.zeros(8, 1), "tree_mask: expected int32 or int64"),
    ("flashinfer_export_mask", ("qo_indptr",), int32([5]).squeeze(0), "qo_indptr: expected [B + 1]"),
    ("flash_attn_with_kvcache", ("cache_seqlens",), torch.tensor([6, 3], dtype=torch.int16), "cache_seqlens: "),
    ("flash_attn_with_kvcache", ("cache_seqlens",), int32([]), "cache_seqlens: expected shape [2]"),
    ("mask_words_of_biases", ("mask",), torch.zeros(5, device="meta"), "mask_words: mask: expected shape"),
    ("sglang_sampling", ("uniform_samples",), torch.zeros(2, 4).to(torch.float8_e4m3fn), "uniform_samples: "),
    ("sharded_verify_rejection", ("draft_probs",), [[0.5]], "draft_probs: expected a Tensor"),
    ("flashinfer_import_mask", ("custom_mask",), META, "custom_mask: expected a tensor with values"),
    ("flashinfer_import_mask", ("qo_indptr",), int32([2, 0, 0]), "qo_indptr: expected offsets"),
    ("flashinfer_import_mask", ("seq_lens",), int32([[9], [6]]), "seq_lens: expected shape"),
    ("flashinfer_import_mask", ("seq_lens",), int32([-1, 6]), "seq_lens: expected at least 0"),
    ("flashinfer_export_mask", ("qo_indptr",), int32([0, 5, 99]), "tree_mask: expected a row"),
    ("sharded_verify_rejection", ("max_children",), 2**40, "verify_rejection: max_children: expected 0..1023"),
    ("flashinfer_wrapper", ("paged_kv_indptr",), int32([0, 2**31 - 1, 5]), "custom_mask: expected shape"),
    ("flashinfer_wrapper", ("qo_indptr",), int32([]), "qo_indptr: expected shape"),
    ("flashinfer_wrapper", ("paged_kv_last_page_len",), int32([]), "paged_kv_last_page_len: expected shape"),
    ("flashinfer_chain_sampling", ("target_probs",), META, "chain_speculative_sampling: target_probs: expected "),
    ("flashinfer_chain_sampling", ("target_probs",), torch.ones(2, 4, 11).to(torch.float8_e4m3fn), "target_probs: "),
    ("flash_attn_varlen", ("q",), None, "q: expected a Tensor"),
    ("flash_attn_varlen", ("k",), torch.zeros(9), "k: expected"),
    ("flash_attn_with_kvcache", ("k_cache",), torch.zeros(9), "k_cache: expected"),
    ("flash_attn_varlen", ("block_table",), int32([1]), "block_table: expected [B, max_pages]"),
    ("flashinfer_page_table", ("indptr",), int32([5]).squeeze(0), "indptr: expected [B + 1]"),
    ("flashinfer_wrapper", ("paged_kv_indices",), int32([[1, 3, 0, 4, 2]]), "paged_kv_indices: expected [pages]"),
    ("flashinfer_export_mask", ("tree_mask",), int32([1]), "tree_mask: expected [T, W]"),
    ("sample", ("params",), pt.SamplingParams(3.402823466385289e38), None),
    ("sharded_sample", ("params", "temperature"), torch.ones(2, 2)[:0, 0], "step_shards: temperature: expected"),
    ("sglang_verify_greedy", ("candidates",), torch.ones(2, 4, dtype=torch.int16), "candidates: expected int32 or"),
    ("sglang_move_kv", ("k_buffer",), None, "k_buffer: expected a sequence"),
    ("sglang_build_tree", ("tree_mask_mode",), -1, "tree_mask_mode: expected one of"),
    ("sglang_build_tree", ("tree_mask",), torch.zeros(1, dtype=torch.bool).expand(80), "tree_mask: expected elements"),
    ("sglang_verify_greedy", ("predicts",), int32([0]).expand(8), "predicts: expected elements that share no memory"),
    ("rejected_predictions", ("context",), 2**31, "rejected_predictions: context: expected "),
    ("rejected_predictions", ("trees", "parents"), META, "parents: expected"),
    ("copy_of_a_batch", ("other", "cu_nodes"), int32([0]).squeeze(0), "cu_nodes: expected shape"),
    ("copy_of_a_batch", ("other", "depths"), int32([0]), "depths: expected shape"),
    ("copy_of_a_batch", ("other", "mask"), int32([[0, 0]] * 8), "mask: expected shape [8, 1]"),
    ("one_tree_of_a_batch", ("trees", "cu_nodes"), torch.zeros(3), "cu_nodes: expected torch.int32"),
    ("sharded_verify_greedy", ("trees", "cu_nodes"), int32([0, 5, 0]), None),
    ("transformers_generate", ("input_ids",), None, "input_ids: expected prompts"),
    ("transformers_generate", ("input_ids",), [None], "input_ids: expected token ids"),
    ("transformers_generate", ("seeds",), [None] * 4, "seeds: expected 4 integers"),
    ("transformers_generate", ("eos_token_id",), HUGE, "eos_token_id: expected an integer of 64 bits"),
    ("transformers_generate", ("share_prefix",), -1, "share_prefix: expected True, False or None"),
]


@pytest.mark.parametrize(("name", "path", "value", "message"), FINDINGS)
def test_findings(name: str, path: tuple[Any, ...], value: Any, message: str | None) -> None:
    call = calls.make(name)
    if message is None:
        call.arguments = changed(call.arguments, path, value)
        run(call)
        return
    with pytest.raises((ValueError, TypeError), match=r"^([\w.]+: )?" + re.escape(message)):
        call.function(**changed(call.arguments, path, value))


def test_nothing_beside_a_tensor_without_values() -> None:
    """The fake implementation meets None."""
    with pytest.raises(TypeError, match="build_trees: parents: expected a Tensor, got None"):
        pt.build_trees(None, META, max_nodes=1, max_depth=0)  # type: ignore[arg-type]


def test_results_too_large_for_the_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="slot_mapping: not enough memory"):
        pt.slot_mapping(int32([[0]]), int32([0]), int32([0, 0]), 4, total_q=2**46)
