// Schemas, once, and one implementation block a device: the host functions are device-neutral and ask the tensors.
#include "torch/ops.h"

#include <torch/csrc/stable/library.h>

namespace pagedtree::ops {
namespace {

template <typename Library>
void implement(Library& m) {
  m.impl("build_trees", TORCH_BOX(&build_trees));
}

}  // namespace
}  // namespace pagedtree::ops

STABLE_TORCH_LIBRARY(pagedtree, m) {
  m.def("_backends() -> str");
  m.def("_use_backend(str name) -> str");

  m.def(
      "build_trees(Tensor parents, Tensor cu_nodes, *, SymInt max_nodes, SymInt max_depth)"
      " -> (Tensor depths, Tensor first_child, Tensor next_sibling, Tensor mask, Tensor valid)");
}

STABLE_TORCH_LIBRARY_IMPL(pagedtree, CompositeExplicitAutograd, m) {
  m.impl("_backends", TORCH_BOX(&pagedtree::ops::backends));
  m.impl("_use_backend", TORCH_BOX(&pagedtree::ops::use_backend));
}

STABLE_TORCH_LIBRARY_IMPL(pagedtree, CPU, m) { pagedtree::ops::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(pagedtree, CUDA, m) { pagedtree::ops::implement(m); }
