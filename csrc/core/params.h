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

// Rows of logits, read in their own dtype, and what a grammar allows in them.
struct LogitsParams {
  const void* data;              // [rows, V]
  const bool* allowed;           // [rows, V] or null
  const int32_t* allowed_words;  // [rows, ceil(V / 32)] or null: bit x % 32 of word x / 32 = token x is allowed
  int64_t num_rows;
  int64_t vocab;           // V
  int64_t row_stride;      // in elements
  int64_t allowed_stride;  // in elements of whichever of the two
  DType dtype;
};

// Sampling parameters; each pointer is [1] or [B], its stride 0 or 1.
struct SamplingParams {
  const float* temperature;  // null: greedy
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  int32_t temperature_stride;
  int32_t top_k_stride;
  int32_t top_p_stride;
  int32_t min_p_stride;
  bool joint;  // filter_order "joint"
};

struct SampleParams {
  LogitsParams logits;       // R rows
  SamplingParams sampling;   // of R
  const int64_t* seeds;      // [R]
  const int64_t* positions;  // [R]
  int64_t* tokens;           // [R] out
};

// Token ids, int32 or int64.
struct TokenIds {
  const void* data;
  bool is_int64;
};

// Trees with drafts, and the rows of logits at their nodes.
struct VerifyParams {
  LogitsParams logits;          // N rows
  SamplingParams sampling;      // of B
  TokenIds draft_tokens;        // [N]
  TokenIds draft_to_target;     // [draft_vocab], data null: drafts are target ids already
  const int32_t* cu_nodes;      // [B + 1]
  const int32_t* first_child;   // [N]
  const int32_t* next_sibling;  // [N]
  const bool* valid;            // [B]
  const int64_t* seeds;         // [B], null where sampling is greedy
  const int64_t* positions;     // [B], null where sampling is greedy
  int32_t* accept_index;        // [B, max_depth + 1] out
  int32_t* num_accepted;        // [B] out
  int64_t* tokens;              // [B, max_depth + 1] out
  int32_t* status;              // [B] out
  int64_t batch;
  int64_t draft_vocab;
  int32_t max_nodes;
  int32_t max_depth;
};

}  // namespace pagedtree
