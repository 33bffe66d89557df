// The ops of a backend, in one table, and the class that every backend implements. Nothing here knows Torch or CUDA.
#pragma once

#include "core/common.h"
#include "core/verify/table.h"

// OP: an op with a host of its own in each backend; its name and the struct that it takes.
// RULE: an op that treats each of its items (rows, trees, sequences) by itself. rule(params, i), for each i below
// num_items(params), is all that there is of it: cpu/rules.cpp and cuda/rules.cu run it. Fewer items than `grain` are
// not worth a thread of the CPU. Params and rules are in the header of the op's family.
#define PT_EACH_OP(OP, RULE)                                \
  OP(build_trees, BuildTreesParams)                         \
  OP(sample, SampleParams)                                  \
  OP(token_logprobs, TokenLogprobsParams)                   \
  OP(verify_sampled, VerifyParams)                          \
  OP(verify_tokens, VerifyTokensParams)                     \
  PT_EACH_WALK(OP, OP)                                      \
  OP(step_shards, ShardStepParams)                          \
  RULE(follow_shards, ShardFollowParams, follow_tree, 1)    \
  OP(weigh_shards, ShardWeighParams)                        \
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

// How a call runs. CUDA uses `stream`; the CPU backend splits its work with `parallel_for`, so that it shares the
// caller's thread pool. A null `parallel_for` runs on the calling thread.
struct ExecContext {
  using Body = void (*)(int64_t begin, int64_t end, void* state);
  void* stream = nullptr;
  int num_threads = 1;
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain_size, Body body, void* state) = nullptr;
};

// In which inputs backends differ.
struct Support {
  bool recurrent_float32;  // fp32 in the ops of recurrent layers
  int cache_alignment;     // tree_attention's caches have addresses and strides that are multiples of this many bytes
};

// Each op is a function of its name: `backend.commit(params, ctx)`. A backend that leaves out an op does not build.
class Backend {
 public:
  const char* const name;
  const Support support;
  const int64_t max_option_rows;  // of fp32 scratch under request options; 0: the backend has memory of its own

#define PT_OP(op, Params, ...) virtual void op(const Params&, const ExecContext&) const = 0;
  PT_EACH_OP(PT_OP, PT_OP)
#undef PT_OP
  // In bytes; reads no tensor.
  virtual int64_t tree_attention_scratch(const TreeAttentionParams&, const ExecContext&) const = 0;

 protected:
  constexpr Backend(const char* of_backend, Support of_inputs, int64_t of_options)
      : name(of_backend), support(of_inputs), max_option_rows(of_options) {}
  ~Backend() = default;
};

// What a backend's class declares.
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
namespace simt {  // the CUDA kernels, executed on the CPU
PT_EXPORT const Backend& backend();
}

}  // namespace pagedtree
