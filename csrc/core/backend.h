// The one contract between callers and backends. Every backend fills the same table; nothing here knows Torch or CUDA,
// so an engine without Torch links a backend library and calls it with raw pointers.
#pragma once

#include "core/params.h"

namespace pagedtree {

// How a call runs. CUDA uses `stream`; the CPU backend splits its work with `parallel_for`, so that it shares the
// caller's thread pool. A null `parallel_for` runs on the calling thread.
struct ExecContext {
  using Body = void (*)(int64_t begin, int64_t end, void* state);
  void* stream = nullptr;
  int num_threads = 1;
  void (*parallel_for)(int64_t begin, int64_t end, int64_t grain_size, Body body, void* state) = nullptr;
};

// Every backend fills every entry, see is_complete().
struct Backend {
  const char* name;
  void (*build_trees)(const BuildTreesParams&, const ExecContext&);
  void (*sample)(const SampleParams&, const ExecContext&);
  void (*verify_sampled)(const VerifyParams&, const ExecContext&);  // greedy is temperature 0
  void (*verify_rejection)(const RatioParams&, const ExecContext&);
  void (*verify_block)(const RatioParams&, const ExecContext&);
  void (*verify_typical)(const RatioParams&, const ExecContext&);
  void (*verify_traversal)(const RatioParams&, const ExecContext&);
  void (*expand_tree)(const ExpandTreeParams&, const ExecContext&);
  void (*rerank_tree)(const RerankTreeParams&, const ExecContext&);
  void (*ngram_propose)(const NgramProposeParams&, const ExecContext&);
  void (*medusa_propose)(const MedusaProposeParams&, const ExecContext&);
  void (*slot_mapping)(const SlotMappingParams&, const ExecContext&);
  void (*append_kv)(const AppendKvParams&, const ExecContext&);
  void (*compact_kv)(const CompactKvParams&, const ExecContext&);
  void (*prepare_step)(const PrepareStepParams&, const ExecContext&);
  void (*commit)(const CommitParams&, const ExecContext&);
  void (*attention_plan)(const AttentionPlanParams&, const ExecContext&);
  int64_t (*tree_attention_scratch)(const TreeAttentionParams&, const ExecContext&);  // bytes; reads no tensor
  void (*tree_attention)(const TreeAttentionParams&, const ExecContext&);
  void (*merge_states)(const MergeStatesParams&, const ExecContext&);
};

// Whether no entry is null; does not compile while one is not listed here.
constexpr bool is_complete(const Backend& backend) {
  const auto& [name, build_trees, sample, verify_sampled, verify_rejection, verify_block, verify_typical,
               verify_traversal, expand_tree, rerank_tree, ngram_propose, medusa_propose, slot_mapping, append_kv,
               compact_kv, prepare_step, commit, attention_plan, tree_attention_scratch, tree_attention, merge_states] =
      backend;
  const auto all = [](auto... entries) { return (... && (entries != nullptr)); };
  return all(name, build_trees, sample, verify_sampled, verify_rejection, verify_block, verify_typical,
             verify_traversal, expand_tree, rerank_tree, ngram_propose, medusa_propose, slot_mapping, append_kv,
             compact_kv, prepare_step, commit, attention_plan, tree_attention_scratch, tree_attention, merge_states);
}

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
