#include "cuda/kernels.h"

namespace pagedtree {
namespace {

constexpr Backend table_named(const char* name) {
  return {
      .name = name,
      .build_trees = cuda::build_trees,
      .sample = cuda::sample,
      .verify_sampled = cuda::verify_sampled,
      .verify_rejection = cuda::verify_rejection,
      .verify_block = cuda::verify_block,
      .verify_typical = cuda::verify_typical,
      .verify_traversal = cuda::verify_traversal,
      .step_shards = cuda::step_shards,
      .follow_shards = cuda::follow_shards,
      .weigh_shards = cuda::weigh_shards,
      .walk_shards = cuda::walk_shards,
      .expand_tree = cuda::expand_tree,
      .rerank_tree = cuda::rerank_tree,
      .ngram_propose = cuda::ngram_propose,
      .medusa_propose = cuda::medusa_propose,
      .slot_mapping = cuda::slot_mapping,
      .append_kv = cuda::append_kv,
      .compact_kv = cuda::compact_kv,
      .prepare_step = cuda::prepare_step,
      .commit = cuda::commit,
      .attention_plan = cuda::attention_plan,
      .tree_attention_scratch = cuda::tree_attention_scratch,
      .tree_attention = cuda::tree_attention,
      .merge_states = cuda::merge_states,
  };
}

}  // namespace

#if defined(__CUDACC__)
const Backend& cuda::backend() {
  static constexpr Backend table = table_named("cuda");
  return table;
}
#define PT_THIS_BACKEND cuda::backend
#else
const Backend& simt::backend() {
  static constexpr Backend table = table_named("simt");
  return table;
}
#define PT_THIS_BACKEND simt::backend
#endif

// For whoever loads the library at run time.
extern "C" PT_EXPORT const Backend* pagedtree_backend() { return &PT_THIS_BACKEND(); }

}  // namespace pagedtree
