"""Each wrong argument raises its message; refused calls write nothing.

Verify ops: `test_verify_hostile.py`; wrong types: `test_calls.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import calls
import pytest
import torch
from calls import tensors_of
from support import int32
from support.attention import HEAD_SIZES, prepared_attention
from support.batches import FP8, bytes_of, prepared_compact
from support.devices import made_on, placed
from torch import Tensor

from pagedtree import DraftTree, RequestOptions, SamplingParams, Verdict

Changes = dict[str, Any]  # argument -> value, or function of the valid one
Table = dict[str, list[tuple[Changes, str]]]


def by_columns(t: Tensor) -> Tensor:
    """Makes the last dimension non-contiguous."""
    return t.mT.contiguous().mT


def heads_first(t: Tensor) -> Tensor:
    return t.transpose(1, 2)


def four_strides(t: Tensor) -> Tensor:
    return t.new_zeros(6, 4, 4, 6, 8, 10)[:, :, ::2, ::2, ::2, ::2]


def counts(change: Callable[[Tensor], Tensor]) -> Callable[[RequestOptions], RequestOptions]:
    """Returns a function that changes `output_counts`."""
    return lambda options: replace(options, output_counts=change(options.output_counts))


def with_prepared_step(return_lse: bool = True, **arguments: Any) -> Tensor:
    return prepared_attention(arguments)


FORMS: dict[str, Callable[..., Any]] = {"tree_attention": with_prepared_step, "compact_kv": prepared_compact}
TURNED = "of a cache [pages, Hkv, page_size, D] pass cache.transpose(1, 2)"
ONE, TWO = torch.ones(1), torch.ones(2)
# A segment of 64 keys, and room for 2^23.
SCRATCH: Changes = {"plan": lambda t: t.new_zeros(len(t) + 1), "page_table": lambda t: t.new_zeros(2**21).expand(2, -1)}

# The argument and the rest of "expected ..."; "..." matches anything.
REFUSALS: Table = {
    "tree_attention": [
        ({"q": Tensor.double}, "q: dtype torch.float32 or torch.float16 or ..., got torch.float64"),
        ({"q": lambda t: t[0]}, "q: shape [*, *, *] ..., got [4, 64]"),
        ({"q": lambda t: t[..., :48]}, f"q: head size {HEAD_SIZES}, got 48"),
        ({"q": by_columns}, "q: contiguous in its last dimension"),
        ({"q": lambda t: t[:, :3]}, "k_cache: a number of heads that divides q's 3"),
        ({"k_cache": Tensor.half}, "k_cache: q's dtype torch.bfloat16 or torch.float8_e4m3fn, got torch.float16"),
        ({"k_cache": lambda t: t[0]}, "k_cache: shape [*, *, *, 64] ..., got [4, 2, 64]"),
        ({"k_cache": lambda t: t[:, :0]}, "k_cache: a page size of at least 1"),
        ({"q": lambda t: t[:, :2], "k_cache": heads_first}, "k_cache: ... q's 2 ..., got [6, 2, 4, 64]; " + TURNED),
        ({"v_cache": lambda t: t[1:]}, "v_cache: shape [6, 4, 2, 64] ..., got [5, 4, 2, 64]"),
        ({"v_cache": lambda t: t.to(FP8)}, "v_cache: dtype torch.bfloat16, got torch.float8_e4m3fn"),
        ({"page_table": Tensor.long}, "page_table: dtype torch.int32, got torch.int64"),
        ({"page_table": lambda t: t[:1]}, "page_table: shape [2, *] ..., got [1, 3]"),
        ({"seq_lens": lambda t: t[:1]}, "seq_lens: shape [2] ..., got [1]"),
        ({"seq_lens": lambda t: t.repeat(2)[::2]}, "seq_lens: contiguous"),
        ({"cu_seqlens_q": lambda t: t[:0]}, "cu_seqlens_q: shape [B + 1]"),
        ({"tree_mask": lambda t: t[1:]}, "tree_mask: shape [8, *] ..., got [7, 1]"),
        ({"tree_mask": Tensor.bool}, "tree_mask: dtype torch.int32 (mask_words ..., got torch.bool"),
        ({"tree_lens": lambda t: t[:1]}, "tree_lens: shape [2] ..., got [1]"),
        ({"max_seqlen_q": -1}, "max_seqlen_q: at least 0, got -1"),
        ({"scale": math.nan}, "scale: finite, got nan"),
        ({"softcap": -1.0}, "softcap: finite and at least 0 (0: none), got -1"),
        ({"window": -1}, "window: at least 0 (0: none), got -1"),
        ({"sinks": TWO}, "sinks: shape [4] ..., got [2]"),
        ({"sinks": Tensor.half}, "sinks: dtype torch.float32, got torch.float16"),
        ({"k_scale": ONE}, "k_scale: None for a cache that is not torch.float8_e4m3fn"),
        ({"v_scale": TWO}, "v_scale: None for a cache that is not torch.float8_e4m3fn"),
        ({"plan": lambda t: t[:5]}, "plan: shape ..., got [5]"),
        (SCRATCH, "segment: at least 128 in attention_plan, for scratch of at most 1 GiB, got 64"),
        ({"out": lambda t: t[..., :32]}, "out: shape [8, 4, 64] ..., got [8, 4, 32]"),
        ({"out": Tensor.half}, "out: dtype torch.bfloat16, got torch.float16"),
    ],
    "tree_attention_fp8": [
        ({"k_scale": lambda t: t.repeat(6)}, "k_scale: a scalar or of shape [2], got [6]"),
        ({"v_scale": Tensor.double}, "v_scale: dtype torch.float32, got torch.float64"),
    ],
    "tree_attention_latent": [
        ({"softcap": 30.0}, "softcap: 0 if v_cache is a view of k_cache, got 30"),
        ({"k_scale": ONE}, "k_scale: None for a cache that is not torch.float8_e4m3fn"),
        ({"v_cache": lambda t: t[1:]}, "v_cache: shape [6, 4, 1, 512] ..., got [5, 4, 1, 512]"),
        ({"v_cache": lambda t: t[..., :448]}, "v_cache: head size 512 with K's 576, got 448"),
        ({"v_cache": lambda t: t[0]}, "v_cache: shape [pages, page_size, Hkv, Dv]"),
        ({"q": lambda t: t[..., :320]}, f"q: head size {HEAD_SIZES}, got 320"),
        ({"q": lambda t: t[..., :192]}, "v_cache: head size 192 or 128 with K's 192, got 512"),
        ({"out": lambda t: t[..., :64]}, "out: shape [8, 4, 512]"),
    ],
    "attention_plan": [
        ({"num_q_heads": 7}, "num_q_heads: a multiple of num_kv_heads 2, got 7"),
        ({"num_kv_heads": 0}, "num_kv_heads: at least 1, got 0"),
        ({"head_dim": 80}, f"head_dim: head size {HEAD_SIZES}, got 80"),
        ({"page_size": 0}, "page_size: at least 1, got 0"),
        ({"max_seqlen_q": -1}, "max_seqlen_q: at least 0, got -1"),
        ({"window": -1}, "window: at least 0 ..., got -1"),
        ({"segment": 0}, "segment: a multiple of 64, at least 64 ..., got 0"),
        ({"segment": 96}, "segment: a multiple of 64, at least 64 ..., got 96"),
        ({"seq_lens": lambda t: t[:1]}, "seq_lens: shape"),
        ({"tree_lens": Tensor.float}, "tree_lens: dtype torch.int32"),
        ({"head_dim": 576}, "head_dim_v: head size 512 with K's 576, got 576"),
        ({"latent": True}, "num_kv_heads: 1 for a latent cache, got 2"),
    ],
    "merge_states": [
        ({"out_b": lambda t: t[..., :32]}, "out_b: shape [8, 4, 64] ..., got [8, 4, 32]"),
        ({"out_b": Tensor.half}, "out_b: dtype torch.bfloat16, got torch.float16"),
        ({"lse_b": Tensor.double}, "lse_b: dtype torch.float32, got torch.float64"),
        ({"out_a": by_columns}, "out_a: contiguous in its last dimension"),
    ],
    "slot_mapping": [
        ({"page_table": lambda t: t[0]}, "page_table: shape [2, *] ..., got [3]"),
        ({"page_table": lambda t: t[:1]}, "page_table: shape [2, *] ..., got [1, 3]"),
        ({"page_table": Tensor.long}, "page_table: dtype torch.int32"),
        ({"page_table": by_columns}, "page_table: contiguous in its last dimension"),
        ({"seq_lens": lambda t: t[:1]}, "seq_lens: shape [2] ..., got [1]"),
        ({"seq_lens": Tensor.long}, "seq_lens: dtype torch.int32, got torch.int64"),
        ({"cu_seqlens_q": lambda t: t[:0]}, "cu_seqlens_q: shape [B + 1]"),
        ({"page_size": 0}, "page_size: 1..2147483647, got 0"),
        ({"page_size": 2**31}, "page_size: 1..2147483647, got 2147483648"),
        ({"total_q": -1}, "total_q: at least 0, got -1"),
    ],
    "append_kv": [
        ({"k": Tensor.double}, "k: dtype torch.float32 or torch.float16 or ..., got torch.float64"),
        ({"k": lambda t: t.flatten(1)}, "k: shape [*, *, *] ..., got [5, 32]"),
        ({"k": by_columns}, "k: contiguous in its last dimension"),
        ({"v": Tensor.half}, "v: dtype torch.float32, got torch.float16"),
        ({"v": lambda t: t[:, :1]}, "v: shape [5, 2, *] ..., got [5, 1, 16]"),
        ({"v": lambda t: t[..., :5]}, "v_cache: shape [6, 4, 2, 5] ..., got [6, 4, 2, 16]"),
        ({"v": None}, "v: a Tensor if v_cache is one, got None"),
        ({"v_cache": None}, "v_cache: a Tensor if v is one, got None"),
        ({"v_cache": lambda t: t[1:]}, "v_cache: shape [6, 4, 2, 16] ..., got [5, 4, 2, 16]"),
        ({"k_cache": heads_first}, "k_cache: k's 2 heads ..., got [6, 2, 4, 16]; " + TURNED),
        ({"k_cache": lambda t: t.to(FP8)}, "v_cache: dtype torch.float8_e4m3fn, got torch.float32"),
        ({"k_cache": Tensor.half}, "k_cache: dtype torch.float32 or torch.float8_e4m3fn, got torch.float16"),
        ({"k_cache": lambda t: t[..., :5]}, "k_cache: shape [*, *, 2, 16] ..., got [6, 4, 2, 5]"),
        ({"k_cache": by_columns}, "k_cache: contiguous in its last dimension"),
        ({"slots": lambda t: t[:3]}, "slots: shape [5] ..., got [3]"),
        ({"slots": Tensor.int}, "slots: dtype torch.int64, got torch.int32"),
        ({"k_scale": ONE}, "k_scale: None if rows are copied without conversion"),
        ({"v_scale": ONE}, "v_scale: None if rows are copied without conversion"),
    ],
    "append_kv_fp8": [
        ({"k_scale": torch.ones(3)}, "k_scale: shape [2] ..., got [3]"),
        ({"v_scale": Tensor.double}, "v_scale: dtype torch.float32, got torch.float64"),
    ],
    "append_kv_latent": [
        ({"v_scale": ONE}, "v_scale: None where v is, got a Tensor"),
        ({"k_scale": ONE}, "k_scale: None if rows are copied without conversion"),
        ({"k_cache": lambda t: t[0]}, "k_cache: shape [*, *, 1, 576] ..., got [4, 1, 576]"),
    ],
    "rope_append": [
        ({"q": Tensor.double}, "q: dtype torch.float32 or torch.float16 or torch.bfloat16, got torch.float64"),
        ({"q": lambda t: t.to(FP8)}, "q: dtype ... torch.bfloat16, got torch.float8_e4m3fn"),
        ({"q": lambda t: t.flatten(1)}, "q: shape [*, *, *] ..., got [5, 64]"),
        ({"q": by_columns}, "q: contiguous in its last dimension"),
        ({"k": Tensor.half}, "k: dtype torch.bfloat16, got torch.float16"),
        ({"k": lambda t: t[:3]}, "k: shape [5, *, 16] ..., got [3, 2, 16]"),
        ({"k": lambda t: t[..., :6]}, "k: shape [5, *, 16] ..., got [5, 2, 6]"),
        ({"v": Tensor.half}, "v: dtype torch.bfloat16, got torch.float16"),
        ({"v": None}, "v: a Tensor if v_cache is one, got None"),
        ({"v_cache": None}, "v_cache: a Tensor if v is one, got None"),
        ({"positions": lambda t: t[:1]}, "positions: shape [5] ..., got [1]"),
        ({"positions": Tensor.int}, "positions: dtype torch.int64, got torch.int32"),
        ({"cos_sin": Tensor.half}, "cos_sin: dtype torch.float32 or torch.bfloat16, got torch.float16"),
        ({"cos_sin": lambda t: t[0]}, "cos_sin: shape [*, *] ..., got [8]"),
        ({"cos_sin": by_columns}, "cos_sin: contiguous in its last dimension"),
        ({"cos_sin": lambda t: t[:0]}, "cos_sin: at least one row, got [0, 8]"),
        ({"cos_sin": lambda t: t[:, :5]}, "cos_sin: an even number of columns, got [9, 5]"),
        ({"cos_sin": lambda t: t.repeat(1, 3)}, "cos_sin: at most 16 columns, the head size, got [9, 24]"),
        ({"rotary_start": 9}, "rotary_start: 0..8, so that the 8 columns are within a head, got 9"),
        ({"rotary_start": -1}, "rotary_start: 0..8, so that the 8 columns are within a head, got -1"),
        ({"k_cache": Tensor.bfloat16}, "v_cache: dtype torch.bfloat16, got torch.float8_e4m3fn"),
        ({"k_cache": lambda t: t[..., :4]}, "k_cache: shape [*, *, 2, 16] ..., got [6, 4, 2, 4]"),
        ({"slots": lambda t: t[:1]}, "slots: shape [5] ..., got [1]"),
        ({"q_out": lambda t: t[..., :6]}, "q_out: shape [5, 4, 16] ..., got [5, 4, 6]"),
        ({"q_out": Tensor.half}, "q_out: dtype torch.bfloat16, got torch.float16"),
        ({"q_out": by_columns}, "q_out: contiguous in its last dimension"),
    ],
    "rope_append_latent": [
        ({"cos_sin": Tensor.half}, "cos_sin: dtype torch.float32, got torch.float16"),
        ({"k_scale": ONE}, "k_scale: None if rows are copied without conversion"),
    ],
    "compact_kv": [
        ({"caches": lambda c: [c[0], c[1][:, :3]]}, "caches[1]: shape [6, 4, ...] like caches[0], got [6, 3, 16]"),
        ({"caches": lambda c: [c[0], c[1][:5]]}, "caches[1]: shape [6, 4, ...] like caches[0], got [5, 4, 16]"),
        ({"caches": lambda c: [c[0].flatten()]}, "caches[0]: shape [pages, page_size, ...], got [384]"),
        ({"caches": lambda c: [c[0], four_strides(c[0])]}, "caches[1]: rows with at most three strided dimensions"),
        ({"page_table": lambda t: t[:1]}, "page_table: shape [2, *] ..., got [1, 3]"),
        ({"page_table": by_columns}, "page_table: contiguous in its last dimension"),
        ({"start": Tensor.long}, "start: dtype torch.int32, got torch.int64"),
        ({"accept_index": lambda t: t[:1]}, "accept_index: shape [2, *] ..., got [1, 3]"),
        ({"accept_index": lambda t: t.new_zeros(2, 1025)}, "accept_index: at most 1024 columns"),
        ({"num_accepted": lambda t: t[:1]}, "num_accepted: shape [2] ..., got [1]"),
    ],
    "tree_delta_rule": [
        ({"q": Tensor.double}, "q: dtype torch.float16 or torch.bfloat16..., got torch.float64"),
        ({"k": lambda t: t.repeat(1, 2, 1)}, "k: shape [8, 1, 8] ..., got [8, 2, 8]"),
        ({"v": lambda t: t[..., :12]}, "v: a head size that is a multiple of 8 up to 256, got 12"),
        ({"g": Tensor.half}, "g: dtype torch.float32, got torch.float16"),
        ({"beta": lambda t: t[:, :1]}, "beta: shape [8, 2] ..., got [8, 1]"),
        ({"state": lambda t: t.mT}, "state: shape [*, 2, 8, 16] ..., got [3, 2, 16, 8]"),
        ({"state_index": Tensor.long}, "state_index: dtype torch.int32, got torch.int64"),
        ({"state_index": lambda t: t[:1]}, "state_index: shape [2] ..., got [1]"),
        ({"trees": lambda trees: replace(trees, max_nodes=300)}, "max_nodes: 1..256, got 300"),
        ({"trees": None}, "cu_seqlens: a Tensor if, and only if, there are no trees, got neither"),
        ({"cu_seqlens": int32([0, 8])}, "cu_seqlens: a Tensor if, and only if, there are no trees, got both"),
        ({"l2norm_eps": 0.0}, "l2norm_eps: a positive fp32 number, got 0"),
        ({"l2norm_eps": math.nan}, "l2norm_eps: a positive fp32 number, got nan"),
    ],
    "advance_state": [
        ({"k": lambda t: t.repeat(1, 3, 1)}, "v: a multiple of 3 heads, those of k, got 2"),
        ({"accept_index": None}, "accept_index: a Tensor with trees, got None"),
    ],
    "causal_delta_rule": [({"g": lambda t: t[:, :1]}, "g: shape [8, 2] ..., got [8, 1]")],
    "causal_advance_state": [({"num_accepted": int32([0])}, "num_accepted: None without trees, got a Tensor")],
    "tree_conv1d": [
        ({"weight": lambda t: t.repeat(1, 5)[:, :17]}, "weight: 1 to 16 taps, got 17"),
        ({"conv_state": lambda t: t[..., 1:]}, "conv_state: shape [*, 6, 3] ..., got [3, 6, 2]"),
        ({"conv_state": Tensor.half}, "conv_state: dtype torch.bfloat16, got torch.float16"),
        ({"bias": lambda t: t[1:]}, "bias: shape [6] ..., got [5]"),
        ({"x": by_columns}, "x: contiguous in its last dimension"),
        ({"activation": "gelu"}, 'activation: None or "silu", got "gelu"'),
    ],
    "sample": [
        ({"logits": Tensor.double}, "logits: dtype torch.float32 or ...bfloat16, got torch.float64"),
        ({"logits": lambda t: t[0]}, "logits: shape [*, *] ..., got [40]"),
        ({"logits": lambda t: t[:, :0]}, "logits: at least one column, got [2, 0]"),
        ({"logits": lambda t: t.new_empty(2, 2**20 + 1)}, "logits: at most 2^20 columns, got [2, 1048577]"),
        ({"logits": by_columns}, "logits: contiguous in its last dimension"),
        ({"params": SamplingParams(top_k=torch.zeros(2))}, "top_k: dtype torch.int32"),
        ({"params": lambda _: SamplingParams(top_p=torch.ones(3))}, "top_p: shape [1] or [2], got [3]"),
        ({"seeds": Tensor.int}, "seeds: dtype torch.int64, got torch.int32"),
        ({"positions": lambda t: t[:1]}, "positions: shape [2] ..., got [1]"),
    ],
    "token_logprobs": [
        ({"logits": Tensor.int}, "logits: dtype ..., got torch.int32"),
        ({"tokens": Tensor.float}, "tokens: dtype torch.int32 or torch.int64, got torch.float32"),
        ({"tokens": lambda t: t[None]}, "tokens: shape [*] ..., got [1, 2]"),
        ({"rows": lambda t: t[:1]}, "rows: shape [2] ..., got [1]"),
        ({"rows": Tensor.float}, "rows: dtype torch.int32 or torch.int64, got torch.float32"),
        *(({"top_n": n}, f"top_n: 0..40, got {n}") for n in (-1, 41)),
        ({"logits": lambda t: t.new_zeros(4, 2000), "top_n": 1025}, "top_n: 0..1024, got 1025"),
        ({"params": lambda _: SamplingParams(top_p=torch.ones(3))}, "top_p: shape"),
        ({"params": lambda _: SamplingParams(presence_penalty=torch.ones(3))}, "presence_penalty: shape"),
        ({"options": counts(lambda t: t[:1])}, "output_counts: shape"),
        ({"options": lambda o: replace(o, allowed_mask=o.allowed_mask.repeat(1, 2))}, "allowed_mask: shape"),
    ],
    "token_logprobs_of_all_rows": [({"tokens": lambda t: t[:1]}, "tokens: shape [2] ..., got [1]")],
    "start_draft": [
        ({"root_tokens": Tensor.int}, "root_tokens: int64 ..."),
        ({"max_kv_nodes": 0}, "max_kv_nodes: 1..1024, got 0"),
        ({"active": lambda t: t[:1]}, "active: bool [B]..."),
    ],
    "expand_tree": [
        ({"logits": lambda t: t[:3]}, "logits: shape [4, *] ..., got [3, 40]"),
        ({"logits": Tensor.double}, "logits: dtype torch.float32 or ...bfloat16, got torch.float64"),
        ({"logits": by_columns}, "logits: contiguous in its last dimension"),
        *(({"num_children": n}, f"num_children: 1..40, got {n}") for n in (0, 41)),
        *(({"num_frontier": n}, f"num_frontier: 0..4, got {n}") for n in (-1, 5)),
        ({"num_children": 40, "num_frontier": 32}, "num_frontier: at most 4 (max_kv_nodes less those fed), got 32"),
        ({"state": lambda s: replace(s, frontier=s.frontier[:, :0])}, "frontier: at least one node, got 0"),
        ({"law": "iid", "params": SamplingParams()}, "law: 'topk' as in the levels before, got 'iid'"),
    ],
    "expand_tree_by_draws": [
        ({"law": "greedy"}, 'law: "topk", "iid", "swor" or "coupled", got "greedy"'),
        ({"law": "topk"}, 'temperature: None under law "topk", got a tensor'),
        ({"params": None}, "params: SamplingParams under law 'swor', got None"),
        ({"seeds": None}, "seeds: a tensor under this law, got None"),
        ({"seeds": Tensor.int}, "seeds: dtype torch.int64, got torch.int32"),
        ({"positions": lambda t: t[:1]}, "positions: shape [2] ..., got [1]"),
        ({"params": lambda _: SamplingParams(top_k=int32([1, 2, 3]))}, "top_k: shape [1] or [2], got [3]"),
        ({"num_children": 41}, "num_children: 1..40, got 41"),
        ({"law": "iid", "num_children": 1025}, "num_children: 1..1024, got 1025"),
    ],
    "rerank_tree": [
        ({"num_nodes": 1025}, "num_nodes: 1..1024, got 1025"),
        ({"active": lambda t: t[:1]}, "active: shape [2]..."),
    ],
    "ngram_propose": [
        ({"max_nodes": 0}, "max_nodes: 1..1024, got 0"),
        ({"max_depth": 1024}, "max_depth: 0..1023, got 1024"),
        ({"min_ngram": 0}, "min_ngram: at least 1, got 0"),
        ({"min_ngram": 2, "max_ngram": 1}, "max_ngram: min_ngram..64, got 1"),
        ({"max_branches": -1}, "max_branches: at least 0, got -1"),
        ({"extra": lambda t: t.repeat(2, 1)}, "extra: shape [2, *] ..., got [4, 20]"),
        ({"history_lens": Tensor.long}, "history_lens: dtype torch.int32, got torch.int64"),
    ],
    "medusa_propose": [
        ({"tree": DraftTree.chain(4)}, "tree: depth <= 3 (the heads), got 4"),
        ({"tree": DraftTree.full([41])}, "tree: child ranks below 40 (V), got 40"),
        ({"head_logits": lambda t: t[0]}, "head_logits: shape [*, *, *] ..., got [3, 40]"),
    ],
    "rejected_predictions": [
        ({"predictions": lambda t: t[:1]}, "predictions: shape [8]..."),
        ({"accept_index": lambda t: t[:1]}, "accept_index: shape [2, S]..."),
        ({"context": 0}, "context: 1..1023..."),
    ],
    "build_trees": [
        ({"parents": Tensor.float}, "parents: dtype torch.int32, got torch.float32"),
        ({"parents": lambda t: t[None]}, "parents: shape [*] ..., got [1, 7]"),
        ({"parents": lambda t: t.repeat(2)[::2]}, "parents: contiguous, got strides [2]"),
        ({"cu_nodes": Tensor.long}, "cu_nodes: dtype torch.int32, got torch.int64"),
        ({"cu_nodes": lambda t: t[:0]}, "cu_nodes: shape [B + 1], got [0]"),
        *(({"max_nodes": n}, f"max_nodes: 1..1024, got {n}") for n in (0, 1025)),
        *(({"max_depth": n}, f"max_depth: 0..1023, got {n}") for n in (-1, 1024)),
    ],
    "prepare_step": [
        ({"page_table": lambda t: t[:1]}, "page_table: shape [2, *] ..., got [1, 3]"),
        ({"page_table": Tensor.long}, "page_table: dtype torch.int32, got torch.int64"),
        ({"start": lambda t: t[:1]}, "start: shape [2] ..., got [1]"),
        ({"start": Tensor.double}, "start: dtype torch.int32, got torch.float64"),
        ({"page_size": 0}, "page_size: 1..2147483647, got 0"),
        ({"total_q": -1}, "total_q: at least 0, got -1"),
    ],
    "commit": [
        ({"verdict": lambda v: v._replace(tokens=v.tokens.int())}, "tokens: dtype torch.int64, got torch.int32"),
        ({"verdict": lambda v: v._replace(tokens=v.tokens[:, :1])}, "tokens: shape [1, 2] ..., got [1, 1]"),
        (
            {"verdict": lambda v: v._replace(num_accepted=v.num_accepted.repeat(2))},
            "num_accepted: shape [1] ..., got [2]",
        ),
        ({"verdict": lambda v: v._replace(accept_index=v.accept_index[0])}, "accept_index: shape [*, *] ..., got [2]"),
        ({"trees": lambda t: replace(t, cu_nodes=t.cu_nodes.repeat(2))}, "cu_nodes: shape [2] ..., got [4]"),
        ({"start": Tensor.long}, "start: dtype torch.int32, got torch.int64"),
        ({"history": None}, "history_lens: a Tensor if, and only if, history is one, got a tensor"),
        ({"history_lens": None}, "history_lens: a Tensor if, and only if, history is one, got None"),
        ({"history": Tensor.int}, "history: dtype torch.int64, got torch.int32"),
        ({"history": lambda t: t.repeat(2, 1), "history_rows": None}, "history: shape [1, *] ..., got [2, 8]"),
        ({"history": lambda t: t.repeat(2, 1)}, "history_lens: shape [2] ..., got [1]"),
        ({"history_lens": Tensor.long}, "history_lens: dtype torch.int32, got torch.int64"),
        ({"history_rows": lambda t: t.repeat(2)}, "history_rows: shape [1] ..., got [2]"),
        ({"history": None, "history_lens": None}, "history_rows: None without history, got a tensor"),
        ({"eos_ids": Tensor.int}, "eos_ids: dtype torch.int64, got torch.int32"),
        ({"eos_ids": lambda t: t.repeat(2, 1)}, "eos_ids: shape [1, *] ..., got [2, 1]"),
        ({"eos_ids": lambda t: t[None, None]}, "eos_ids: shape [1, *] ..., got [1, 1, 1]"),
        ({"node_map": Tensor.long}, "node_map: dtype torch.int32, got torch.int64"),
        ({"tokens_left": Tensor.long}, "tokens_left: dtype torch.int32, got torch.int64"),
        ({"tokens_left": lambda t: t.repeat(2)}, "tokens_left: shape [1] ..., got [2]"),
        ({"options": counts(Tensor.long)}, "output_counts: dtype torch.int32, got torch.int64"),
        ({"options": counts(Tensor.float)}, "output_counts: dtype torch.int32, got torch.float32"),
        ({"options": counts(lambda t: t[0])}, "output_counts: shape [1, *] ..., got [40]"),
        ({"options": counts(lambda t: t.repeat(2, 1))}, "output_counts: shape [1, *] ..., got [2, 40]"),
        ({"options": counts(lambda t: t[:, ::2])}, "output_counts: contiguous in its last dimension"),
    ],
    "best_first_tree": [
        ({"log_probs": Tensor.half}, "log_probs: dtype torch.float32, got torch.float16"),
        ({"log_probs": lambda t: t[0]}, "log_probs: shape [*, *, *] ..., got [3, 4]"),
        ({"log_probs": by_columns}, "log_probs: contiguous in its last dimension"),
        ({"log_probs": lambda t: t.new_zeros(2, 1024, 4)}, "log_probs: at most 1023 levels, got 1024"),
        ({"log_probs": lambda t: t.new_zeros(1, 1, 2**20 + 1)}, "log_probs: at most 2^20 candidates per level"),
        ({"tokens": lambda t: t[:, :, 1:]}, "tokens: shape [2, 3, 4] ..., got [2, 3, 3]"),
        ({"tokens": Tensor.int}, "tokens: dtype torch.int64, got torch.int32"),
        ({"root_tokens": lambda t: t[:1]}, "root_tokens: shape [2] ..., got [1]"),
        *(({"num_nodes": n}, f"num_nodes: 1..1024, got {n}") for n in (0, 1025)),
    ],
    "select_nodes": [
        ({"survival": lambda t: t[1:]}, "survival: shape [8] ..., got [7]"),
        ({"survival": Tensor.double}, "survival: dtype torch.float32, got torch.float64"),
        ({"survival": lambda t: t.repeat(2)[::2]}, "survival: contiguous"),
        *(({"budget": n}, f"budget: 0..2^31 - 1, got {n}") for n in (-1, 2**31)),
        ({"limit": Tensor.long}, "limit: dtype torch.int32, got torch.int64"),
        ({"limit": lambda t: t[0]}, "limit: shape [1] ..., got []"),
    ],
}


def with_value(path: tuple[int, ...], value: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that replaces one value of a copy."""

    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t[path] = value
        return t

    return change


def path(root: int = 0, node: int = 2, num_accepted: int = 1) -> Callable[[Verdict], Verdict]:
    def change(verdict: Verdict) -> Verdict:
        nodes, count = verdict.accept_index, verdict.num_accepted
        return verdict._replace(
            accept_index=nodes.new_tensor([[root, node]]), num_accepted=count.new_tensor([num_accepted])
        )

    return change


SLOTS = [({"slots": with_value((1,), x)}, f"slots[1]: -1..23, got {x}") for x in (-2, 24, 2**62)]
POSITIONS = [({"positions": with_value((1,), x)}, f"positions[1]: 0..8, got {x}") for x in (-1, 9, 2**62)]
# Values checked under PAGEDTREE_CHECK=1.
BAD_VALUES: Table = {
    "attention_plan": [({"cu_seqlens_q": with_value((2,), 3)}, "cu_seqlens_q: non-descending, got [0, 5, 3]")],
    "slot_mapping": [
        ({"cu_seqlens_q": with_value((0,), 1)}, "cu_seqlens_q[0]: 0, got 1"),
        ({"cu_seqlens_q": with_value((2,), 3)}, "cu_seqlens_q: non-descending, got [0, 5, 3]"),
        ({"total_q": 7}, "cu_seqlens_q: at most 7 rows, got 8"),
        ({"seq_lens": with_value((0,), 4)}, "seq_lens[0]: at least its 5 queries, got 4"),
        ({"seq_lens": with_value((1,), 13)}, "page_table: pages for position 12 of sequence 1, got 3 pages of 4"),
        ({"seq_lens": with_value((1,), 9)}, "page_table[1, 2]: a page id in ..., got -1"),
        ({"page_table": with_value((1, 1), 0)}, "page_table[1, 1]: a page that no other sequence writes, got 0"),
    ],
    "append_kv": [*SLOTS],
    "append_kv_latent": [*SLOTS],
    "rope_append": [*SLOTS, *POSITIONS],
    "compact_kv": [
        ({"accept_index": with_value((0, 0), 1)}, "accept_index[0, 0]: 0, the root, got 1"),
        ({"accept_index": with_value((1, 1), 0)}, "accept_index[1, 1]: greater than the node before it, got 0"),
        ({"accept_index": with_value((0, 2), -1)}, "accept_index[0, 2]: greater than the node before it, got -1"),
        ({"num_accepted": with_value((1,), 3)}, "num_accepted[1]: 0..2, got 3"),
        ({"num_accepted": with_value((0,), -1)}, "num_accepted[0]: 0..2, got -1"),
        ({"start": with_value((1,), -4)}, "start[1]: a position, got -4"),
        ({"start": with_value((0,), 8)}, "page_table: pages for position 12 of sequence 0, got 3 pages of 4"),
        ({"page_table": with_value((1, 0), 6)}, "page_table[1, 0]: a page id in 0..5, got 6"),
        ({"page_table": with_value((0, 1), -1)}, "page_table[0, 1]: a page id in 0..5, got -1"),
        ({"page_table": with_value((1, 0), 3)}, "page_table[1, 0]: a page that no other sequence writes, got 3"),
        ({"page_table": with_value((0, 0), 9)}, "page_table[0, 0]: a page id below 6, ...got 9"),
        # K and V at once
        ({"caches": lambda c: [c[0].new_zeros(2, 4, 2, 3, 5)]}, "caches[0]: shape ..., got [2, 4, 2, 3, 5]"),
    ],
    "tree_delta_rule": [
        ({"state_index": with_value((1,), 3)}, "state_index[1]: -1..2, got 3"),
        ({"trees": lambda t: replace(t, cu_nodes=with_value((1,), 9)(t.cu_nodes))}, "cu_nodes: non-descending"),
    ],
    "advance_state": [({"accept_index": with_value((0, 0), 1)}, "accept_index[0, 0]: 0, the root, got 1")],
    "build_trees": [
        ({"cu_nodes": with_value((0,), 1)}, "cu_nodes[0]: 0, got 1"),
        ({"cu_nodes": with_value((1,), 9)}, "cu_nodes: non-descending, got [0, 9, 6]"),
        ({"cu_nodes": with_value((2,), 8)}, "cu_nodes: at most 7 rows, got 8"),
    ],
    "prepare_step": [
        ({"total_q": 7}, "cu_nodes: at most 7 rows, got 8"),
        ({"start": with_value((0,), 8)}, "page_table: pages for position 12 of sequence 0, got 3 pages of 4"),
        ({"start": with_value((1,), 6)}, "page_table[1, 2]: a page id in ..., got -1"),
        ({"page_table": with_value((1, 0), 3)}, "page_table[1, 0]: a page that no other sequence writes, got 3"),
    ],
    "commit": [
        ({"verdict": path(num_accepted=2)}, "num_accepted[0]: 0..1, got 2"),
        ({"verdict": path(node=3)}, "accept_index[0, 1]: a node of a tree of 3, got 3"),
        ({"verdict": path(node=0)}, "accept_index[0, 1]: greater than the node before it, got 0"),
        ({"verdict": path(root=1)}, "accept_index[0, 0]: 0, the root, got 1"),
        ({"history_lens": with_value((0,), 9)}, "history_lens[0]: 0..8, got 9"),
        ({"node_map": lambda t: t[:2]}, "cu_nodes: at most 2 rows, got 3"),
        ({"history_rows": with_value((0,), 1)}, "history_rows[0]: -1..0, got 1"),
    ],
    "ngram_propose": [({"history_lens": with_value((2,), 31)}, "history_lens[2]: 0..30, got 31")],
    "select_nodes": [
        ({"trees": lambda t: replace(t, cu_nodes=with_value((1,), 9)(t.cu_nodes))}, "cu_nodes: non-descending")
    ],
}


def refuses(device: torch.device, name: str, changes: Changes, message: str) -> None:
    call = calls.make(name).on_memory(lambda memory: memory.to(device))
    for key, change in changes.items():
        with made_on(device):
            new = change(call.arguments[key]) if callable(change) else change
        call.arguments[key] = placed(new, device) if isinstance(new, Tensor) else new
    outputs = [t for key in call.written for t in tensors_of(call.arguments[key])]
    before = [bytes_of(t).clone() for t in outputs]
    op = call.function.__name__
    said = message.replace(": ", ": expected ", 1)
    expected = f"^{op}: {re.escape(said)}".replace(re.escape("..."), ".*")
    for form in (call.function, *(FORMS[op] for _ in range(op in FORMS))):
        with pytest.raises(ValueError, match=expected):
            form(**call.arguments)
        assert all(torch.equal(bytes_of(t), old) for t, old in zip(outputs, before, strict=True))


def each_row(table: Table) -> pytest.MarkDecorator:
    rows = [(name, *row) for name, rows in table.items() for row in rows]
    return pytest.mark.parametrize(("name", "changes", "message"), rows)


@each_row(REFUSALS)
def test_refusals(backend: str, device: torch.device, name: str, changes: Changes, message: str) -> None:
    refuses(device, name, changes, message)


@each_row(BAD_VALUES)
def test_bad_values(value_checks: None, device: torch.device, name: str, changes: Changes, message: str) -> None:
    refuses(device, name, changes, message)


@pytest.mark.parametrize("name", REFUSALS)
def test_checked_calls_pass(value_checks: None, device: torch.device, name: str) -> None:
    calls.make(name).on_memory(lambda memory: memory.to(device)).results()
