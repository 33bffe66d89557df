#include "cpu/kernels.h"

namespace pagedtree::cpu {

const Backend& backend() {
  static constexpr Backend table = {
      .name = "cpu",
      .build_trees = build_trees,
      .sample = sample,
      .verify_sampled = verify_sampled,
      .verify_rejection = verify_rejection,
      .verify_block = verify_block,
      .verify_typical = verify_typical,
      .verify_traversal = verify_traversal,
      .step_shards = step_shards,
      .follow_shards = follow_shards,
      .weigh_shards = weigh_shards,
      .walk_shards = walk_shards,
      .expand_tree = expand_tree,
      .rerank_tree = rerank_tree,
      .ngram_propose = ngram_propose,
      .medusa_propose = medusa_propose,
      .slot_mapping = slot_mapping,
      .append_kv = append_kv,
      .compact_kv = compact_kv,
      .prepare_step = prepare_step,
      .commit = commit,
      .attention_plan = attention_plan,
      .tree_attention_scratch = tree_attention_scratch,
      .tree_attention = tree_attention,
      .merge_states = merge_states,
  };
  return table;
}

}  // namespace pagedtree::cpu
