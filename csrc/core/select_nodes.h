// Which nodes of a batch of trees are worth their rows, written once for every backend.
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

// The rows of tree b that may be nodes.
PT_HOST_DEVICE NodeRange selectable_rows(const SelectNodesParams& p, int64_t b) {
  NodeRange rows = node_range(p.cu_nodes, p.batch, b, p.num_rows);
  rows.end = min_of(rows.end, rows.begin + p.max_nodes);
  return rows;
}

// The parent of node `node` of the tree that begins at row `begin`; -1 for a root, and for a node that is linked
// wrongly. Only a node one deeper than its parent counts as linked, so that the depths of a path follow from its links.
PT_HOST_DEVICE int32_t linked_parent(const SelectNodesParams& p, int64_t begin, int32_t node) {
  if (node <= 0) return -1;
  const int32_t parent = p.parents[begin + node], own_depth = p.depths[begin + node];
  if (parent < 0 || parent >= node) return -1;
  const int32_t depth = parent > 0 ? p.depths[begin + parent] : 0;
  return depth >= 0 && depth < p.max_depth && own_depth == depth + 1 ? parent : -1;
}

// What a node survives by itself: NaN and what is negative count as 0.
PT_HOST_DEVICE float own_survival(float survival) { return survival > 0.0f ? survival : 0.0f; }

// Stands for a node that cannot be reached: less than every survival.
constexpr float kUnreachable = -1.0f;

// Keys have the order of survivals; 0 is for rows that are never kept. A root's is above all others.
constexpr uint32_t kRootKey = ~0u;
PT_HOST_DEVICE uint32_t survival_key(float survival) {
  return survival < 0.0f ? 0u : ScalarMath::bits<uint32_t>(survival) + 1;
}
PT_HOST_DEVICE float survival_of_key(uint32_t key) {
  return key == 0 ? kUnreachable : ScalarMath::bits<float>(key - 1);
}

// How many nodes are kept, if the batch has that many; every root is.
PT_HOST_DEVICE int64_t kept_nodes(const SelectNodesParams& p, int64_t num_roots) {
  const int64_t limit = p.limit != nullptr ? min_of<int64_t>(p.limit[0], p.budget) : p.budget;
  return max_of(limit, num_roots);
}

// A row after the last kept node.
PT_HOST_DEVICE void clear_kept(const SelectNodesParams& p, int64_t row) {
  p.node_map[row] = -1;
  clear_row(p.trees, row);
}

// Node `node` of a tree whose kept nodes begin at row `begin` of the result was row `from`. Its links are written by
// the caller.
PT_HOST_DEVICE void write_kept(const SelectNodesParams& p, int64_t begin, int32_t node, const int16_t* parents,
                               int64_t from) {
  const int64_t row = begin + node;
  p.node_map[row] = static_cast<int32_t>(from);
  p.trees.parents[row] = parents[node];
  p.trees.depths[row] = node > 0 ? p.depths[from] : 0;
  write_ancestors(p.trees.mask + row * p.trees.mask_words, p.trees.mask_words, parents, node);
}

}  // namespace pagedtree
