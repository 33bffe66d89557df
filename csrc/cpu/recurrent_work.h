// Memory of a delta-rule work item.
#pragma once

#include "core/recurrent.h"

namespace pagedtree::cpu {

constexpr int64_t kDeltaPadding = 32;   // columns: a multiple of every panel
constexpr int64_t kConvChannels = 128;  // of one work item

// A token's path under channel decays (cpu/isa/recurrent/channel_decays.h).
struct PathBlock {
  int32_t first;       // first token of the current block
  int32_t number = 0;  // index of this block in its path
  int32_t tokens = 0;  // tokens of the path
  int32_t end = 0;     // last token of the visited block
  bool walks = false;
};

// Rows are tokens; columns are zero-padded. Consecutive value heads reuse the data that depends only on their key head.
struct DeltaScratch {
  int64_t rows;          // capacity
  int64_t keys_width;    // Dk, padded
  int64_t values_width;  // Dv, padded
  int64_t pairs_width;   // rows, padded
  int64_t loaded = -1;   // b * Hk + key head of the loaded tokens if they are the whole sequence, else -1
  int32_t count = 0;     // tokens
  int32_t* nodes;        // [rows]
  int32_t* parents;      // [rows]
  int32_t* place;        // [rows]
  float* keys;           // [2 rows, keys_width]: keys, then queries
  float* key_panels;     // in panels of tile/gemm.h, transposed; divided by P under channel decays
  float* key_weights;    // [rows, pairs_width]: A of docs/notes/recurrent.md, without decays of heads
  float* query_weights;  // [rows, pairs_width]: C, likewise
  float* betas;          // [rows]
  float* decays;         // [rows]: exp(g) of the head; 1 under channel decays
  float* path_decays;    // [rows]: product over the path
  // Channel decays only:
  PathBlock* blocks;           // [rows]
  float* channel_decays;       // [rows, keys_width]: exp(g)
  float* block_decays;         // [rows, keys_width]: P
  float* channel_path_decays;  // [rows, keys_width]: product over the path
  float* decayed;              // [2 rows, keys_width]: keys and queries times path decays
  float* key_products;         // [rows, pairs_width]: weights of other blocks
  float* query_products;       // [rows, pairs_width]
  float* values;               // [2 rows, values_width]: reads of the state; the first half becomes u
  float* value;                // [values_width]
  float* carry;                // [keys_width]
  float* state;                // in panels

  int64_t assign(const DeltaRuleParams& p, float* memory) {
    const RecurrentBatch& tokens = p.tokens;
    const bool whole_tree = tokens.parents != nullptr && p.out != nullptr;
    const auto padded = [](int64_t count) { return ceil_div<int64_t>(count, kDeltaPadding) * kDeltaPadding; };
    rows = max_of<int64_t>(whole_tree ? min_of<int64_t>(tokens.max_nodes, tokens.num_rows) : kCausalChunk, 1);
    keys_width = padded(p.key_dim);
    values_width = padded(p.value_dim);
    pairs_width = padded(rows);
    int64_t used = 0;
    const auto take = [&](int64_t count) {
      float* part = memory == nullptr ? nullptr : memory + used;
      used += ceil_div<int64_t>(count, 16) * 16;
      return part;
    };
    nodes = reinterpret_cast<int32_t*>(take(rows));
    parents = reinterpret_cast<int32_t*>(take(rows));
    place = reinterpret_cast<int32_t*>(take(rows));
    keys = take(2 * rows * keys_width);
    key_panels = take(pairs_width * keys_width);
    key_weights = take(rows * pairs_width);
    query_weights = take(rows * pairs_width);
    betas = take(rows);
    decays = take(rows);
    path_decays = take(rows);
    const int64_t channels = p.channel_decay ? rows * keys_width : 0, pairs = p.channel_decay ? rows * pairs_width : 0;
    static_assert(sizeof(PathBlock) <= 8 * sizeof(float));
    blocks = reinterpret_cast<PathBlock*>(take(8 * rows));
    channel_decays = take(channels);
    block_decays = take(channels);
    channel_path_decays = take(channels);
    decayed = take(2 * channels);
    key_products = take(pairs);
    query_products = take(pairs);
    values = take(2 * rows * values_width);
    value = take(values_width);
    carry = take(keys_width);
    state = take(p.key_dim * values_width);
    return used;
  }
};

}  // namespace pagedtree::cpu
