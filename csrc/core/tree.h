// Draft trees, written once for every backend: how nodes link, what a node sees.
#pragma once

#include "core/params.h"

namespace pagedtree {

// The rows [begin, end) of one tree, kept inside the batch whatever the offsets say.
struct NodeRange {
  int64_t begin;
  int64_t end;
  PT_HOST_DEVICE int64_t size() const { return end - begin; }
};

PT_HOST_DEVICE NodeRange node_range(const int32_t* cu_offsets, int64_t b, int64_t num_rows) {
  const int64_t begin = clamp_to<int64_t>(cu_offsets[b], 0, num_rows);
  return {begin, clamp_to<int64_t>(cu_offsets[b + 1], begin, num_rows)};
}

PT_HOST_DEVICE void clear_node(const BuildTreesParams& p, int64_t row) {
  p.depths[row] = -1;
  p.first_child[row] = -1;
  p.next_sibling[row] = -1;
  for (int32_t w = 0; w < p.mask_words; ++w) p.mask[row * p.mask_words + w] = 0;
}

// Links tree b. `last_child` is scratch for kMaxTreeNodes entries. Parents come before their children, so one pass in
// index order suffices and terminates whatever the parents say. Returns whether the tree is well formed.
PT_HOST_DEVICE bool build_tree(const BuildTreesParams& p, int64_t b, int16_t* last_child) {
  const NodeRange rows = node_range(p.cu_nodes, b, p.num_rows);
  bool valid = rows.size() > 0 && rows.size() <= p.max_nodes;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    clear_node(p, row);
    const int32_t node = static_cast<int32_t>(row - rows.begin);
    const int32_t parent = p.parents[row];
    if (node == 0) {
      valid = valid && parent == -1;
      p.depths[row] = 0;
    } else {
      const bool known = node < p.max_nodes && parent >= 0 && parent < node;
      const int32_t parent_depth = known ? p.depths[rows.begin + parent] : -1;
      if (parent_depth < 0 || parent_depth >= p.max_depth) {
        valid = false;
        continue;
      }
      const int64_t parent_row = rows.begin + parent;
      p.depths[row] = parent_depth + 1;
      for (int32_t w = 0; w < p.mask_words; ++w) {
        p.mask[row * p.mask_words + w] = p.mask[parent_row * p.mask_words + w];
      }
      if (p.first_child[parent_row] < 0) {
        p.first_child[parent_row] = node;
      } else {
        p.next_sibling[rows.begin + last_child[parent]] = node;
      }
      last_child[parent] = static_cast<int16_t>(node);
    }
    int32_t& word = p.mask[row * p.mask_words + node / kMaskWordBits];
    word = static_cast<int32_t>(static_cast<uint32_t>(word) | (1u << (node % kMaskWordBits)));
  }
  return valid;
}

}  // namespace pagedtree
