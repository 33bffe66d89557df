// The one contract between callers and backends. Every backend is a Backend; nothing here knows Torch or CUDA, so an
// engine without Torch links a backend library and calls it with raw pointers.
#pragma once

#include "core/params.h"

namespace pagedtree {

struct ConvParams;  // core/recurrent.h
struct DeltaRuleParams;
struct ShardStepParams;  // core/shards.h
struct ShardFollowParams;
struct ShardWeighParams;  // core/shard_distributions.h
struct ShardWalkParams;

// How a call runs. CUDA uses `stream`; the CPU backend splits its work with `parallel_for`, so that it shares the
// caller's thread pool. A null `parallel_for` runs on the calling thread.
struct ExecContext {
  using Body = void (*)(int64_t begin, int64_t end, void* state);
  void* stream = nullptr;
  int num_threads = 1;
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain_size, Body body, void* state) = nullptr;
};

// What a backend's tree_attention accepts besides fp16 and bf16 over caches of the same type or of e4m3.
struct AttentionSupport {
  bool float32;         // queries and caches of fp32
  int cache_alignment;  // the caches' addresses and strides must be multiples of this many bytes
};

// Every backend implements this class. A backend that leaves out a function does not compile.
class Backend {
 public:
  const char* const name;
  const AttentionSupport attention;
  const int64_t max_option_rows;  // of fp32 scratch under request options; 0: the backend has memory of its own

  virtual void build_trees(const BuildTreesParams&, const ExecContext&) const = 0;
  virtual void sample(const SampleParams&, const ExecContext&) const = 0;
  virtual void token_logprobs(const TokenLogprobsParams&, const ExecContext&) const = 0;
  virtual void verify_sampled(const VerifyParams&, const ExecContext&) const = 0;  // greedy is temperature 0
  virtual void verify_rejection(const RatioParams&, const ExecContext&) const = 0;
  virtual void verify_block(const RatioParams&, const ExecContext&) const = 0;
  virtual void verify_typical(const RatioParams&, const ExecContext&) const = 0;
  virtual void verify_traversal(const RatioParams&, const ExecContext&) const = 0;
  // For vocabularies that are split over ranks; see core/shards.h.
  virtual void step_shards(const ShardStepParams&, const ExecContext&) const = 0;
  virtual void follow_shards(const ShardFollowParams&, const ExecContext&) const = 0;
  virtual void weigh_shards(const ShardWeighParams&, const ExecContext&) const = 0;
  virtual void walk_shards(const ShardWalkParams&, const ExecContext&) const = 0;
  virtual void expand_tree(const ExpandTreeParams&, const ExecContext&) const = 0;
  virtual void rerank_tree(const RerankTreeParams&, const ExecContext&) const = 0;
  virtual void ngram_propose(const NgramProposeParams&, const ExecContext&) const = 0;
  virtual void medusa_propose(const MedusaProposeParams&, const ExecContext&) const = 0;
  virtual void best_first_tree(const BestFirstTreeParams&, const ExecContext&) const = 0;
  virtual void select_nodes(const SelectNodesParams&, const ExecContext&) const = 0;
  virtual void slot_mapping(const SlotMappingParams&, const ExecContext&) const = 0;
  virtual void append_kv(const AppendKvParams&, const ExecContext&) const = 0;
  virtual void compact_kv(const CompactKvParams&, const ExecContext&) const = 0;
  virtual void prepare_step(const PrepareStepParams&, const ExecContext&) const = 0;
  virtual void commit(const CommitParams&, const ExecContext&) const = 0;
  virtual void attention_plan(const AttentionPlanParams&, const ExecContext&) const = 0;
  // In bytes; reads no tensor.
  virtual int64_t tree_attention_scratch(const TreeAttentionParams&, const ExecContext&) const = 0;
  virtual void tree_attention(const TreeAttentionParams&, const ExecContext&) const = 0;
  virtual void merge_states(const MergeStatesParams&, const ExecContext&) const = 0;
  virtual void tree_delta_rule(const DeltaRuleParams&, const ExecContext&) const = 0;
  virtual void advance_state(const DeltaRuleParams&, const ExecContext&) const = 0;
  virtual void tree_conv1d(const ConvParams&, const ExecContext&) const = 0;
  virtual void advance_conv(const ConvParams&, const ExecContext&) const = 0;

 protected:
  constexpr Backend(const char* of_backend, AttentionSupport of_attention, int64_t of_options)
      : name(of_backend), attention(of_attention), max_option_rows(of_options) {}
  ~Backend() = default;
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
