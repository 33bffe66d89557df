// The CPU backend's functions, one for each entry of Backend.
#pragma once

#include "core/backend.h"

namespace pagedtree::cpu {

void build_trees(const BuildTreesParams& params, const ExecContext& ctx);
void sample(const SampleParams& params, const ExecContext& ctx);
void verify_sampled(const VerifyParams& params, const ExecContext& ctx);
void verify_rejection(const RatioParams& params, const ExecContext& ctx);
void verify_block(const RatioParams& params, const ExecContext& ctx);
void verify_typical(const RatioParams& params, const ExecContext& ctx);
void verify_traversal(const RatioParams& params, const ExecContext& ctx);
void step_shards(const ShardStepParams& params, const ExecContext& ctx);
void follow_shards(const ShardFollowParams& params, const ExecContext& ctx);
void weigh_shards(const ShardWeighParams& params, const ExecContext& ctx);
void walk_shards(const ShardWalkParams& params, const ExecContext& ctx);
void expand_tree(const ExpandTreeParams& params, const ExecContext& ctx);
void rerank_tree(const RerankTreeParams& params, const ExecContext& ctx);
void ngram_propose(const NgramProposeParams& params, const ExecContext& ctx);
void medusa_propose(const MedusaProposeParams& params, const ExecContext& ctx);
void slot_mapping(const SlotMappingParams& params, const ExecContext& ctx);
void append_kv(const AppendKvParams& params, const ExecContext& ctx);
void compact_kv(const CompactKvParams& params, const ExecContext& ctx);
void prepare_step(const PrepareStepParams& params, const ExecContext& ctx);
void commit(const CommitParams& params, const ExecContext& ctx);
void attention_plan(const AttentionPlanParams& params, const ExecContext& ctx);
int64_t tree_attention_scratch(const TreeAttentionParams& params, const ExecContext& ctx);
void tree_attention(const TreeAttentionParams& params, const ExecContext& ctx);
void merge_states(const MergeStatesParams& params, const ExecContext& ctx);

}  // namespace pagedtree::cpu
