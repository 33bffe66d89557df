"""Tree-masked paged attention and tree verification for speculative decoding."""

from pagedtree import testing as testing
from pagedtree.attention import PreparedAttention, attention_plan, merge_states, tree_attention
from pagedtree.choice import choose_tree, expected_tokens
from pagedtree.cost import AttentionCost, AttentionLaunch, explain
from pagedtree.drafting import (
    Draft,
    DraftState,
    best_first_tree,
    expand_tree,
    medusa_propose,
    ngram_propose,
    rejected_predictions,
    rerank_tree,
    select_nodes,
    start_draft,
)
from pagedtree.kv_cache import append_kv, compact_kv, slot_mapping
from pagedtree.logprobs import token_logprobs
from pagedtree.options import RequestOptions
from pagedtree.recurrent import advance_conv, advance_state, tree_conv1d, tree_delta_rule
from pagedtree.sampling import SamplingParams, sample
from pagedtree.step import Commit, commit, prepare_step
from pagedtree.tree import DraftTree, TreeBatch, build_trees
from pagedtree.verify import (
    Verdict,
    verify_block,
    verify_greedy,
    verify_rejection,
    verify_sampled,
    verify_traversal,
    verify_typical,
)

__version__ = "0.2.0"

__all__ = [
    "AttentionCost",
    "AttentionLaunch",
    "Commit",
    "Draft",
    "DraftState",
    "DraftTree",
    "PreparedAttention",
    "RequestOptions",
    "SamplingParams",
    "TreeBatch",
    "Verdict",
    "advance_conv",
    "advance_state",
    "append_kv",
    "attention_plan",
    "best_first_tree",
    "build_trees",
    "choose_tree",
    "commit",
    "compact_kv",
    "expand_tree",
    "expected_tokens",
    "explain",
    "medusa_propose",
    "merge_states",
    "ngram_propose",
    "prepare_step",
    "rejected_predictions",
    "rerank_tree",
    "sample",
    "select_nodes",
    "slot_mapping",
    "start_draft",
    "token_logprobs",
    "tree_attention",
    "tree_conv1d",
    "tree_delta_rule",
    "verify_block",
    "verify_greedy",
    "verify_rejection",
    "verify_sampled",
    "verify_traversal",
    "verify_typical",
]
