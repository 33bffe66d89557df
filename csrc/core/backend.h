// The one contract between callers and backends. Every backend fills the same table; nothing here knows Torch or CUDA,
// so an engine without Torch links a backend library and calls it with raw pointers.
#pragma once

#include "core/params.h"

namespace pagedtree {

struct ShardStepParams;  // core/shards.h
struct ShardFollowParams;
struct ShardWeighParams;  // core/shard_laws.h
struct ShardWalkParams;

// How a call runs. CUDA uses `stream`; the CPU backend splits its work with `parallel_for`, so that it shares the
// caller's thread pool. A null `parallel_for` runs on the calling thread.
struct ExecContext {
  using Body = void (*)(int64_t begin, int64_t end, void* state);
  void* stream = nullptr;
  int num_threads = 1;
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain_size, Body body, void* state) = nullptr;
};

// A function of a backend. It has no default: a table that leaves one out does not compile.
template <typename Params, typename Result = void>
struct BackendOp {
  using Function = Result (*)(const Params&, const ExecContext&);
  Function function;

  constexpr BackendOp(Function of_backend) : function(of_backend) {}
  BackendOp(decltype(nullptr)) = delete;
  Result operator()(const Params& p, const ExecContext& ctx) const { return function(p, ctx); }
};

struct Backend {
  const char* name;
  BackendOp<BuildTreesParams> build_trees;
  BackendOp<SampleParams> sample;
  BackendOp<VerifyParams> verify_sampled;  // greedy is temperature 0
  BackendOp<RatioParams> verify_rejection;
  BackendOp<RatioParams> verify_block;
  BackendOp<RatioParams> verify_typical;
  BackendOp<RatioParams> verify_traversal;
  BackendOp<ShardStepParams> step_shards;  // vocabularies in parts: core/shards.h
  BackendOp<ShardFollowParams> follow_shards;
  BackendOp<ShardWeighParams> weigh_shards;
  BackendOp<ShardWalkParams> walk_shards;
  BackendOp<ExpandTreeParams> expand_tree;
  BackendOp<RerankTreeParams> rerank_tree;
  BackendOp<NgramProposeParams> ngram_propose;
  BackendOp<MedusaProposeParams> medusa_propose;
  BackendOp<SlotMappingParams> slot_mapping;
  BackendOp<AppendKvParams> append_kv;
  BackendOp<CompactKvParams> compact_kv;
  BackendOp<PrepareStepParams> prepare_step;
  BackendOp<CommitParams> commit;
  BackendOp<AttentionPlanParams> attention_plan;
  BackendOp<TreeAttentionParams, int64_t> tree_attention_scratch;  // bytes; reads no tensor
  BackendOp<TreeAttentionParams> tree_attention;
  BackendOp<MergeStatesParams> merge_states;
};

namespace cpu {
PT_EXPORT const Backend& backend();
}
namespace cuda {
PT_EXPORT const Backend& backend();
}
namespace simt {  // the CUDA kernels, executed on the CPU
PT_EXPORT const Backend& backend();
}

}  // namespace pagedtree
