#include "core/tree.h"
#include "cpu/backend.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {

void CpuBackend::build_trees(const BuildTreesParams& p, const ExecContext& ctx) const {
  // Padding rows read as unreachable.
  const NodeRange used = used_rows(p.cu_nodes, p.batch, p.num_rows);
  for (int64_t row = 0; row < used.begin; ++row) clear_node(p.trees, row);
  for (int64_t row = used.end; row < p.num_rows; ++row) clear_node(p.trees, row);
  parallel_for(ctx, p.batch, 8, [&](int64_t begin, int64_t end) {
    int16_t last_child[kMaxTreeNodes];
    for (int64_t b = begin; b < end; ++b) p.trees.valid[b] = build_tree(p, b, last_child);
  });
}

}  // namespace pagedtree::cpu
