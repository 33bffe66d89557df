// What the torch layer hands to a backend: plain structs, a [shape] on every pointer.
// B sequences, N tree nodes (rows) in the batch, T query tokens, V vocabulary.
#pragma once

#include "core/common.h"

namespace pagedtree {

struct BuildTreesParams {
  const int32_t* parents;   // [N] local index in the tree, -1 at the root
  const int32_t* cu_nodes;  // [B + 1]
  int32_t* depths;          // [N] out
  int32_t* first_child;     // [N] out
  int32_t* next_sibling;    // [N] out
  int32_t* mask;            // [N, mask_words] out, contiguous
  bool* valid;              // [B] out
  int64_t batch;
  int64_t num_rows;  // N, padding rows included
  int32_t max_nodes;
  int32_t max_depth;
  int32_t mask_words;
};

}  // namespace pagedtree
