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
}

STABLE_TORCH_LIBRARY_IMPL(pagedtree, CompositeExplicitAutograd, m) {
  m.impl("_backends", TORCH_BOX(&pagedtree::ops::backends));
  m.impl("_use_backend", TORCH_BOX(&pagedtree::ops::use_backend));
}

STABLE_TORCH_LIBRARY_IMPL(pagedtree, CPU, m) { pagedtree::ops::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(pagedtree, CUDA, m) { pagedtree::ops::implement(m); }
