#include "core/tree.h"
#include "torch/ops.h"
#include "torch/values.h"

namespace pagedtree::ops {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> build_trees(const Tensor& parents, const Tensor& cu_nodes,
                                                               int64_t max_nodes, int64_t max_depth) {
  const Check check("build_trees", parents);
  check.tensor(parents, "parents", {ScalarType::Int}, {"N"});
  const int64_t batch = check.offsets(cu_nodes, "cu_nodes");
  check.that(max_nodes >= 1 && max_nodes <= kMaxTreeNodes, "max_nodes", "in 1..1024", max_nodes);
  check.that(max_depth >= 0 && max_depth < kMaxTreeNodes, "max_depth", "in 0..1023", max_depth);

  const int64_t num_rows = parents.size(0);
  if (value_checks_enabled()) check_offsets(check, host_values<int32_t>(cu_nodes), "cu_nodes", num_rows);
  const int64_t mask_words = ceil_div<int64_t>(max_nodes, kMaskWordBits);
  Tensor depths = empty_on(parents, {num_rows}, ScalarType::Int);
  Tensor first_child = empty_on(parents, {num_rows}, ScalarType::Int);
  Tensor next_sibling = empty_on(parents, {num_rows}, ScalarType::Int);
  Tensor mask = empty_on(parents, {num_rows, mask_words}, ScalarType::Int);
  Tensor valid = empty_on(parents, {batch}, ScalarType::Bool);

  BuildTreesParams params{};
  params.parents = const_pointer<int32_t>(parents);
  params.cu_nodes = const_pointer<int32_t>(cu_nodes);
  params.depths = mutable_pointer<int32_t>(depths);
  params.first_child = mutable_pointer<int32_t>(first_child);
  params.next_sibling = mutable_pointer<int32_t>(next_sibling);
  params.mask = mutable_pointer<int32_t>(mask);
  params.valid = mutable_pointer<bool>(valid);
  params.batch = batch;
  params.num_rows = num_rows;
  params.max_nodes = static_cast<int32_t>(max_nodes);
  params.max_depth = static_cast<int32_t>(max_depth);
  params.mask_words = static_cast<int32_t>(mask_words);
  backend_for(parents).build_trees(params, context_for(parents));
  return {depths, first_child, next_sibling, mask, valid};
}

constexpr Op kOps[] = {
    {"build_trees",
     "(Tensor parents, Tensor cu_nodes, *, SymInt max_nodes, SymInt max_depth)"
     " -> (Tensor depths, Tensor first_child, Tensor next_sibling, Tensor mask, Tensor valid)",
     PT_BOX(&build_trees)},
};

}  // namespace

PT_OPS(kOps)

}  // namespace pagedtree::ops
