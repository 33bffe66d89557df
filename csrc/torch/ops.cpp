// Schemas, once, and one implementation block a device: the host functions are device-neutral and ask the tensors.
#include "torch/ops.h"

#include <torch/csrc/stable/library.h>

namespace pagedtree::ops {
namespace {

template <typename Library>
void implement(Library& m) {
  m.impl("build_trees", TORCH_BOX(&build_trees));
  m.impl("sample", TORCH_BOX(&sample));
  m.impl("verify_greedy", TORCH_BOX(&verify_greedy));
  m.impl("verify_sampled", TORCH_BOX(&verify_sampled));
  m.impl("verify_rejection", TORCH_BOX(&verify_by_ratio<&Backend::verify_rejection>));
  m.impl("verify_block", TORCH_BOX(&verify_by_ratio<&Backend::verify_block>));
  m.impl("verify_traversal", TORCH_BOX(&verify_by_ratio<&Backend::verify_traversal>));
  m.impl("verify_typical", TORCH_BOX(&verify_typical));
  m.impl("step_shards", TORCH_BOX(&step_shards));
  m.impl("follow_shards", TORCH_BOX(&follow_shards));
  m.impl("weigh_shards", TORCH_BOX(&weigh_shards));
  m.impl("walk_shards", TORCH_BOX(&walk_shards));
  m.impl("expand_tree", TORCH_BOX(&expand_tree));
  m.impl("rerank_tree", TORCH_BOX(&rerank_tree));
  m.impl("ngram_propose", TORCH_BOX(&ngram_propose));
  m.impl("medusa_propose", TORCH_BOX(&medusa_propose));
  m.impl("slot_mapping", TORCH_BOX(&slot_mapping));
  m.impl("append_kv", TORCH_BOX(&append_kv));
  m.impl("compact_kv", TORCH_BOX(&compact_kv));
  m.impl("prepare_step", TORCH_BOX(&prepare_step));
  m.impl("commit", TORCH_BOX(&commit));
  m.impl("tree_attention", TORCH_BOX(&tree_attention));
  m.impl("tree_attention.out", TORCH_BOX(&tree_attention_out));
  m.impl("attention_plan", TORCH_BOX(&attention_plan));
  m.impl("merge_states", TORCH_BOX(&merge_states));
}

}  // namespace
}  // namespace pagedtree::ops

STABLE_TORCH_LIBRARY(pagedtree, m) {
  m.def("_backends() -> str");
  m.def("_use_backend(str name) -> str");

  m.def(
      "build_trees(Tensor parents, Tensor cu_nodes, *, SymInt max_nodes, SymInt max_depth)"
      " -> (Tensor depths, Tensor first_child, Tensor next_sibling, Tensor mask, Tensor valid)");

  m.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, str filter_order, *,"
      " Tensor seeds, Tensor positions) -> Tensor");

  m.def(
      "verify_greedy(Tensor logits, Tensor draft_tokens, Tensor cu_nodes, Tensor depths, Tensor first_child, Tensor "
      "next_sibling,"
      " Tensor valid, SymInt max_nodes, SymInt max_depth, *, Tensor? grammar_mask=None, Tensor? draft_to_target=None)"
      " -> (Tensor accept_index, Tensor num_accepted, Tensor tokens, Tensor status)");
  m.def(
      "verify_sampled(Tensor logits, Tensor draft_tokens, Tensor cu_nodes, Tensor depths, Tensor first_child, Tensor "
      "next_sibling,"
      " Tensor valid, SymInt max_nodes, SymInt max_depth, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,"
      " str filter_order, *, Tensor seeds, Tensor positions, Tensor? grammar_mask=None, Tensor? draft_to_target=None)"
      " -> (Tensor accept_index, Tensor num_accepted, Tensor tokens, Tensor status)");

#define PT_RATIO_RULE                                                                                                \
  "(Tensor logits, Tensor draft_tokens, Tensor cu_nodes, Tensor depths, Tensor first_child, Tensor next_sibling,"    \
  " Tensor valid, SymInt max_nodes, SymInt max_depth, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p," \
  " str filter_order, *, str draft_law, Tensor? draft_probs=None, Tensor? draft_rows=None, Tensor seeds,"            \
  " Tensor positions, Tensor? coins=None, Tensor? final_coins=None, Tensor? grammar_mask=None,"                      \
  " Tensor? draft_to_target=None, Tensor? draft_temperature=None, Tensor? draft_top_k=None,"                         \
  " Tensor? draft_top_p=None, Tensor? draft_min_p=None, str draft_filter_order=\"top_k_first\")"                     \
  " -> (Tensor accept_index, Tensor num_accepted, Tensor tokens, Tensor status)"
  m.def("verify_rejection" PT_RATIO_RULE);
  m.def("verify_block" PT_RATIO_RULE);
  m.def("verify_traversal" PT_RATIO_RULE);
#undef PT_RATIO_RULE
  m.def(
      "verify_typical(Tensor logits, Tensor draft_tokens, Tensor cu_nodes, Tensor depths, Tensor first_child, Tensor "
      "next_sibling,"
      " Tensor valid, SymInt max_nodes, SymInt max_depth, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,"
      " str filter_order, *, float epsilon=0.09, float delta=0.3, Tensor? grammar_mask=None,"
      " Tensor? draft_to_target=None)"
      " -> (Tensor accept_index, Tensor num_accepted, Tensor tokens, Tensor status)");

#define PT_TREES                                                                                                \
  "Tensor draft_tokens, Tensor cu_nodes, Tensor depths, Tensor first_child, Tensor next_sibling, Tensor valid," \
  " SymInt max_nodes, SymInt max_depth"
#define PT_SAMPLING "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, str filter_order"
  m.def("_shard_words() -> str");
  m.def("step_shards(Tensor logits, Tensor(a!) rows, Tensor? received, Tensor(b!) words, " PT_SAMPLING
        ", *, SymInt round, SymInt digit, SymInt last, SymInt rank, SymInt num_ranks, SymInt first_token, SymInt vocab,"
        " Tensor? cu_nodes=None, Tensor? depths=None, Tensor? seeds=None, Tensor? positions=None,"
        " Tensor? grammar_mask=None) -> ()");
  m.def("follow_shards(Tensor rows, Tensor received, " PT_TREES
        ", *, SymInt last, SymInt vocab, Tensor? draft_to_target=None)"
        " -> (Tensor accept_index, Tensor num_accepted, Tensor tokens, Tensor status)");
  m.def(
      "weigh_shards(Tensor logits, Tensor(a!) rows, Tensor(b!) left, Tensor? ends, Tensor? received,"
      " Tensor(c!) words, " PT_TREES ", " PT_SAMPLING
      ", *, SymInt round, SymInt index, SymInt rank, SymInt num_ranks, SymInt first_token, SymInt vocab, str draft_law,"
      " Tensor? draft_probs=None, Tensor? draft_rows=None, Tensor? grammar_mask=None, Tensor? draft_to_target=None)"
      " -> ()");
  m.def("walk_shards(Tensor(a!) rows, Tensor(b!) left, Tensor masses, Tensor received, " PT_TREES
        ", *, SymInt index, SymInt vocab, str draft_law, Tensor seeds, Tensor positions, Tensor? coins=None,"
        " Tensor? final_coins=None, Tensor? draft_to_target=None)"
        " -> (Tensor accept_index, Tensor num_accepted, Tensor tokens, Tensor status, Tensor ends)");
#undef PT_TREES
#undef PT_SAMPLING

  m.def(
      "expand_tree(Tensor tokens, Tensor parents, Tensor scores, Tensor kv_index, Tensor frontier, Tensor mask,"
      " Tensor logits, *, SymInt level, SymInt num_kv, SymInt num_children, SymInt num_frontier, str law=\"topk\","
      " Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None,"
      " str filter_order=\"top_k_first\", Tensor? seeds=None, Tensor? positions=None)"
      " -> (Tensor tokens, Tensor parents, Tensor scores, Tensor kv_index, Tensor frontier, Tensor mask,"
      " Tensor draft_probs)");
  m.def(
      "rerank_tree(Tensor tokens, Tensor parents, Tensor scores, Tensor kv_index, *, SymInt num_nodes, bool by_score,"
      " Tensor? active=None) -> (Tensor draft_tokens, Tensor parents, Tensor cu_nodes, Tensor node_map)");
  m.def(
      "ngram_propose(Tensor history, Tensor history_lens, *, SymInt max_nodes, SymInt max_depth, SymInt min_ngram=1,"
      " SymInt max_ngram=4, SymInt max_branches=8, Tensor? extra=None, Tensor? active=None)"
      " -> (Tensor draft_tokens, Tensor parents, Tensor cu_nodes)");
  m.def(
      "medusa_propose(Tensor head_logits, Tensor parents, Tensor depths, Tensor child_ranks, *, SymInt num_top,"
      " Tensor? root_tokens=None, Tensor? active=None) -> (Tensor draft_tokens, Tensor parents, Tensor cu_nodes)");

  m.def(
      "slot_mapping(Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, SymInt page_size, *, SymInt total_q)"
      " -> Tensor");
  m.def(
      "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, *, Tensor? k_scale=None,"
      " Tensor? v_scale=None) -> ()");
  m.def(
      "compact_kv(Tensor(a!)[] caches, Tensor page_table, Tensor start, Tensor accept_index, Tensor num_accepted)"
      " -> Tensor");
  m.def(
      "prepare_step(Tensor cu_nodes, Tensor depths, Tensor page_table, Tensor start, SymInt page_size, *,"
      " SymInt total_q) -> (Tensor positions, Tensor seq_lens, Tensor cu_seqlens_q, Tensor slots)");
  m.def(
      "commit(Tensor accept_index, Tensor num_accepted, Tensor tokens, Tensor cu_nodes, Tensor start, *,"
      " Tensor(a!)? history=None, Tensor(b!)? history_lens=None, Tensor? eos_ids=None, Tensor? node_map=None)"
      " -> (Tensor new_start, Tensor last_token, Tensor finished, Tensor new_num_accepted, Tensor num_tokens,"
      " Tensor accept_rows, Tensor draft_accept_index, Tensor draft_num_accepted, Tensor draft_missing,"
      " Tensor draft_num_missing)");
#define PT_TREE_ATTENTION_ARGUMENTS                                                                      \
  "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q,"   \
  " Tensor? tree_mask=None, *, Tensor? tree_lens=None, SymInt? max_seqlen_q=None, float? scale=None,"    \
  " float softcap=0.0, SymInt window=0, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None," \
  " Tensor? plan=None"
  m.def("tree_attention(" PT_TREE_ATTENTION_ARGUMENTS ") -> (Tensor out, Tensor lse)");
  m.def("tree_attention.out(" PT_TREE_ATTENTION_ARGUMENTS ", Tensor(a!) out, Tensor(b!)? lse=None) -> ()");
#undef PT_TREE_ATTENTION_ARGUMENTS
  m.def(
      "attention_plan(Tensor seq_lens, Tensor cu_seqlens_q, *, SymInt num_q_heads, SymInt num_kv_heads,"
      " SymInt head_dim, SymInt page_size, SymInt max_seqlen_q, Tensor? tree_lens=None) -> Tensor");
  m.def("merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(pagedtree, CompositeExplicitAutograd, m) {
  m.impl("_backends", TORCH_BOX(&pagedtree::ops::backends));
  m.impl("_use_backend", TORCH_BOX(&pagedtree::ops::use_backend));
  m.impl("_shard_words", TORCH_BOX(&pagedtree::ops::shard_words));
}

STABLE_TORCH_LIBRARY_IMPL(pagedtree, CPU, m) { pagedtree::ops::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(pagedtree, CUDA, m) { pagedtree::ops::implement(m); }
