// The CUDA backend, under its own name or as simt; each function is in the file of its family, and launches its kernels
// on the stream of the context.
#pragma once

#include "core/backend.h"

namespace pagedtree::cuda {

// As many rows are worked on at a time as large GPUs have SMs, so that memory does not grow with the batch.
constexpr int64_t kMaxOptionRows = 144;

class CudaBackend final : public Backend {
 public:
  constexpr explicit CudaBackend(const char* of_backend)
      : Backend(of_backend, {.float32 = false, .cache_alignment = 16}, kMaxOptionRows) {}

  void build_trees(const BuildTreesParams&, const ExecContext&) const override;
  void sample(const SampleParams&, const ExecContext&) const override;
  void token_logprobs(const TokenLogprobsParams&, const ExecContext&) const override;
  void verify_sampled(const VerifyParams&, const ExecContext&) const override;
  void verify_rejection(const RatioParams&, const ExecContext&) const override;
  void verify_block(const RatioParams&, const ExecContext&) const override;
  void verify_typical(const RatioParams&, const ExecContext&) const override;
  void verify_traversal(const RatioParams&, const ExecContext&) const override;
  void step_shards(const ShardStepParams&, const ExecContext&) const override;
  void follow_shards(const ShardFollowParams&, const ExecContext&) const override;
  void weigh_shards(const ShardWeighParams&, const ExecContext&) const override;
  void walk_shards(const ShardWalkParams&, const ExecContext&) const override;
  void expand_tree(const ExpandTreeParams&, const ExecContext&) const override;
  void rerank_tree(const RerankTreeParams&, const ExecContext&) const override;
  void ngram_propose(const NgramProposeParams&, const ExecContext&) const override;
  void medusa_propose(const MedusaProposeParams&, const ExecContext&) const override;
  void best_first_tree(const BestFirstTreeParams&, const ExecContext&) const override;
  void select_nodes(const SelectNodesParams&, const ExecContext&) const override;
  void slot_mapping(const SlotMappingParams&, const ExecContext&) const override;
  void append_kv(const AppendKvParams&, const ExecContext&) const override;
  void compact_kv(const CompactKvParams&, const ExecContext&) const override;
  void prepare_step(const PrepareStepParams&, const ExecContext&) const override;
  void commit(const CommitParams&, const ExecContext&) const override;
  void attention_plan(const AttentionPlanParams&, const ExecContext&) const override;
  int64_t tree_attention_scratch(const TreeAttentionParams&, const ExecContext&) const override;
  void tree_attention(const TreeAttentionParams&, const ExecContext&) const override;
  void merge_states(const MergeStatesParams&, const ExecContext&) const override;
  void tree_delta_rule(const DeltaRuleParams&, const ExecContext&) const override;
  void advance_state(const DeltaRuleParams&, const ExecContext&) const override;
  void tree_conv1d(const ConvParams&, const ExecContext&) const override;
  void advance_conv(const ConvParams&, const ExecContext&) const override;
};

}  // namespace pagedtree::cuda
