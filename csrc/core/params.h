// Params shared by op families; every pointer has its [shape]. `x_stride` strides rows of x in elements. B sequences, N
// tree nodes (rows) in the batch, T query tokens, V vocabulary.
#pragma once

#include "core/common.h"

namespace pagedtree {

struct LogitsParams {
  const void* data;              // [rows, V]
  const uint8_t* allowed;        // [rows, V] or null
  const int32_t* allowed_words;  // [rows, ceil(V / 32)] or null: bit x % 32 of word x / 32 allows token x
  int64_t num_rows;
  int64_t vocab;  // V
  int64_t row_stride;
  int64_t allowed_stride;  // of the mask in use
  DType dtype;
};

// Sampling parameters: each pointer is [1] or [B], with stride 0 or 1.
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

struct Integers {
  const void* data;
  bool is_int64;
};

PT_HOST_DEVICE int64_t integer_at(const Integers& integers, int64_t i) {
  return integers.is_int64 ? static_cast<const int64_t*>(integers.data)[i]
                           : static_cast<const int32_t*>(integers.data)[i];
}

// Returns rows[b], or b if `rows` is null; -1 if out of the pool.
PT_HOST_DEVICE int64_t row_in_pool(const int32_t* rows, int64_t size, int64_t b) {
  const int64_t row = rows == nullptr ? b : rows[b];
  return row >= 0 && row < size ? row : -1;
}

// Request options (core/options.h applies them). A null pointer disables one.
struct OptionsParams {
  const float* repetition;  // penalties are [1] or [B], strides 0 or 1
  const float* presence;
  const float* frequency;
  const int32_t* prompt_mask;    // [B, ceil(V / 32)] packed
  const int32_t* output_counts;  // [B, V]
  const int32_t* allowed_mask;   // [B, ceil(V / 32)] packed
  const int32_t* bias_tokens;    // [num_bias]
  const float* bias_values;      // [num_bias]
  const int32_t* cu_bias;        // [B + 1]
  const int32_t* bad_tokens;     // [num_bad_tokens]
  const int32_t* cu_bad_words;   // [num_bad_words + 1]
  const int32_t* cu_bad_seqs;    // [B + 1]
  const int64_t* history;        // [B, history_width]
  const int32_t* history_lens;   // [B]
  const int32_t* history_start;  // [B]
  const int32_t* stop_ids;       // [B, num_stops], -1: none
  const int64_t* min_position;   // [B]
  Integers positions;            // [B] of the rows or of the roots; data null: unknown
  const int32_t* cu_nodes;       // [B + 1] trees, with the next fields; null: row n is sequence n
  const int32_t* parents;        // [num_rows]
  const int32_t* depths;         // [num_rows]
  Integers draft_tokens;         // [num_rows]
  Integers draft_to_target;      // [draft_vocab]; data null: drafts are target ids
  float* scratch;                // [scratch_rows, scratch_stride] for backends that cannot allocate
  int64_t batch, num_rows, draft_vocab;
  int64_t vocab;        // V, of all ranks
  int64_t first_token;  // id of this rank's first column
  int64_t num_bias, num_bad_tokens, num_bad_words, num_stops;
  int64_t history_width;
  int64_t prompt_stride, counts_stride, allowed_stride, history_stride, stops_stride;
  int64_t scratch_rows, scratch_stride;
  int32_t repetition_stride, presence_stride, frequency_stride;
  bool used;  // true if any is set
};

// Page ids in order of position.
struct PageTable {
  const int32_t* pages;  // [B, max_pages]
  int64_t row_stride;
  int64_t max_pages;
  int64_t page_size;
};

}  // namespace pagedtree
