#include "torch/ops.h"
#include "torch/sampling.h"
#include "torch/values.h"

namespace pagedtree::ops {
namespace {

// int32 or int64 ids in one dimension.
TokenIds token_ids(const Check& check, const Tensor& ids, const std::string& name, int64_t size) {
  check.tensor(ids, name, {ScalarType::Int, ScalarType::Long}, {size});
  return {ids.const_data_ptr(), ids.scalar_type() == ScalarType::Long};
}

// What every rule needs but its law: logits, drafts, trees.
VerifyParams tree_params(const Check& check, const Tensor& logits, const Tensor& draft_tokens, const Tensor& cu_nodes,
                         const Tensor& depths, const Tensor& first_child, const Tensor& next_sibling,
                         const Tensor& valid, int64_t max_nodes, int64_t max_depth,
                         const std::optional<Tensor>& grammar_mask, const std::optional<Tensor>& draft_to_target) {
  VerifyParams params{};
  params.logits = logits_params(check, logits);
  add_grammar_mask(check, grammar_mask, params.logits);
  const int64_t rows = params.logits.num_rows;
  params.draft_tokens = token_ids(check, draft_tokens, "draft_tokens", rows);
  if (draft_to_target.has_value()) {
    params.draft_to_target = token_ids(check, *draft_to_target, "draft_to_target", kAnySize);
    params.draft_vocab = draft_to_target->size(0);
  }
  params.batch = check.offsets(cu_nodes, "cu_nodes");
  check.tensor(depths, "depths", {ScalarType::Int}, {rows});
  check.tensor(first_child, "first_child", {ScalarType::Int}, {rows});
  check.tensor(next_sibling, "next_sibling", {ScalarType::Int}, {rows});
  check.tensor(valid, "valid", {ScalarType::Bool}, {params.batch});
  check.that(max_nodes >= 1 && max_nodes <= kMaxTreeNodes, "max_nodes", "in 1..1024", max_nodes);
  check.that(max_depth >= 0 && max_depth < kMaxTreeNodes, "max_depth", "in 0..1023", max_depth);
  if (value_checks_enabled()) check_offsets(check, host_values<int32_t>(cu_nodes), "cu_nodes", rows);
  params.cu_nodes = const_pointer<int32_t>(cu_nodes);
  params.depths = const_pointer<int32_t>(depths);
  params.first_child = const_pointer<int32_t>(first_child);
  params.next_sibling = const_pointer<int32_t>(next_sibling);
  params.valid = const_pointer<bool>(valid);
  params.max_nodes = static_cast<int32_t>(max_nodes);
  params.max_depth = static_cast<int32_t>(max_depth);
  return params;
}

VerdictTensors run(const Tensor& logits, VerifyParams& params) {
  const int64_t width = params.max_depth + 1;
  Tensor accept_index = empty_on(logits, {params.batch, width}, ScalarType::Int);
  Tensor num_accepted = empty_on(logits, {params.batch}, ScalarType::Int);
  Tensor tokens = empty_on(logits, {params.batch, width}, ScalarType::Long);
  Tensor status = empty_on(logits, {params.batch}, ScalarType::Int);
  params.accept_index = mutable_pointer<int32_t>(accept_index);
  params.num_accepted = mutable_pointer<int32_t>(num_accepted);
  params.tokens = mutable_pointer<int64_t>(tokens);
  params.status = mutable_pointer<int32_t>(status);
  static_assert(sizeof(DrawnRow) % sizeof(int64_t) == 0);
  constexpr int64_t kWords = sizeof(DrawnRow) / sizeof(int64_t);
  Tensor drawn_rows = empty_on(logits, {params.logits.num_rows, kWords}, ScalarType::Long);
  params.drawn_rows = static_cast<DrawnRow*>(drawn_rows.mutable_data_ptr());
  backend_for(logits, "verify_sampled").verify_sampled(params, context_for(logits));
  return {accept_index, num_accepted, tokens, status};
}

}  // namespace

VerdictTensors verify_greedy(const Tensor& logits, const Tensor& draft_tokens, const Tensor& cu_nodes,
                             const Tensor& depths, const Tensor& first_child, const Tensor& next_sibling,
                             const Tensor& valid, int64_t max_nodes, int64_t max_depth,
                             const std::optional<Tensor>& grammar_mask, const std::optional<Tensor>& draft_to_target) {
  const Check check("verify_greedy", logits);
  VerifyParams params = tree_params(check, logits, draft_tokens, cu_nodes, depths, first_child, next_sibling, valid,
                                    max_nodes, max_depth, grammar_mask, draft_to_target);
  return run(logits, params);
}

VerdictTensors verify_sampled(const Tensor& logits, const Tensor& draft_tokens, const Tensor& cu_nodes,
                              const Tensor& depths, const Tensor& first_child, const Tensor& next_sibling,
                              const Tensor& valid, int64_t max_nodes, int64_t max_depth, const Tensor& temperature,
                              const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
                              const std::string& filter_order, const Tensor& seeds, const Tensor& positions,
                              const std::optional<Tensor>& grammar_mask, const std::optional<Tensor>& draft_to_target) {
  const Check check("verify_sampled", logits);
  VerifyParams params = tree_params(check, logits, draft_tokens, cu_nodes, depths, first_child, next_sibling, valid,
                                    max_nodes, max_depth, grammar_mask, draft_to_target);
  params.sampling = sampling_params(check, temperature, top_k, top_p, min_p, filter_order, params.batch);
  check.tensor(seeds, "seeds", {ScalarType::Long}, {params.batch});
  check.tensor(positions, "positions", {ScalarType::Long}, {params.batch});
  params.seeds = const_pointer<int64_t>(seeds);
  params.positions = const_pointer<int64_t>(positions);
  return run(logits, params);
}

}  // namespace pagedtree::ops
