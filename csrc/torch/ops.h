// The host functions behind torch.ops.pagedtree: validate, fill params, call the backend.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "torch/dispatch.h"

namespace pagedtree::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> build_trees(const Tensor& parents, const Tensor& cu_nodes,
                                                               int64_t max_nodes, int64_t max_depth);

Tensor sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
              const Tensor& min_p, const std::string& filter_order, const Tensor& seeds, const Tensor& positions);

using VerdictTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // accept_index, num_accepted, tokens, status
VerdictTensors verify_greedy(const Tensor& logits, const Tensor& draft_tokens, const Tensor& cu_nodes,
                             const Tensor& first_child, const Tensor& next_sibling, const Tensor& valid,
                             int64_t max_nodes, int64_t max_depth, const std::optional<Tensor>& grammar_mask,
                             const std::optional<Tensor>& draft_to_target);
VerdictTensors verify_sampled(const Tensor& logits, const Tensor& draft_tokens, const Tensor& cu_nodes,
                              const Tensor& first_child, const Tensor& next_sibling, const Tensor& valid,
                              int64_t max_nodes, int64_t max_depth, const Tensor& temperature, const Tensor& top_k,
                              const Tensor& top_p, const Tensor& min_p, const std::string& filter_order,
                              const Tensor& seeds, const Tensor& positions, const std::optional<Tensor>& grammar_mask,
                              const std::optional<Tensor>& draft_to_target);

}  // namespace pagedtree::ops
