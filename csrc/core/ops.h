// The table of ops and the class that every backend implements, without Torch or CUDA.
#pragma once

#include "core/common.h"
#include "core/verify/table.h"

// OP(name, params): each backend has a host function.
// RULE(name, params, rule, grain): the op is rule(params, i) for each i below num_items(params), run by cpu/rules.cpp
// and cuda/rules.cu. Fewer items than `grain` are not worth a CPU thread. Each family's header has its params and
// rules.
#define PT_EACH_OP(OP, RULE)                                \
  OP(build_trees, BuildTreesParams)                         \
  OP(sample, SampleParams)                                  \
  OP(token_logprobs, TokenLogprobsParams)                   \
  OP(verify_sampled, VerifyParams)                          \
  OP(verify_tokens, VerifyTokensParams)                     \
  PT_EACH_WALK(OP, OP)                                      \
  OP(step_shards, ShardStepParams)                          \
  RULE(follow_shards, ShardFollowParams, follow_tree, 1)    \
  OP(weigh_shards, ShardResidualParams)                     \
  RULE(walk_shards, ShardWalkParams, walk_tree, 1)          \
  OP(expand_tree, ExpandTreeParams)                         \
  OP(rerank_tree, RerankTreeParams)                         \
  OP(ngram_propose, NgramProposeParams)                     \
  OP(medusa_propose, MedusaProposeParams)                   \
  OP(best_first_tree, BestFirstTreeParams)                  \
  OP(select_nodes, SelectNodesParams)                       \
  RULE(mask_words, MaskWordsParams, write_mask_word, 1024)  \
  RULE(slot_mapping, SlotMappingParams, map_query, 1024)    \
  OP(append_kv, AppendKvParams)                             \
  OP(rope_append, RopeAppendParams)                         \
  OP(compact_kv, CompactKvParams)                           \
  RULE(prepare_step, PrepareStepParams, prepare_item, 1024) \
  RULE(commit, CommitParams, commit_sequence, 32)           \
  OP(attention_plan, AttentionPlanParams)                   \
  OP(tree_attention, TreeAttentionParams)                   \
  OP(merge_states, MergeStatesParams)                       \
  OP(tree_delta_rule, DeltaRuleParams)                      \
  OP(advance_state, DeltaRuleParams)                        \
  OP(tree_conv1d, ConvParams)                               \
  OP(advance_conv, ConvParams)
#define PT_EACH_RULE(RULE) PT_EACH_OP(PT_SKIP, RULE)
#define PT_SKIP(...)

namespace pagedtree {

#define PT_DECLARE_PARAMS(op, Params, ...) struct Params;
PT_EACH_OP(PT_DECLARE_PARAMS, PT_DECLARE_PARAMS)
#undef PT_DECLARE_PARAMS

// CUDA uses `stream`. The CPU backend splits work with `parallel_for` to share the caller's thread pool; null runs on
// the calling thread.
struct ExecContext {
  using Body = void (*)(int64_t begin, int64_t end, void* state);
  void* stream = nullptr;
  int num_threads = 1;
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain_size, Body body, void* state) = nullptr;
};

struct Support {
  bool recurrent_float32;  // of the recurrent ops
  int cache_alignment;     // bytes; divides the addresses and strides of tree_attention's caches
};

// A backend that lacks an op does not build.
class Backend {
 public:
  const char* const name;
  const Support support;
  const int64_t max_option_rows;  // rows of fp32 scratch for request options; 0: the backend allocates

#define PT_OP(op, Params, ...) virtual void op(const Params&, const ExecContext&) const = 0;
  PT_EACH_OP(PT_OP, PT_OP)
#undef PT_OP
  // Returns bytes; reads no tensor.
  virtual int64_t tree_attention_scratch(const TreeAttentionParams&, const ExecContext&) const = 0;

 protected:
  constexpr Backend(const char* of_backend, Support of_inputs, int64_t of_options)
      : name(of_backend), support(of_inputs), max_option_rows(of_options) {}
  ~Backend() = default;
};

#define PT_OVERRIDE(op, Params, ...) void op(const Params&, const ExecContext&) const override;
#define PT_OVERRIDES                   \
  PT_EACH_OP(PT_OVERRIDE, PT_OVERRIDE) \
  int64_t tree_attention_scratch(const TreeAttentionParams&, const ExecContext&) const override;

namespace cpu {
PT_EXPORT const Backend& backend();
}
namespace cuda {
PT_EXPORT const Backend& backend();
}
namespace simt {
PT_EXPORT const Backend& backend();
}

}  // namespace pagedtree
