// Registers a family's ops with Torch. A host function checks its arguments, fills the params and calls the tensors'
// backend.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "torch/boxing.h"
#include "torch/check.h"
#include "torch/dispatch.h"

namespace pagedtree::ops {

struct Op {
  const char* name;
  const char* arguments;  // and results: the schema after the name
  void (*host)(StableIValue*, uint64_t, uint64_t);
};

template <typename Library, size_t kCount>
void define(Library& m, const Op (&ops)[kCount]) {
  for (const Op& op : ops) m.def((std::string(op.name) + op.arguments).c_str());
}

template <typename Library, size_t kCount>
void implement(Library& m, const Op (&ops)[kCount]) {
  for (const Op& op : ops) m.impl(op.name, op.host);
}

}  // namespace pagedtree::ops

#define PT_OPS(ops)                                                   \
  STABLE_TORCH_LIBRARY_FRAGMENT(pagedtree, m) { define(m, ops); }     \
  STABLE_TORCH_LIBRARY_IMPL(pagedtree, CPU, m) { implement(m, ops); } \
  STABLE_TORCH_LIBRARY_IMPL(pagedtree, CUDA, m) { implement(m, ops); }

#define PT_OPS_WITHOUT_TENSORS(ops)                               \
  STABLE_TORCH_LIBRARY_FRAGMENT(pagedtree, m) { define(m, ops); } \
  STABLE_TORCH_LIBRARY_IMPL(pagedtree, CompositeExplicitAutograd, m) { implement(m, ops); }
