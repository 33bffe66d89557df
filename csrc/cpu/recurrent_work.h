// The memory of one work item of the delta rule; the same for each instruction set.
#pragma once

#include "core/recurrent.h"

namespace pagedtree::cpu {

constexpr int64_t kDeltaPadding = 32;   // columns: a multiple of each instruction set's panel
constexpr int64_t kConvChannels = 128;  // of one work item

// Decays of channels: where a token's path stands, cpu/isa/recurrent/channel_decays.h.
struct PathBlock {
  int32_t first;       // token of its block
  int32_t number = 0;  // of blocks of its path
  int32_t tokens = 0;  // of its path
  int32_t end = 0;     // the last token of the block that is looked at
  bool walks = false;
};

// Rows are tokens of a chunk; columns are padded with zeros. Value heads that share a key head follow each other, and
// find what depends on that alone as the one before left it.
struct DeltaScratch {
  int64_t rows;          // that there is room for
  int64_t keys_width;    // Dk, padded
  int64_t values_width;  // Dv, padded
  int64_t pairs_width;   // rows, padded
  int64_t loaded = -1;   // b * Hk + key head of the tokens below, if they are all of its sequence
  int32_t count = 0;     // tokens
  int32_t* nodes;        // [rows]
  int32_t* parents;      // [rows]
  int32_t* place;        // [rows]
  float* keys;           // [2 rows, keys_width]: keys, then queries
  float* key_panels;     // keys, with decays of channels divided by P, in panels of tile/gemm.h, transposed
  float* key_weights;    // [rows, pairs_width]: A of docs/notes/recurrent.md, with decays of channels alone
  float* query_weights;  // [rows, pairs_width]: C, likewise
  float* betas;          // [rows]
  float* decays;         // [rows]: exp(g) of the head; 1 where each channel has its own
  float* path_decays;    // [rows]: their products over the path
  // Decays of channels only:
  PathBlock* blocks;           // [rows]
  float* channel_decays;       // [rows, keys_width]: exp(g)
  float* block_decays;         // [rows, keys_width]: P
  float* channel_path_decays;  // [rows, keys_width]: products over the path
  float* decayed;              // [2 rows, keys_width]: keys and queries with the decays of the whole path
  float* key_products;         // [rows, pairs_width]: weights of tokens of other blocks
  float* query_products;       // [rows, pairs_width]
  float* values;               // [2 rows, values_width]: what they read of the state; the first half becomes u
  float* value;                // [values_width]
  float* carry;                // [keys_width]
  float* state;                // in panels

  // Lays the parts out from `memory` on; returns how many floats they take.
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
