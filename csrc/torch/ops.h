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
                             const Tensor& depths, const Tensor& first_child, const Tensor& next_sibling,
                             const Tensor& valid, int64_t max_nodes, int64_t max_depth,
                             const std::optional<Tensor>& grammar_mask, const std::optional<Tensor>& draft_to_target);
VerdictTensors verify_sampled(const Tensor& logits, const Tensor& draft_tokens, const Tensor& cu_nodes,
                              const Tensor& depths, const Tensor& first_child, const Tensor& next_sibling,
                              const Tensor& valid, int64_t max_nodes, int64_t max_depth, const Tensor& temperature,
                              const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
                              const std::string& filter_order, const Tensor& seeds, const Tensor& positions,
                              const std::optional<Tensor>& grammar_mask, const std::optional<Tensor>& draft_to_target);

// The rules that weigh the target's law against the drafts': an entry of the backend's table.
using RatioRule = BackendOp<RatioParams> Backend::*;
template <RatioRule kRule>
VerdictTensors verify_by_ratio(const Tensor& logits, const Tensor& draft_tokens, const Tensor& cu_nodes,
                               const Tensor& depths, const Tensor& first_child, const Tensor& next_sibling,
                               const Tensor& valid, int64_t max_nodes, int64_t max_depth, const Tensor& temperature,
                               const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
                               const std::string& filter_order, const std::string& draft_law,
                               const std::optional<Tensor>& draft_probs, const std::optional<Tensor>& draft_rows,
                               const Tensor& seeds, const Tensor& positions, const std::optional<Tensor>& coins,
                               const std::optional<Tensor>& final_coins, const std::optional<Tensor>& grammar_mask,
                               const std::optional<Tensor>& draft_to_target,
                               const std::optional<Tensor>& draft_temperature, const std::optional<Tensor>& draft_top_k,
                               const std::optional<Tensor>& draft_top_p, const std::optional<Tensor>& draft_min_p,
                               const std::string& draft_filter_order);
VerdictTensors verify_typical(const Tensor& logits, const Tensor& draft_tokens, const Tensor& cu_nodes,
                              const Tensor& depths, const Tensor& first_child, const Tensor& next_sibling,
                              const Tensor& valid, int64_t max_nodes, int64_t max_depth, const Tensor& temperature,
                              const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
                              const std::string& filter_order, double epsilon, double delta,
                              const std::optional<Tensor>& grammar_mask, const std::optional<Tensor>& draft_to_target);

// Vocabularies in parts, see shards.cpp. shard_words: how many words a ShardRow, a Residual and a ShardEnd are.
std::string shard_words();
void step_shards(const Tensor& logits, Tensor rows, const std::optional<Tensor>& received, Tensor words,
                 const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
                 const std::string& filter_order, int64_t round, int64_t digit, int64_t last, int64_t rank,
                 int64_t num_ranks, int64_t first_token, int64_t vocab, const std::optional<Tensor>& cu_nodes,
                 const std::optional<Tensor>& depths, const std::optional<Tensor>& seeds,
                 const std::optional<Tensor>& positions, const std::optional<Tensor>& grammar_mask);
VerdictTensors follow_shards(const Tensor& rows, const Tensor& received, const Tensor& draft_tokens,
                             const Tensor& cu_nodes, const Tensor& depths, const Tensor& first_child,
                             const Tensor& next_sibling, const Tensor& valid, int64_t max_nodes, int64_t max_depth,
                             int64_t last, int64_t vocab, const std::optional<Tensor>& draft_to_target);
void weigh_shards(const Tensor& logits, Tensor rows, Tensor left, const std::optional<Tensor>& ends,
                  const std::optional<Tensor>& received, Tensor words, const Tensor& draft_tokens,
                  const Tensor& cu_nodes, const Tensor& depths, const Tensor& first_child, const Tensor& next_sibling,
                  const Tensor& valid, int64_t max_nodes, int64_t max_depth, const Tensor& temperature,
                  const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const std::string& filter_order,
                  int64_t round, int64_t index, int64_t rank, int64_t num_ranks, int64_t first_token, int64_t vocab,
                  const std::string& draft_law, const std::optional<Tensor>& draft_probs,
                  const std::optional<Tensor>& draft_rows, const std::optional<Tensor>& grammar_mask,
                  const std::optional<Tensor>& draft_to_target);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> walk_shards(
    Tensor rows, Tensor left, const Tensor& masses, const Tensor& received, const Tensor& draft_tokens,
    const Tensor& cu_nodes, const Tensor& depths, const Tensor& first_child, const Tensor& next_sibling,
    const Tensor& valid, int64_t max_nodes, int64_t max_depth, int64_t index, int64_t vocab,
    const std::string& draft_law, const Tensor& seeds, const Tensor& positions, const std::optional<Tensor>& coins,
    const std::optional<Tensor>& final_coins, const std::optional<Tensor>& draft_to_target);

// tokens, parents, scores, kv_index, frontier, mask, draft_probs
using ExpandedTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
ExpandedTensors expand_tree(const Tensor& tokens, const Tensor& parents, const Tensor& scores, const Tensor& kv_index,
                            const Tensor& frontier, const Tensor& mask, const Tensor& logits, int64_t level,
                            int64_t num_kv, int64_t num_children, int64_t num_frontier, const std::string& law,
                            const std::optional<Tensor>& temperature, const std::optional<Tensor>& top_k,
                            const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p,
                            const std::string& filter_order, const std::optional<Tensor>& seeds,
                            const std::optional<Tensor>& positions);
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

Tensor slot_mapping(const Tensor& page_table, const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t page_size,
                    int64_t total_q);
void append_kv(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots,
               const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale);
Tensor compact_kv(const std::vector<Tensor>& caches, const Tensor& page_table, const Tensor& start,
                  const Tensor& accept_index, const Tensor& num_accepted);

std::tuple<Tensor, Tensor, Tensor, Tensor> prepare_step(const Tensor& cu_nodes, const Tensor& depths,
                                                        const Tensor& page_table, const Tensor& start,
                                                        int64_t page_size, int64_t total_q);
using CommitResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
CommitResult commit(const Tensor& accept_index, const Tensor& num_accepted, const Tensor& tokens,
                    const Tensor& cu_nodes, const Tensor& start, const std::optional<Tensor>& history,
                    const std::optional<Tensor>& history_lens, const std::optional<Tensor>& eos_ids,
                    const std::optional<Tensor>& node_map);

std::tuple<Tensor, Tensor> tree_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                          const Tensor& page_table, const Tensor& seq_lens, const Tensor& cu_seqlens_q,
                                          const std::optional<Tensor>& tree_mask,
                                          const std::optional<Tensor>& tree_lens, std::optional<int64_t> max_seqlen_q,
                                          std::optional<double> scale, double softcap, int64_t window,
                                          const std::optional<Tensor>& sinks, const std::optional<Tensor>& k_scale,
                                          const std::optional<Tensor>& v_scale, const std::optional<Tensor>& plan);
void tree_attention_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& page_table,
                        const Tensor& seq_lens, const Tensor& cu_seqlens_q, const std::optional<Tensor>& tree_mask,
                        const std::optional<Tensor>& tree_lens, std::optional<int64_t> max_seqlen_q,
                        std::optional<double> scale, double softcap, int64_t window, const std::optional<Tensor>& sinks,
                        const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                        const std::optional<Tensor>& plan, Tensor out, std::optional<Tensor> lse);
Tensor attention_plan(const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t num_q_heads, int64_t num_kv_heads,
                      int64_t head_dim, int64_t page_size, int64_t max_seqlen_q,
                      const std::optional<Tensor>& tree_lens);
std::tuple<Tensor, Tensor> merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                        const Tensor& lse_b);

}  // namespace pagedtree::ops
