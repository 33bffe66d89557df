#include "cpu/kernels.h"

namespace pagedtree::cpu {

const Backend& backend() {
  static const Backend table = {
      .name = "cpu",
      .build_trees = build_trees,
      .sample = sample,
      .verify_sampled = verify_sampled,
      .expand_tree = expand_tree,
      .rerank_tree = rerank_tree,
      .ngram_propose = ngram_propose,
      .medusa_propose = medusa_propose,
  };
  return table;
}

}  // namespace pagedtree::cpu
