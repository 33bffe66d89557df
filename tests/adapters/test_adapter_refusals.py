"""Adapters refuse wrong arguments in valid calls by name and write nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import calls
import calls.adapters
from support import int32

INTEGERS = torch.zeros(2, 3, dtype=torch.int64)
SHAPE = "expected shape"
NO = "expected its default, as others are not supported, "
# The call, its wrong arguments, and the refusal.
Row = tuple[str, dict[str, Any], str]
WRONG: list[Row] = [
    ("sglang_verify_greedy", {"predicts": int32([0] * 7)}, "predicts: expected at least 8 elements"),
    ("sglang_verify_greedy", {"accept_index": INTEGERS.int()[:1]}, rf"accept_index: {SHAPE} \[2, 3\], got"),
    ("sglang_verify_greedy", {"accept_index": INTEGERS.int()[:, :0]}, "accept_index: expected at least one column"),
    ("sglang_verify_greedy", {"accept_token_num": int32([0] * 3)}, rf"accept_token_num: {SHAPE} \[2\]"),
    ("sglang_verify_greedy", {"candidates": INTEGERS[0]}, "candidates: expected 2 dimensions, got 1"),
    *(
        ("sglang_verify_greedy", {name: INTEGERS}, rf"{name}: {SHAPE} \[2, 4\], got \[2, 3\]")
        for name in ("retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict")
    ),
    ("sglang_sampling", {"uniform_samples": torch.zeros(2, 3)}, rf"uniform_samples: {SHAPE} \[2, 4\]"),
    ("sglang_sampling", {"uniform_samples_for_final_sampling": torch.zeros(3)}, rf"{SHAPE} \[2\], got \[3\]"),
    ("sglang_sampling", {"target_probs": torch.zeros(2, 3, 20)}, rf"target_probs: {SHAPE} \[2, 4, 20\]"),
    ("sglang_sampling", {"threshold_single": 1.5}, r"threshold_single: expected a number in \[0, 1\], got 1.5"),
    ("sglang_sampling", {"threshold_acc": -0.1}, r"threshold_acc: expected a number in \[0, 1\], got -0.1"),
    ("sglang_build_tree", {"selected_index": INTEGERS[:, :2]}, rf"selected_index: {SHAPE} \[2, 3\]"),
    ("sglang_build_tree", {"verified_seq_len": INTEGERS[:1, :2]}, rf"verified_seq_len: {SHAPE} \[2\], got \[1, 2\]"),
    ("sglang_build_tree", {"parent_list": INTEGERS}, rf"parent_list: {SHAPE} \[2, 5\]"),
    ("sglang_build_tree", {"positions": INTEGERS[0]}, rf"positions: {SHAPE} \[8\], got \[3\]"),
    ("sglang_build_tree", {"retrive_next_token": INTEGERS.clone()}, rf"retrive_next_token: {SHAPE} \[2, 4\]"),
    ("sglang_build_tree", {"tree_mask": torch.zeros(9).bool()}, "tree_mask: expected at least 32 elements of one byte"),
    ("sglang_build_tree", {"tree_mask": torch.zeros(99).int()}, "tree_mask: expected at least 32 elements of one byte"),
    ("sglang_move_kv", {"src_loc": torch.arange(4)}, r"src_loc: expected int32 or int64 \[3\], got torch.int64 \[4\]"),
    ("sglang_move_kv", {"tgt_loc": torch.zeros(3)}, "tgt_loc: expected int32 or int64"),
    ("flashinfer_chain_sampling", {"draft_probs": torch.zeros(2, 2, 11)}, rf"{SHAPE} \[2, 3, 11\], got \[2, 2, 11\]"),
    ("flashinfer_chain_sampling", {"target_probs": torch.zeros(2, 3, 11)}, rf"target_probs: {SHAPE} \[2, 4, 11\]"),
    ("flashinfer_chain_sampling", {"draft_token_ids": INTEGERS[0]}, "draft_token_ids, draft_probs: expected 2 and 3"),
    *(
        (
            "flashinfer_chain_sampling",
            {f"maybe_output_{name}_token_num": torch.zeros(3)},
            rf"{name}_token.*{SHAPE} \[2\]",
        )
        for name in ("accepted", "emitted_draft")
    ),
    ("flashinfer_page_table", {"last_page_len": int32([1])}, rf"last_page_len: {SHAPE} \[2\], got \[1\]"),
    ("flashinfer_import_mask", {"custom_mask": torch.ones(62).bool()}, rf"custom_mask: {SHAPE} \[63\], got \[62\]"),
    ("flashinfer_import_mask", {"tree_lens": int32([5, 7])}, "tree_lens: expected 0 to 6 keys in sequence 1, got 7"),
    ("flashinfer_wrapper", {"head_dim_vo": 128}, "head_dim_v: expected head size 64 with K's 64, got 128"),
    ("flash_attn_with_kvcache", {"rotary_cos": torch.zeros(4, 8)}, "rotary_cos: expected rotary_sin and k with it"),
    (
        "flash_attn_with_kvcache",
        {"rotary_cos": torch.zeros(4, 8), "rotary_sin": torch.zeros(4, 8), "k": None, "v": None},
        "rotary_cos: expected rotary_sin and k with it",
    ),
    ("flash_attn_with_kvcache", {"page_table": INTEGERS}, "block_table and page_table: expected one of the two"),
    ("flash_attn_with_kvcache", {"q": torch.zeros(2, 4, 64)}, "q: expected"),
    ("flash_attn_with_kvcache", {"v": None}, "v: expected a tensor, as k"),
    ("flash_attn_with_kvcache", {"k": None}, "v: expected None, as k"),
    ("flash_attn_with_kvcache", {"k": torch.zeros(3, 3, 2, 64)}, r"k: expected \[2,"),
    ("flash_attn_with_kvcache", {"cache_batch_idx": int32([0, 0])}, "cache_batch_idx: expected None"),
    ("flash_attn_with_kvcache", {"cache_seqlens": None}, "cache_seqlens: expected lengths"),
    ("flash_attn_with_kvcache", {"softcap": -1.0, "k": None, "v": None}, "softcap"),
    (
        "flash_attn_with_kvcache",
        {"v_cache": torch.zeros(6, 4, 2, 128), "k": None, "v": None},
        "v_cache.*head size 64 with K's 64, got 128",
    ),
]
LACKING: list[Row] = [
    ("flashinfer_chain_sampling", {"seed": INTEGERS[:, 0]}, "seed: expected an int, got a tensor"),
    ("flashinfer_wrapper", {"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode: expected"),
    ("flashinfer_wrapper", {"prefix_len_ptr": torch.zeros(1)}, "prefix_len_ptr: expected none, got Tensor"),
    ("flashinfer_wrapper", {"token_pos_in_items_len": 3}, "token_pos_in_items_len: expected none, got int"),
    ("flashinfer_wrapper", {"window_left": 0}, "window_left: expected -1 where the batch is not causal, got 0"),
    ("flash_attn_with_kvcache", {"q_descale": torch.ones(1)}, f"q_descale: {NO}got a tensor"),
    ("flash_attn_with_kvcache", {"qv": torch.ones(1)}, f"qv: {NO}"),
    ("flash_attn_with_kvcache", {"attention_chunk": 3}, f"attention_chunk: {NO}got 3"),
    ("flash_attn_with_kvcache", {"cache_leftpad": int32([0, 0])}, f"cache_leftpad: {NO}"),
    ("flash_attn_with_kvcache", {"alibi_slopes": torch.zeros(4)}, f"alibi_slopes: {NO}"),
    ("flash_attn_varlen", {"dropout_p": 0.1}, f"dropout_p: {NO}got 0.1"),
    ("flash_attn_varlen", {"alibi_slopes": torch.zeros(4)}, f"alibi_slopes: {NO}"),
    ("flash_attn_varlen", {"return_attn_probs": True}, f"return_attn_probs: {NO}got True"),
    ("flash_attn_varlen", {"seqused_q": int32([1, 1])}, f"seqused_q: {NO}"),
    (
        "flash_attn_varlen",
        {"k": torch.zeros(6, 4, 2, 64, requires_grad=True)},
        "k: expected a tensor without requires_grad",
    ),
]
TWICE: Row = ("sglang_build_tree", {"retrieve_index": INTEGERS}, "got both")
ROWS = [(ValueError, *row) for row in WRONG] + [(NotImplementedError, *row) for row in LACKING] + [(TypeError, *TWICE)]


@pytest.mark.parametrize(("error", "name", "change", "message"), ROWS)
def test_a_wrong_argument_is_named(error: type[Exception], name: str, change: dict[str, Any], message: str) -> None:
    call = calls.make(name)
    outputs = [value for key, value in call.arguments.items() if key in call.written]
    before = [tensor.clone() for tensor in calls.tensors_of(outputs)]
    with pytest.raises(error, match=rf"^[\w.]+: .*{message}"):  # the function and its argument
        call.function(**{**call.arguments, **change})
    assert all(map(torch.equal, calls.tensors_of(outputs), before))
