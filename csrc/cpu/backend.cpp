#include "cpu/kernels.h"

namespace pagedtree::cpu {

const Backend& backend() {
  static const Backend table = {
      .name = "cpu",
      .build_trees = build_trees,
      .sample = sample,
      .verify_sampled = verify_sampled,
  };
  return table;
}

}  // namespace pagedtree::cpu
