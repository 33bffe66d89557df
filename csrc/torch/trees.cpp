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
  TreeOutput& trees = params.trees;
  trees.mask_words = static_cast<int32_t>(ceil_div<int64_t>(max_nodes, kMaskWordBits));
  Tensor depths = made(parents, {num_rows}, trees.depths);
  Tensor first_child = made(parents, {num_rows}, trees.first_child);
  Tensor next_sibling = made(parents, {num_rows}, trees.next_sibling);
  Tensor mask = made(parents, {num_rows, trees.mask_words}, trees.mask);
  Tensor valid = made(parents, {params.batch}, trees.valid);

  params.num_rows = num_rows;
  backend_for(parents).build_trees(params, context_for(parents));
  return {depths, first_child, next_sibling, mask, valid};
}

// Checks, under PAGEDTREE_CHECK, that all nodes fit and biases are 0 or hide, since bits express nothing else.
void check_mask(const Check& check, const Tensor& mask, MaskWordsParams p, const OptionalTensor& cu_nodes) {
  const Tensor host = host_copy(mask);
  p.mask = host.const_data_ptr();
  set_strides(host, p.row_stride, p.column_stride);
  std::vector<int32_t> offsets;
  if (cu_nodes.has_value()) {
    offsets = host_values<int32_t>(*cu_nodes);
    check_offsets(check, offsets, "cu_nodes", p.num_rows);
    p.cu_nodes = offsets.data();
  }
  for (int64_t row = 0; row < p.num_rows; ++row) {
    const NodeRange columns = columns_of(p, row);
    check.that(columns.size() <= p.max_nodes, "max_nodes",
               "at least the " + std::to_string(columns.size()) + " nodes of a tree", p.max_nodes);
    for (int64_t j = columns.begin; j < columns.end && !p.is_bool; ++j) {
      const float bias = bias_at(p, row * p.row_stride + j * p.column_stride);
      check.that(bias == 0.0f || !shows(p, bias), "mask[" + std::to_string(row) + ", " + std::to_string(j) + "]",
                 "0 or at most -10000, as bits have no other bias", bias);
    }
  }
}

Tensor mask_words(const Tensor& mask, const OptionalTensor& cu_nodes, const std::optional<int64_t>& max_nodes) {
  const Check check("mask_words", mask);
  MaskWordsParams params{};
  check.tensor(mask, "mask", {ScalarType::Bool, ScalarType::Float, ScalarType::Half, ScalarType::BFloat16},
               {"T", cu_nodes.has_value() ? "T" : "M"}, Strides::kAny);
  const int64_t num_rows = mask.size(0);
  int64_t nodes = mask.size(1);
  if (cu_nodes.has_value()) {
    check.that(nodes == num_rows, "mask", "shape [T, T] with cu_nodes", Check::text(mask.sizes()));
    params.batch = check.offsets(*cu_nodes, "cu_nodes", params.cu_nodes);
    nodes = check.in(max_nodes.value_or(max_of<int64_t>(nodes, 1)), "max_nodes", 1, max_of<int64_t>(nodes, 65536));
  } else {
    check.that(!max_nodes.has_value(), "max_nodes", "None without cu_nodes", max_nodes.value_or(0));
  }
  params.mask = mask.const_data_ptr();
  params.is_bool = mask.scalar_type() == ScalarType::Bool;
  params.dtype = core_dtype(mask);
  set_strides(mask, params.row_stride, params.column_stride);
  params.num_rows = num_rows;
  params.max_nodes = check.in(nodes, "mask", 0, INT32_MAX);
  const int64_t num_words = max_of<int64_t>(ceil_div<int64_t>(nodes, kMaskWordBits), 1);
  params.num_words = static_cast<int32_t>(num_words);
  if (value_checks_enabled()) check_mask(check, mask, params, cu_nodes);
  Tensor words = made(mask, {num_rows, num_words}, params.words);
  backend_for(mask).mask_words(params, context_for(mask));
  return words;
}

constexpr Op kOps[] = {
    {"mask_words", "(Tensor mask, Tensor? cu_nodes=None, *, SymInt? max_nodes=None) -> Tensor", PT_BOX(&mask_words)},
    {"build_trees",
     "(Tensor parents, Tensor cu_nodes, *, SymInt max_nodes, SymInt max_depth)"
     " -> (Tensor depths, Tensor first_child, Tensor next_sibling, Tensor mask, Tensor valid)",
     PT_BOX(&build_trees)},
};

}  // namespace

PT_OPS(kOps)

}  // namespace pagedtree::ops
