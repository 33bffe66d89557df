"""Registers valid calls of `pagedtree.integrations`."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import torch
from support import int32, int64
from support.models import gpt2, tiny
from torch import Tensor

import pagedtree as pt
from calls import Call, valid_call
from calls.ops import draft_trees, paged_cache
from pagedtree.generation.drafters import CombinedDrafter
from pagedtree.integrations import flash_attn, flashinfer, sglang
from pagedtree.integrations.transformers import ModelDrafter, generate


def _flashinfer_pages() -> dict[str, Tensor]:
    return {"indptr": int32([0, 3, 5]), "indices": int32([1, 3, 0, 4, 2]), "last_page_len": int32([1, 2])}


def _custom_mask() -> Tensor:
    """Nodes see their prefix and some nodes."""
    rows = [(torch.arange(prefix + n) < prefix) | (torch.rand(n, prefix + n) < 0.7) for prefix, n in ((4, 5), (3, 3))]
    return torch.cat([mask.flatten() for mask in rows])


@valid_call
def flashinfer_page_table() -> Call:
    return Call(flashinfer.page_table, {**_flashinfer_pages(), "page_size": 4, "max_pages": 3}, fixed=("max_pages",))


@valid_call
def flashinfer_append() -> Call:
    pages = _flashinfer_pages()
    arguments = {
        "append_key": torch.randn(3, 2, 16),
        "append_value": torch.randn(3, 2, 16),
        "batch_indices": int32([0, 0, 1]),
        "positions": int32([7, 8, 5]),
        "paged_kv_cache": torch.zeros(6, 2, 4, 2, 16),
        "kv_indices": pages["indices"],
        "kv_indptr": pages["indptr"],
        "kv_last_page_len": pages["last_page_len"],
        "kv_layout": "NHD",
    }
    return Call(flashinfer.append_paged_kv_cache, arguments, written=("paged_kv_cache",))


@valid_call
def flashinfer_wrapper() -> Call:
    def plan_and_run(q: Tensor, paged_kv_cache: Tensor, **plan: Any) -> Any:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper()
        wrapper.plan(**plan)
        return wrapper.run(q, paged_kv_cache, return_lse=True)

    pages = {f"paged_kv_{name}": value for name, value in _flashinfer_pages().items()}
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "page_size": 4}
    options = {
        "custom_mask": _custom_mask(),
        "causal": False,
        "window_left": -1,
        "logits_soft_cap": 3.0,
        "sm_scale": 0.1,
    }
    tensors = {"q": torch.randn(8, 4, 64), "paged_kv_cache": torch.randn(6, 2, 4, 2, 64)}
    return Call(plan_and_run, {**tensors, "qo_indptr": int32([0, 5, 8]), **pages, **sizes, **options})


@valid_call
def flashinfer_import_mask() -> Call:
    mask = {"custom_mask": _custom_mask(), "qo_indptr": int32([0, 5, 8]), "seq_lens": int32([9, 6])}
    return Call(flashinfer.import_custom_mask, {**mask, "tree_lens": int32([5, 3])})


@valid_call
def flashinfer_export_mask() -> Call:
    arguments = {"tree_mask": draft_trees().mask, "qo_indptr": int32([0, 5, 8]), "seq_lens": int32([9, 6])}
    return Call(flashinfer.export_packed_custom_mask, {**arguments, "tree_lens": int32([5, 3])}, fixed=("seq_lens",))


@valid_call
def flashinfer_chain_sampling() -> Call:
    probs = torch.rand(2, 7, 11)
    probs /= probs.sum(2, True)
    drafts = {"draft_probs": probs[:, :3], "draft_token_ids": torch.randint(11, (2, 3)), "target_probs": probs[:, 3:]}
    return Call(flashinfer.chain_speculative_sampling, {**drafts, "seed": 3, "offset": 4})


def _sglang_trees() -> dict[str, Tensor]:
    return {
        "candidates": torch.tensor([[0, 1, 2, 3], [7, 8, 9, 10]]),
        "retrive_index": torch.arange(8).view(2, 4),
        "retrive_next_token": torch.tensor([[1, 3, -1, -1], [1, 2, 3, -1]]),
        "retrive_next_sibling": torch.tensor([[-1, 2, -1, -1], [-1, -1, -1, -1]]),
    }


def _sglang_outputs() -> dict[str, Tensor]:
    predicts, accept_index = torch.zeros(8, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    return {"predicts": predicts, "accept_index": accept_index, "accept_token_num": torch.zeros(2, dtype=torch.int32)}


@valid_call
def sglang_verify_greedy() -> Call:
    outputs, target = _sglang_outputs(), torch.tensor([[1, 3, 5, 5], [8, 9, 10, 3]])
    arguments = {**outputs, **_sglang_trees(), "target_predict": target}
    return Call(sglang.verify_tree_greedy, arguments, written=tuple(outputs))


@valid_call
def sglang_sampling() -> Call:
    outputs = _sglang_outputs()
    coins = {"uniform_samples": torch.rand(2, 4), "uniform_samples_for_final_sampling": torch.rand(2)}
    probs = {"target_probs": torch.rand(2, 4, 20).softmax(2), "draft_probs": torch.zeros(2, 4, 20)}
    arguments = {**outputs, **_sglang_trees(), **coins, **probs, "threshold_single": 0.9, "threshold_acc": 0.8}
    return Call(sglang.tree_speculative_sampling_target_only, arguments, written=(*outputs, "draft_probs"))


@valid_call
def sglang_build_tree() -> Call:
    outputs = {
        "tree_mask": torch.zeros(2 * 4 * 4 + 12 * 4, dtype=torch.bool),
        "positions": torch.zeros(8, dtype=torch.int64),
        **{f"retrive_{name}": torch.zeros(2, 4).long() for name in ("index", "next_token", "next_sibling")},
    }
    inputs = {
        "parent_list": torch.tensor([[-1, 0, 1, 2, 3], [-1, 0, 1, 3, 2]]),
        "selected_index": torch.tensor([[0, 1, 2], [0, 2, 4]]),
        "verified_seq_len": torch.tensor([5, 7]),
    }
    sizes = {"topk": 2, "depth": 3, "draft_token_num": 4, "tree_mask_mode": 0}
    return Call(sglang.build_tree_kernel_efficient, {**inputs, **outputs, **sizes}, written=tuple(outputs))


@valid_call
def sglang_move_kv() -> Call:
    buffers = {"k_buffer": list(torch.randn(2, 9, 2, 8)), "v_buffer": list(torch.randn(2, 9, 2, 8))}
    places = {"tgt_loc": int64([1, 2, 3]), "src_loc": int64([3, 4, 8])}
    return Call(sglang.move_kv_cache, {**buffers, **places}, written=tuple(buffers))


@valid_call
def flash_attn_with_kvcache() -> Call:
    caches, rows = torch.randn(2, 6, 4, 2, 64), torch.randn(2, 2, 3, 2, 64)
    arguments = {
        "q": torch.randn(2, 3, 4, 64), "k_cache": caches[0], "v_cache": caches[1], "k": rows[0], "v": rows[1],
        "cache_seqlens": int32([6, 3]), "block_table": int32([[1, 3, 0], [4, 2, 5]]), "softmax_scale": 0.1,
        "causal": True, "window_size": (5, 0), "softcap": 3.0, "return_softmax_lse": True,
    }  # fmt: skip
    return Call(flash_attn.flash_attn_with_kvcache, arguments, written=("k_cache", "v_cache"))


@valid_call
def flash_attn_varlen() -> Call:
    lens = {"cu_seqlens_q": int32([0, 5, 8]), "cu_seqlens_k": int32([0, 9, 15]), "max_seqlen_q": 5, "max_seqlen_k": 9}
    caches = {"k": torch.randn(6, 4, 2, 64), "v": torch.randn(6, 4, 2, 64), "block_table": paged_cache()["page_table"]}
    options = {"causal": True, "window_size": (5, 0), "softcap": 3.0, "softmax_scale": 0.1}
    return Call(flash_attn.flash_attn_varlen_func, {"q": torch.randn(8, 4, 64), **caches, **lens, **options})


@cache
def _model() -> Any:
    return tiny(0)


@valid_call
def transformers_generate() -> Call:
    sizes = {"max_new_tokens": 3, "page_size": 4, "num_pages": 40, "n": 2, "max_batch_tokens": 64}
    choices = {"params": pt.SamplingParams(0.8, top_p=0.9), "seeds": [1, 2, 3, 4], "rule": "sampled"}
    arguments = {"input_ids": [[3, 4, 5], [6]], "eos_token_id": [7], "share_prefix": True, **sizes, **choices}
    # More tokens or pages are legitimate, and slow.
    return Call(lambda **given: generate(_model(), **given), arguments, fixed=("max_new_tokens", "num_pages", "n"))


@valid_call
def transformers_generation_config() -> Call:
    def generate_with(**fields: Any) -> Any:
        model = copy.copy(_model())
        model.generation_config = copy.deepcopy(model.generation_config)
        vars(model.generation_config).update(fields)
        return generate(model, [[3, 4, 5], [6]], max_new_tokens=3)

    tokens = {"suppress_tokens": [3], "begin_suppress_tokens": [4], "bad_words_ids": [[5], [6, 7]], "eos_token_id": [7]}
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": None, "typical_p": 1.0}
    penalties = {"repetition_penalty": 1.2, "sequence_bias": [[[9], 2.0]], "min_length": 2, "min_new_tokens": None}
    refused = {"no_repeat_ngram_size": 0, "num_beams": 1, "forced_eos_token_id": None, "guidance_scale": None}
    return Call(generate_with, {**tokens, **sampling, **penalties, **refused, "stop_strings": None})


@valid_call
def transformers_generate_at_the_last_position() -> Call:
    """The model's positions limit texts to 17 tokens."""

    def generate_with(**given: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about shortened texts
            return generate(_table(16), **given)

    drafter = CombinedDrafter(ModelDrafter(_table(12), num_nodes=6, depth=3, width=2), min_match=2)
    prompts = [[3, 4, 5] * 5, [6, 7] * 4, [9]]
    sizes = {"max_new_tokens": 4, "page_size": 4, "num_pages": 40, "max_batch_tokens": 64}
    return Call(
        generate_with, {"input_ids": prompts, "drafter": drafter, **sizes}, fixed=("num_pages", "page_size", "drafter")
    )


@cache
def _table(num_positions: int) -> Any:
    return gpt2(num_positions)
