// Links, depths and ancestor masks of draft trees.
// mask(node) = mask(parent) | bit(node);  depth(node) = depth(parent) + 1
#pragma once

#include "core/numeric.h"
#include "core/params.h"

namespace pagedtree {

// Fields of a batch of trees with R rows, written.
struct TreeOutput {
  int32_t* cu_nodes;      // [B + 1]
  int32_t* parents;       // [R]
  int32_t* depths;        // [R]
  int32_t* first_child;   // [R]
  int32_t* next_sibling;  // [R]
  int32_t* mask;          // [R, mask_words]
  bool* valid;            // [B]
  int32_t mask_words;
};

struct BuildTreesParams {
  const int32_t* parents;   // [N] local index in the tree, -1 at the root
  const int32_t* cu_nodes;  // [B + 1]
  TreeOutput trees;         // N rows out, without cu_nodes and parents
  int64_t batch;
  int64_t num_rows;  // N, padding rows included
  int32_t max_nodes;
  int32_t max_depth;
};

// Rows [begin, end), within the batch for any offsets.
struct NodeRange {
  int64_t begin;
  int64_t end;
  PT_HOST_DEVICE int64_t size() const { return end - begin; }
};

// Returns -1 if none. This binary search over the bits of the answer defines the result even for offsets that descend:
// no row belongs to two sequences, and all backends agree. Offsets have 32 bits.
PT_HOST_DEVICE int64_t sequence_of_row(const int32_t* cu_offsets, int64_t batch, int64_t row) {
  int32_t found = 0;
  for (int32_t bit = highest_bit(static_cast<int32_t>(batch)); bit > 0; bit /= 2) {
    if (found + bit <= batch && cu_offsets[found + bit] <= row) found += bit;
  }
  return found < batch && cu_offsets[found] <= row ? found : -1;
}

// Returns the rows whose search ends at `b`, which reads the same offsets for each. b = batch: rows after the last
// sequence.
PT_HOST_DEVICE NodeRange rows_of_search(const int32_t* cu_offsets, int64_t batch, int64_t b, int64_t num_rows) {
  const int32_t found = static_cast<int32_t>(b);
  int32_t begin = found == 0 ? max_of(cu_offsets[0], 0) : 0;
  int32_t end = static_cast<int32_t>(min_of<int64_t>(num_rows, INT32_MAX));
  for (int32_t bit = highest_bit(static_cast<int32_t>(batch)); bit > 0; bit /= 2) {
    const int32_t at = (found & -bit) | bit;
    if (at > batch) continue;
    const int32_t bound = cu_offsets[at];
    if ((found & bit) != 0) {
      begin = max_of(begin, bound);
    } else {
      end = min_of(end, bound);
    }
  }
  return {begin, end};
}

PT_HOST_DEVICE NodeRange node_range(const int32_t* cu_offsets, int64_t batch, int64_t b, int64_t num_rows) {
  const NodeRange rows = rows_of_search(cu_offsets, batch, b, num_rows);
  const int64_t begin = min_of(rows.begin, num_rows);
  return {begin, max_of(rows.end, begin)};
}

// Returns all rows except padding.
PT_HOST_DEVICE NodeRange used_rows(const int32_t* cu_offsets, int64_t batch, int64_t num_rows) {
  if (batch == 0) return {0, 0};
  const NodeRange first = rows_of_search(cu_offsets, batch, 0, num_rows);
  const int64_t begin = min_of(first.begin, max_of<int64_t>(first.end, 0));
  return {begin, clamp_to(rows_of_search(cu_offsets, batch, batch, num_rows).begin, begin, num_rows)};
}

// Writes all but the parent.
PT_HOST_DEVICE void clear_node(const TreeOutput& trees, int64_t row) {
  trees.depths[row] = trees.first_child[row] = trees.next_sibling[row] = -1;
  for (int32_t w = 0; w < trees.mask_words; ++w) trees.mask[row * trees.mask_words + w] = 0;
}

// Sets the bits of `node` and its ancestors. Indices fall towards the root, so words complete in order.
PT_HOST_DEVICE void write_ancestors(int32_t* words, int32_t mask_words, const int16_t* parents, int32_t node) {
  int32_t w = mask_words - 1;
  uint32_t bits = 0;
  for (; node >= 0; node = parents[node]) {
    for (; w > node / kMaskWordBits; --w) {
      words[w] = static_cast<int32_t>(bits);
      bits = 0;
    }
    bits |= 1u << (node % kMaskWordBits);
  }
  for (; w >= 0; --w) {
    words[w] = static_cast<int32_t>(bits);
    bits = 0;
  }
}

PT_HOST_DEVICE void clear_row(const TreeOutput& trees, int64_t row) {
  trees.parents[row] = -1;
  clear_node(trees, row);
}

// Links `node` of the tree at row `begin`, after the nodes before it. `last_child` has an entry per node.
PT_HOST_DEVICE void append_child(const TreeOutput& trees, int64_t begin, int32_t node, int32_t parent,
                                 int16_t* last_child) {
  trees.first_child[begin + node] = trees.next_sibling[begin + node] = last_child[node] = -1;
  if (parent < 0) return;
  const int16_t older = last_child[parent];
  (older < 0 ? trees.first_child[begin + parent] : trees.next_sibling[begin + older]) = node;
  last_child[parent] = static_cast<int16_t>(node);
}

// Returns true for a well-formed tree. Parents precede children, so one pass in index order suffices and terminates.
// `last_child`: scratch of kMaxTreeNodes entries.
PT_HOST_DEVICE bool build_tree(const BuildTreesParams& p, int64_t b, int16_t* last_child) {
  const NodeRange rows = node_range(p.cu_nodes, p.batch, b, p.num_rows);
  const TreeOutput& trees = p.trees;
  bool valid = rows.size() > 0 && rows.size() <= p.max_nodes;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    clear_node(trees, row);
    const int32_t node = static_cast<int32_t>(row - rows.begin);
    const int32_t parent = p.parents[row];
    if (node == 0) {
      valid = valid && parent == -1;
      trees.depths[row] = 0;
    } else {
      const bool known = node < p.max_nodes && parent >= 0 && parent < node;
      const int32_t parent_depth = known ? trees.depths[rows.begin + parent] : -1;
      if (parent_depth < 0 || parent_depth >= p.max_depth) {
        valid = false;
        continue;
      }
      trees.depths[row] = parent_depth + 1;
      for (int32_t w = 0; w < trees.mask_words; ++w) {
        trees.mask[row * trees.mask_words + w] = trees.mask[(rows.begin + parent) * trees.mask_words + w];
      }
    }
    append_child(trees, rows.begin, node, node == 0 ? -1 : parent, last_child);
    int32_t& word = trees.mask[row * trees.mask_words + node / kMaskWordBits];
    word = static_cast<int32_t>(static_cast<uint32_t>(word) | (1u << (node % kMaskWordBits)));
  }
  return valid;
}

// Masks of booleans or additive biases.
struct MaskWordsParams {
  const void* mask;         // [T, columns]
  const int32_t* cu_nodes;  // [B + 1]: columns are the batch's rows; null: nodes of the row's tree
  int32_t* words;           // [T, num_words] out, contiguous
  int64_t row_stride;       // of the mask, in elements
  int64_t column_stride;
  int64_t num_rows;
  int64_t batch;
  int32_t max_nodes;
  int32_t num_words;
  DType dtype;
  bool is_bool;
};

PT_HOST_DEVICE int64_t num_items(const MaskWordsParams& p) { return p.num_rows * p.num_words; }

PT_HOST_DEVICE float bias_at(const MaskWordsParams& p, int64_t at) {
  if (p.dtype == DType::kFloat32) return static_cast<const float*>(p.mask)[at];
  const uint16_t bits = static_cast<const uint16_t*>(p.mask)[at];
  return p.dtype == DType::kFloat16 ? float_from_half(bits) : float_from_bfloat16(bits);
}
// Returns false for -10000 or less, a number that bf16 rounds.
PT_HOST_DEVICE bool shows(const MaskWordsParams& p, float bias) {
  return bias > (p.dtype == DType::kBFloat16 ? -9984.0f : -10000.0f);
}

PT_HOST_DEVICE NodeRange columns_of(const MaskWordsParams& p, int64_t row) {
  if (p.cu_nodes == nullptr) return {0, p.max_nodes};
  const int64_t b = sequence_of_row(p.cu_nodes, p.batch, row);
  return b < 0 ? NodeRange{0, 0} : node_range(p.cu_nodes, p.batch, b, p.num_rows);
}

PT_HOST_DEVICE void write_mask_word(const MaskWordsParams& p, int64_t i) {
  const int64_t row = i / p.num_words, first = i % p.num_words * kMaskWordBits;
  const NodeRange columns = columns_of(p, row);
  const int64_t end = min_of<int64_t>(min_of<int64_t>(columns.size(), p.max_nodes), first + kMaskWordBits);
  uint32_t bits = 0;
  for (int64_t j = first; j < end; ++j) {
    const int64_t at = row * p.row_stride + (columns.begin + j) * p.column_stride;
    const bool sees = p.is_bool ? static_cast<const uint8_t*>(p.mask)[at] != 0 : shows(p, bias_at(p, at));
    bits |= static_cast<uint32_t>(sees) << (j - first);
  }
  p.words[i] = static_cast<int32_t>(bits);
}

}  // namespace pagedtree
