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
  m.impl("expand_tree", TORCH_BOX(&expand_tree));
  m.impl("rerank_tree", TORCH_BOX(&rerank_tree));
  m.impl("ngram_propose", TORCH_BOX(&ngram_propose));
  m.impl("medusa_propose", TORCH_BOX(&medusa_propose));
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
      "verify_greedy(Tensor logits, Tensor draft_tokens, Tensor cu_nodes, Tensor first_child, Tensor next_sibling,"
      " Tensor valid, SymInt max_nodes, SymInt max_depth, *, Tensor? grammar_mask=None, Tensor? draft_to_target=None)"
      " -> (Tensor accept_index, Tensor num_accepted, Tensor tokens, Tensor status)");
  m.def(
      "verify_sampled(Tensor logits, Tensor draft_tokens, Tensor cu_nodes, Tensor first_child, Tensor next_sibling,"
      " Tensor valid, SymInt max_nodes, SymInt max_depth, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,"
      " str filter_order, *, Tensor seeds, Tensor positions, Tensor? grammar_mask=None, Tensor? draft_to_target=None)"
      " -> (Tensor accept_index, Tensor num_accepted, Tensor tokens, Tensor status)");

  m.def(
      "expand_tree(Tensor tokens, Tensor parents, Tensor scores, Tensor kv_index, Tensor frontier, Tensor mask,"
      " Tensor logits, *, SymInt num_kv, SymInt num_children, SymInt num_frontier)"
      " -> (Tensor tokens, Tensor parents, Tensor scores, Tensor kv_index, Tensor frontier, Tensor mask)");
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
}

STABLE_TORCH_LIBRARY_IMPL(pagedtree, CompositeExplicitAutograd, m) {
  m.impl("_backends", TORCH_BOX(&pagedtree::ops::backends));
  m.impl("_use_backend", TORCH_BOX(&pagedtree::ops::use_backend));
}

STABLE_TORCH_LIBRARY_IMPL(pagedtree, CPU, m) { pagedtree::ops::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(pagedtree, CUDA, m) { pagedtree::ops::implement(m); }
