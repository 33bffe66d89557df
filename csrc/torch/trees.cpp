#include "core/tree.h"
#include "torch/ops.h"
#include "torch/values.h"

namespace pagedtree::ops {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> build_trees(const Tensor& parents, const Tensor& cu_nodes,
                                                               int64_t max_nodes, int64_t max_depth) {
  const Check check("build_trees", parents);
  BuildTreesParams params{};
  params.parents = check.read<int32_t>(parents, "parents", {"N"});
  params.batch = check.offsets(cu_nodes, "cu_nodes", params.cu_nodes);
  params.max_nodes = check.in(max_nodes, "max_nodes", 1, kMaxTreeNodes);
  params.max_depth = check.in(max_depth, "max_depth", 0, kMaxTreeNodes - 1);

  const int64_t num_rows = parents.size(0);
  if (value_checks_enabled()) check_offsets(check, host_values<int32_t>(cu_nodes), "cu_nodes", num_rows);
  const int64_t mask_words = ceil_div<int64_t>(max_nodes, kMaskWordBits);
  Tensor depths = made(parents, {num_rows}, params.depths);
  Tensor first_child = made(parents, {num_rows}, params.first_child);
  Tensor next_sibling = made(parents, {num_rows}, params.next_sibling);
  Tensor mask = made(parents, {num_rows, mask_words}, params.mask);
  Tensor valid = made(parents, {params.batch}, params.valid);

  params.num_rows = num_rows;
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
