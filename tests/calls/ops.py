"""Valid calls of `pagedtree` and `pagedtree.distributed`, except recurrent layers'."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from support import int32, int64
from torch import Tensor

import pagedtree as pt
from calls import Call, valid_call, valid_calls
from pagedtree import distributed, testing

VOCAB = 40


# ---- shared


def draft_trees() -> pt.TreeBatch:
    return pt.TreeBatch.from_trees([pt.DraftTree([-1, 0, 0, 1, 1]), pt.DraftTree([-1, 0, 1])])


def _words(count: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,))


def _params() -> pt.SamplingParams:
    return pt.SamplingParams(torch.tensor([0.7, 1.2]), int32([5, 0]), torch.tensor([0.9, 1.0]), 0.01)


def _penalised() -> pt.SamplingParams:
    penalties = {"repetition_penalty": torch.tensor([1.3, 0.8]), "presence_penalty": 0.5, "frequency_penalty": -0.25}
    return dataclasses.replace(_params(), **penalties)


def _lists() -> dict[str, Any]:
    """Returns two sequences' request options."""
    return {
        "prompts": [[1, 2], [3]], "outputs": [[4, 5, 4], [6]], "allowed": [None, [*range(30)]],
        "bias": [{3: 1.5, 7: float("-inf")}, {2: 0.5}], "bad_words": [[[4, 8], [9]], [[6, 1, 2], [3, 6, 5]]],
        "stop_ids": [[2], [5, 6]], "min_positions": [2**61, 0], "match_prompts": False,
    }  # fmt: skip


def _options() -> pt.RequestOptions:
    return pt.RequestOptions.from_lists(VOCAB, **_lists())


def _verification(**more: Any) -> dict[str, Any]:
    """Returns two trees of 5 and 3 nodes, and all verification functions' arguments."""
    return {
        "logits": torch.randn(8, VOCAB),
        "draft_tokens": torch.randint(VOCAB - 10, (8,)),
        "trees": draft_trees(),
        "grammar_mask": torch.rand(8, VOCAB) < 0.8,
        "draft_to_target": torch.arange(VOCAB - 10).flip(0),
        "tokens_left": int32([2, 9]),
        **more,
    }


def _sampled() -> dict[str, Any]:
    return _verification(params=_penalised(), seeds=_words(2), positions=_words(2), options=_options())


def with_draft(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with a `Draft` in place of its parts."""
    parts = {name: arguments[name] for name in pt.Draft._fields if name in arguments}
    others = {name: value for name, value in arguments.items() if name not in parts}
    return {**others, "draft_tokens": pt.Draft(**parts)}


def _drafted() -> dict[str, Any]:
    draft_rows = int32([-1, 0, 0, 1, 1, -1, 2, 3])
    probs = torch.rand(4, VOCAB)
    return {**_sampled(), "draft_law": "swor", "draft_probs": probs / probs.sum(1, True), "draft_rows": draft_rows}


@cache
def one_rank() -> distributed.VocabShards:
    """Places the vocabulary on one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return distributed.VocabShards(VOCAB, group=dist.group.WORLD)


def paged_cache() -> dict[str, Tensor]:
    """Returns 9 and 6 positions in pages of 4; five and three are new."""
    return {"page_table": int32([[1, 3, 0], [4, 2, -1]]), "seq_lens": int32([9, 6]), "cu_seqlens_q": int32([0, 5, 8])}


def _attention(cache_dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    caches = torch.randn(2, 6, 4, 2, 64).to(cache_dtype)
    return {
        "q": torch.randn(8, 4, 64).bfloat16(),
        "k_cache": caches[0],
        "v_cache": caches[1],
        **paged_cache(),
        "tree_mask": draft_trees().mask,
        "tree_lens": int32([5, 3]),
        "max_seqlen_q": 5,
        "scale": 0.1,
        "softcap": 20.0,
        "window": 6,
        "sinks": torch.randn(4),
        "return_lse": True,
    }


def _state(levels: int) -> pt.drafting.DraftState:
    state = pt.start_draft(int64([3, 4]), max_kv_nodes=7, active=torch.tensor([True, True]))
    for _ in range(levels):
        rows = state.num_frontier * 2
        state = pt.expand_tree(state, torch.randn(rows, VOCAB), num_children=2, num_frontier=2)
    return state


# ---- pagedtree


@valid_call
def tree_attention() -> Call:
    arguments = _attention()
    plan = pt.attention_plan(
        arguments["seq_lens"], arguments["cu_seqlens_q"], num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=4,
        max_seqlen_q=5, tree_lens=arguments["tree_lens"],
    )  # fmt: skip
    arguments |= {"out": torch.empty_like(arguments["q"]), "plan": plan}
    return Call(pt.tree_attention, arguments, written=("out",))


@valid_call
def causal_attention() -> Call:
    """Has the fewest arguments."""
    names = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "cu_seqlens_q")
    arguments = _attention()
    out = torch.empty_like(arguments["q"])
    return Call(pt.tree_attention, {**{name: arguments[name] for name in names}, "out": out}, written=("out",))


@valid_call
def tree_attention_fp8() -> Call:
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
    return Call(pt.tree_attention, _attention(torch.float8_e4m3fn) | scales)


@valid_call
def tree_attention_latent() -> Call:
    """V is a view of K until either changes."""
    cache = torch.randn(6, 4, 1, 576).bfloat16()
    arguments = {**_attention(), "q": torch.randn(8, 4, 576).bfloat16(), "k_cache": cache, "v_cache": cache[..., :512]}
    arguments |= {"softcap": 0.0, "out": torch.empty(8, 4, 512, dtype=torch.bfloat16)}
    return Call(pt.tree_attention, arguments, written=("out",))


@valid_call
def attention_plan_latent() -> Call:
    sizes = {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "latent": True, "segment": 64}
    return Call(pt.attention_plan, {**attention_plan().arguments, **sizes})


@valid_call
def attention_plan() -> Call:
    paged = paged_cache()
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 4, "max_seqlen_q": 5}
    lens = {"seq_lens": paged["seq_lens"], "cu_seqlens_q": paged["cu_seqlens_q"], "tree_lens": int32([5, 3])}
    return Call(pt.attention_plan, {**lens, **sizes})


@valid_call
def merge_states() -> Call:
    out, lse = torch.randn(2, 8, 4, 64).bfloat16(), torch.randn(2, 8, 4)
    return Call(pt.merge_states, {"out_a": out[0], "lse_a": lse[0], "out_b": out[1], "lse_b": lse[1]})


@valid_call
def explain() -> Call:
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 4, "kv_bytes": 2, "max_seqlen_q": 5}
    return Call(pt.explain, {"query_lens": [5, 3], "seq_lens": [90, 70], **sizes, "num_sms": 8}, is_for_host=True)


@valid_call
def explain_latent() -> Call:
    sizes = {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "latent": True}
    return Call(pt.explain, {**explain().arguments, **sizes}, is_for_host=True)


@valid_call
def choose_tree() -> Call:
    bounds = {"max_nodes": 9, "max_depth": 4, "level_cost": 0.1}
    arguments = {"acceptance": [[0.6, 0.2], [0.5, 0.1]], "step_cost": lambda nodes: 1.0 + 0.1 * nodes, **bounds}
    return Call(pt.choose_tree, arguments, fixed=("max_nodes",), is_for_host=True)


@valid_call
def batch_of_trees() -> Call:
    trees = [pt.DraftTree([-1, 0, 0]), pt.DraftTree([-1])]
    arguments = {"trees": trees, "max_nodes": 4, "max_depth": 2, "capacity": 8}
    return Call(pt.TreeBatch.from_trees, arguments, is_for_host=True)


@valid_call
def copy_of_a_batch() -> Call:
    batches = {"trees": draft_trees(), "other": draft_trees()}
    return Call(lambda trees, other: trees.copy_(other), batches, written=("trees",), receiver="trees")


@valid_call
def part_of_a_batch() -> Call:
    parts = {"trees": draft_trees(), "start": 1, "length": 1}
    return Call(lambda trees, start, length: trees.narrow(start, length), parts, receiver="trees", is_for_host=True)


@valid_call
def mask_words() -> Call:
    return Call(pt.mask_words, {"mask": torch.rand(6, 6) < 0.5, "cu_nodes": int32([0, 4, 6]), "max_nodes": 4})


@valid_call
def mask_words_of_biases() -> Call:
    return Call(pt.mask_words, {"mask": torch.zeros(5, 40)})


@valid_call
def build_trees() -> Call:
    parents = int32([-1, 0, 0, 1, -1, 0, -1])
    return Call(pt.build_trees, {"parents": parents, "cu_nodes": int32([0, 4, 6]), "max_nodes": 5, "max_depth": 3})


@valid_call
def append_kv() -> Call:
    caches, rows = torch.zeros(2, 6, 4, 2, 16), torch.randn(2, 5, 2, 16)
    arguments = {"k": rows[0], "v": rows[1], "k_cache": caches[0], "v_cache": caches[1]}
    return Call(pt.append_kv, arguments | {"slots": int64([0, 7, -1, 23, 9])}, written=("k_cache", "v_cache"))


@valid_call
def append_kv_fp8() -> Call:
    caches, rows = torch.zeros(2, 6, 4, 2, 16).to(torch.float8_e4m3fn), torch.randn(2, 5, 2, 16).bfloat16()
    arguments = {"k": rows[0], "v": rows[1], "k_cache": caches[0], "v_cache": caches[1]}
    arguments |= {"slots": int64([0, 7, -1, 23, 9]), "k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
    return Call(pt.append_kv, arguments, written=("k_cache", "v_cache"))


@valid_call
def append_kv_of_two_widths() -> Call:
    sides = {"k": torch.randn(5, 2, 24), "v": torch.randn(5, 2, 16)}
    caches = {"k_cache": torch.zeros(6, 4, 2, 24), "v_cache": torch.zeros(6, 4, 2, 16)}
    return Call(pt.append_kv, {**sides, **caches, "slots": int64([0, 7, -1, 23, 9])}, written=("k_cache", "v_cache"))


@valid_call
def append_kv_latent() -> Call:
    arguments = {"k": torch.randn(5, 1, 576), "v": None, "k_cache": torch.zeros(6, 4, 1, 576), "v_cache": None}
    return Call(pt.append_kv, arguments | {"slots": int64([0, 7, -1, 23, 9])}, written=("k_cache", "v_cache"))


@valid_call
def rope_append() -> Call:
    """Has all arguments."""
    rows = torch.randn(5, 8, 16).bfloat16()  # one projection's columns
    caches = torch.zeros(2, 6, 4, 2, 16).to(torch.float8_e4m3fn)
    arguments = {
        "q": rows[:, :4], "k": rows[:, 4:6], "v": rows[:, 6:], "positions": int64([7, 0, 3, 3, 8]),
        "cos_sin": torch.randn(9, 8), "k_cache": caches[0], "v_cache": caches[1], "slots": int64([0, 7, -1, 23, 9]),
        "interleaved": True, "rotary_start": 6, "q_out": torch.zeros(5, 4, 16).bfloat16(),
        "k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0, 0.25]),
    }  # fmt: skip
    return Call(pt.rope_append, arguments, written=("q_out", "k_cache", "v_cache"))


@valid_call
def rope_append_latent() -> Call:
    """Has the fewest arguments."""
    arguments = {
        "q": torch.randn(5, 3, 24), "k": torch.randn(5, 1, 24), "v": None, "positions": int64([7, 0, 3, 3, 8]),
        "cos_sin": torch.randn(9, 24), "k_cache": torch.zeros(6, 4, 1, 24), "v_cache": None,
        "slots": int64([0, 7, -1, 23, 9]),
    }  # fmt: skip
    return Call(pt.rope_append, arguments, written=("k_cache",))


@valid_call
def compact_kv() -> Call:
    caches = [*torch.randn(3, 6, 4, 16), torch.randn(6, 4, 1, 576)]
    path = {"accept_index": int32([[0, 2, 4], [0, 2, -1]]), "num_accepted": int32([2, 1])}
    arguments = {"caches": caches, "page_table": paged_cache()["page_table"], "start": int32([4, 3]), **path}
    return Call(pt.compact_kv, arguments, written=("caches",))


@valid_call
def prepare_step() -> Call:
    arguments = {"trees": draft_trees(), "page_table": paged_cache()["page_table"], "start": int32([4, 3])}
    return Call(pt.prepare_step, {**arguments, "page_size": 4, "total_q": 8})


def commit_arguments(device: torch.device | str) -> dict[str, Any]:
    return {
        "verdict": pt.Verdict(int32([[0, 2]], device), int32([1], device), int64([[5, 6]], device), int32([0], device)),
        "trees": pt.TreeBatch.from_trees([pt.DraftTree([-1, 0, 0])], max_nodes=20, device=device),
        "start": int32([4], device),
        "history": torch.zeros((1, 8), dtype=torch.int64, device=device),
        "history_lens": int32([3], device),
    }


@valid_call
def commit() -> Call:
    arguments = commit_arguments("cpu") | {"eos_ids": int64([6]), "node_map": int32([0, 1, 2])}
    arguments |= {"tokens_left": int32([3]), "history_rows": int32([0])}
    arguments["options"] = pt.RequestOptions(output_counts=torch.zeros(1, VOCAB, dtype=torch.int32))
    return Call(pt.commit, arguments, written=("history", "history_lens", "options"))


@valid_call
def token_logprobs() -> Call:
    arguments = {
        "logits": torch.randn(4, VOCAB), "tokens": int64([3, 39]), "rows": int32([0, 3]), "params": _penalised(),
        "options": _options(), "top_n": 3,
    }  # fmt: skip
    return Call(pt.token_logprobs, arguments)


@valid_call
def sample() -> Call:
    arguments = {"logits": torch.randn(2, VOCAB), "params": _penalised(), "seeds": _words(2), "positions": _words(2)}
    return Call(pt.sample, arguments | {"grammar_mask": torch.rand(2, VOCAB) < 0.8, "options": _options()})


@valid_call
def verify_rejection() -> Call:
    coins = {"coins": torch.rand(8), "final_coins": torch.rand(2)}
    return Call(pt.verify_rejection, {**_drafted(), **coins, "draft_params": _params()})


@valid_call
def verify_block() -> Call:
    trees = pt.TreeBatch.from_trees([pt.DraftTree.chain(4), pt.DraftTree.chain(2)])
    return Call(pt.verify_block, {**_drafted(), "trees": trees, "draft_law": "iid"})


@valid_call
def start_draft() -> Call:
    arguments = {"root_tokens": int64([3, 4]), "max_kv_nodes": 4, "active": torch.tensor([True, False])}
    return Call(pt.start_draft, arguments, fixed=("max_kv_nodes",))


@valid_call
def expand_tree() -> Call:
    arguments = {"state": _state(1), "logits": torch.randn(4, VOCAB), "num_children": 2, "num_frontier": 2}
    return Call(pt.expand_tree, arguments)


@valid_call
def expand_tree_by_draws() -> Call:
    state = pt.start_draft(int64([3, 4]), max_kv_nodes=7)
    arguments = {"state": state, "logits": torch.randn(2, VOCAB), "num_children": 2, "num_frontier": 2}
    arguments |= {"law": "swor", "params": _params(), "seeds": _words(2), "positions": _words(2)}
    return Call(pt.expand_tree, arguments)


@valid_call
def ngram_propose() -> Call:
    history = {"history": torch.randint(3, (3, 30)), "history_lens": int32([12, 7, 30]), "history_rows": int32([2, 0])}
    bounds = {"max_nodes": 9, "max_depth": 4, "min_ngram": 1, "max_ngram": 3, "max_branches": 3}
    tensors = {"extra": torch.randint(3, (2, 20)), "active": torch.tensor([True, True])}
    return Call(pt.ngram_propose, {**history, **bounds, **tensors})


@valid_call
def medusa_propose() -> Call:
    tree = pt.DraftTree.from_paths([[0], [1], [0, 0]])
    arguments = {"head_logits": torch.randn(2, 3, VOCAB), "tree": tree, "root_tokens": int64([3, 4])}
    return Call(pt.medusa_propose, arguments | {"active": torch.tensor([True, True])})


@valid_call
def decoy_propose() -> Call:
    arguments = {"texts": torch.randint(VOCAB, (2, 9)), "lengths": int32([3, 7]), "max_nodes": 9, "max_depth": 4}
    tensors = {"root_tokens": int64([3, 4]), "active": torch.tensor([True, True])}
    return Call(testing.decoy_propose, arguments | tensors, is_for_host=True)


@valid_call
def best_first_tree() -> Call:
    arguments = {"log_probs": torch.randn(2, 3, 4), "tokens": torch.randint(VOCAB, (2, 3, 4))}
    return Call(
        pt.best_first_tree, arguments | {"root_tokens": int64([3, 4]), "num_nodes": 7, "return_log_probs": True}
    )


@valid_call
def select_nodes() -> Call:
    arguments = {"trees": draft_trees(), "survival": torch.rand(8), "budget": 5, "limit": int32([4])}
    return Call(pt.select_nodes, arguments)


@valid_call
def rejected_predictions() -> Call:
    drafts, predictions = torch.randint(VOCAB, (2, 8))
    arguments = {"trees": draft_trees(), "draft_tokens": drafts, "predictions": predictions, "context": 2}
    return Call(pt.drafting.rejected_predictions, arguments | {"accept_index": int32([[0, 1, 3], [0, -1, -1]])})


valid_calls(
    tree_attention_without_lse=lambda: Call(pt.tree_attention, _attention() | {"return_lse": False}),
    expected_tokens=lambda: Call(
        pt.expected_tokens, {"tree": pt.DraftTree([-1, 0, 0, 1]), "acceptance": [0.6, 0.2]}, is_for_host=True
    ),
    tree_of_parents=lambda: Call(pt.DraftTree.from_parents, {"parents": [-1, 0, 0, 1]}, is_for_host=True),
    tree_of_paths=lambda: Call(pt.DraftTree.from_paths, {"paths": [[0], [1], [0, 2]]}, is_for_host=True),
    tree_of_a_chain=lambda: Call(pt.DraftTree.chain, {"num_draft_tokens": 3}, is_for_host=True),
    full_tree=lambda: Call(pt.DraftTree.full, {"branching": [3, 2, 1]}, is_for_host=True),
    one_tree_of_a_batch=lambda: Call(
        lambda trees, b: trees.tree(b), {"trees": draft_trees(), "b": 1}, receiver="trees", is_for_host=True
    ),
    joined_batches=lambda: Call(
        pt.TreeBatch.concatenate, {"batches": [draft_trees(), draft_trees()]}, is_for_host=True
    ),
    slot_mapping=lambda: Call(pt.slot_mapping, {**paged_cache(), "page_size": 4, "total_q": 8}),
    request_options_of_lists=lambda: Call(pt.RequestOptions.from_lists, {"vocab": VOCAB, **_lists()}, is_for_host=True),
    token_logprobs_of_all_rows=lambda: Call(
        pt.token_logprobs, {"logits": torch.randn(2, VOCAB), "tokens": int64([3, 39])}
    ),
    verify_greedy=lambda: Call(pt.verify_greedy, _verification()),
    verify_sampled=lambda: Call(pt.verify_sampled, _sampled()),
    verify_tokens=lambda: Call(
        pt.verify_tokens,
        {name: value for name, value in _verification().items() if name not in ("logits", "grammar_mask")}
        | {"tokens": torch.randint(VOCAB, (8,))},
    ),
    verify_a_draft=lambda: Call(pt.verify_rejection, with_draft(_drafted())),
    verify_traversal=lambda: Call(pt.verify_traversal, {**_drafted(), "draft_law": "iid"}),
    verify_typical=lambda: Call(pt.verify_typical, _verification(params=_params(), epsilon=0.1, delta=0.3)),
    rerank_tree=lambda: Call(
        pt.rerank_tree, {"state": _state(2), "num_nodes": 5, "active": torch.tensor([True, True])}
    ),
    select_fewer_nodes_than_roots=lambda: Call(
        pt.select_nodes, {"trees": draft_trees(), "survival": torch.rand(8), "budget": 1}
    ),
)


# ---- pagedtree.distributed


def _sharded(function: Callable[..., Any], arguments: dict[str, Any]) -> Call:
    return Call(lambda **given: function(**given, shards=one_rank()), arguments, is_for_host=True)


valid_calls(
    sharded_sample=lambda: _sharded(distributed.sample, sample().arguments),
    sharded_verify_greedy=lambda: _sharded(distributed.verify_greedy, _verification()),
    sharded_verify_sampled=lambda: _sharded(distributed.verify_sampled, _sampled()),
    sharded_verify_rejection=lambda: _sharded(distributed.verify_rejection, _drafted() | {"max_children": 2}),
)
