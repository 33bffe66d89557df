// The memory of one work item of the delta rule; the same for each instruction set.
#pragma once

#include "core/recurrent.h"

namespace pagedtree::cpu {

constexpr int64_t kDeltaPadding = 32;   // columns: a multiple of each instruction set's panel
constexpr int64_t kConvChannels = 128;  // of one work item

// Rows are tokens of a chunk; columns are padded with zeros.
struct DeltaScratch {
  int64_t rows;          // that there is room for
  int64_t keys_width;    // Dk, padded
  int64_t values_width;  // Dv, padded
  int32_t* nodes;        // [rows]
  int32_t* parents;      // [rows]
  int32_t* place;        // [rows]
  float* betas;          // [rows]
  float* keys;           // [rows, keys_width]
  float* decays;         // [rows, keys_width], or [rows]: exp(g)
  float* reads;          // [2 rows, keys_width]: keys, then queries, with the decays of the whole path
  float* key_weights;    // [rows, rows]: A of docs/notes/recurrent.md
  float* query_weights;  // [rows, rows]: C
  float* values;         // [2 rows, values_width]: what the reads give; the first half becomes u
  float* carry;          // [keys_width]
  float* state;          // in panels

  // Lays the parts out from `memory` on; returns how many floats they take.
  int64_t assign(const DeltaRuleParams& p, float* memory) {
    const RecurrentBatch& tokens = p.tokens;
    const bool whole_tree = tokens.parents != nullptr && p.out != nullptr;
    rows = max_of<int64_t>(whole_tree ? min_of<int64_t>(tokens.max_nodes, tokens.num_rows) : kCausalChunk, 1);
    keys_width = ceil_div<int64_t>(p.key_dim, kDeltaPadding) * kDeltaPadding;
    values_width = ceil_div<int64_t>(p.value_dim, kDeltaPadding) * kDeltaPadding;
    int64_t used = 0;
    const auto take = [&](int64_t count) {
      float* part = memory == nullptr ? nullptr : memory + used;
      used += ceil_div<int64_t>(count, 16) * 16;
      return part;
    };
    nodes = reinterpret_cast<int32_t*>(take(rows));
    parents = reinterpret_cast<int32_t*>(take(rows));
    place = reinterpret_cast<int32_t*>(take(rows));
    betas = take(rows);
    keys = take(rows * keys_width);
    decays = take(rows * (p.channel_decay ? keys_width : 1));
    reads = take(2 * rows * keys_width);
    key_weights = take(rows * rows);
    query_weights = take(rows * rows);
    values = take(2 * rows * values_width);
    carry = take(keys_width);
    state = take(p.key_dim * values_width);
    return used;
  }
};

}  // namespace pagedtree::cpu
