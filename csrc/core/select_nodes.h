// Keeps the max(limit, B) nodes with the largest survival, the minimum along the path; every root is kept.
#pragma once

#include "core/math.h"
#include "core/tree.h"

namespace pagedtree {

struct SelectNodesParams {
  const int32_t* cu_nodes;  // [B + 1]
  const int32_t* parents;   // [N]
  const int32_t* depths;    // [N]
  const uint8_t* valid;     // [B]
  const float* survival;    // [N]
  const int32_t* limit;     // [1] or null: budget
  TreeOutput trees;         // capacity rows out
  int32_t* node_map;        // [capacity] out
  uint32_t* keys;           // [N] scratch
  int64_t batch;
  int64_t num_rows;  // N
  int64_t capacity;  // max(budget, B)
  int64_t budget;
  int32_t max_nodes;
  int32_t max_depth;
};

PT_HOST_DEVICE NodeRange selectable_rows(const SelectNodesParams& p, int64_t b) {
  NodeRange rows = node_range(p.cu_nodes, p.batch, b, p.num_rows);
  rows.end = min_of(rows.end, rows.begin + p.max_nodes);
  return rows;
}

// Returns -1 for a root or a wrong link. The node must be one deeper than its parent, so that a path's depths follow
// from its links.
PT_HOST_DEVICE int32_t linked_parent(const SelectNodesParams& p, int64_t begin, int32_t node) {
  if (node <= 0) return -1;
  const int32_t parent = p.parents[begin + node], own_depth = p.depths[begin + node];
  if (parent < 0 || parent >= node) return -1;
  const int32_t depth = parent > 0 ? p.depths[begin + parent] : 0;
  return depth >= 0 && depth < p.max_depth && own_depth == depth + 1 ? parent : -1;
}

// Counts NaN and negative values as 0.
PT_HOST_DEVICE float own_survival(float survival) { return survival > 0.0f ? survival : 0.0f; }

constexpr float kUnreachable = -1.0f;

// Keys order like survivals. Key 0 is never kept; a root's key exceeds all others.
constexpr uint32_t kRootKey = ~0u;
PT_HOST_DEVICE uint32_t survival_key(float survival) {
  return survival < 0.0f ? 0u : ScalarMath::bits<uint32_t>(survival) + 1;
}
PT_HOST_DEVICE float survival_of_key(uint32_t key) {
  return key == 0 ? kUnreachable : ScalarMath::bits<float>(key - 1);
}

PT_HOST_DEVICE int64_t kept_nodes(const SelectNodesParams& p, int64_t num_roots) {
  const int64_t limit = p.limit != nullptr ? min_of<int64_t>(p.limit[0], p.budget) : p.budget;
  return max_of(limit, num_roots);
}

PT_HOST_DEVICE void clear_kept(const SelectNodesParams& p, int64_t row) {
  p.node_map[row] = -1;
  clear_row(p.trees, row);
}

// Writes row `from` as node `node` of the tree at row `begin` of the result. The caller writes its links.
PT_HOST_DEVICE void write_kept(const SelectNodesParams& p, int64_t begin, int32_t node, const int16_t* parents,
                               int64_t from) {
  const int64_t row = begin + node;
  p.node_map[row] = static_cast<int32_t>(from);
  p.trees.parents[row] = parents[node];
  p.trees.depths[row] = node > 0 ? p.depths[from] : 0;
  write_ancestors(p.trees.mask + row * p.trees.mask_words, p.trees.mask_words, parents, node);
}

}  // namespace pagedtree
