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

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> expand_tree(const Tensor& tokens, const Tensor& parents,
                                                                       const Tensor& scores, const Tensor& kv_index,
                                                                       const Tensor& frontier, const Tensor& mask,
                                                                       const Tensor& logits, int64_t num_kv,
                                                                       int64_t num_children, int64_t num_frontier);
std::tuple<Tensor, Tensor, Tensor, Tensor> rerank_tree(const Tensor& tokens, const Tensor& parents,
                                                       const Tensor& scores, const Tensor& kv_index, int64_t num_nodes,
                                                       bool by_score, std::optional<Tensor> active);
std::tuple<Tensor, Tensor, Tensor> ngram_propose(const Tensor& history, const Tensor& history_lens, int64_t max_nodes,
                                                 int64_t max_depth, int64_t min_ngram, int64_t max_ngram,
                                                 int64_t max_branches, std::optional<Tensor> extra,
                                                 std::optional<Tensor> active);
std::tuple<Tensor, Tensor, Tensor> medusa_propose(const Tensor& head_logits, const Tensor& parents,
                                                  const Tensor& depths, const Tensor& child_ranks, int64_t num_top,
                                                  std::optional<Tensor> root_tokens, std::optional<Tensor> active);

}  // namespace pagedtree::ops
