// Interface between attention.cpp and the kernels of an instruction set.
#pragma once

#include "core/ranges.h"
#include "core/segments.h"

namespace pagedtree::cpu {

constexpr int kMTile = 128;            // rows of an M tile
constexpr int kFewRows = 8;            // smaller heads are bound by memory: see engine_dot.h
constexpr int kMaxRanges = 256;        // more than threads, which claim them one by one
constexpr int64_t kMinRangeCost = 16;  // KV tiles
constexpr int32_t kMinPieceTiles = 6;
constexpr RangeLimits kRangeLimits = {kMaxRanges, SmallDivisor(1), kMinRangeCost, kMinPieceTiles, INFINITY};
constexpr int64_t kScratchAlignment = 64;

// Returns the KV heads per row tile for heads with few rows: together they read runs of 1024 elements.
PT_HOST_DEVICE constexpr int32_t few_rows_heads(int64_t head_dim) {
  return static_cast<int32_t>(clamp_to<int64_t>(1024 / head_dim, 1, kMTile / kFewRows));
}

// Partial results of a piece: unnormalised output [rows, Dv], base-2 maximum [rows], sum [rows].
struct Piece {
  float* out;
  float* maximum;
  float* sum;
};

// Ranges of a call. Each has two pieces: kHead is the first piece of a range that begins inside a row tile, kTail the
// last piece of a range that ends inside a row tile that it began. Segments instead have a place for every row.
struct AttentionRanges {
  enum End { kHead, kTail };

  WorkShape shape;
  WorkPosition starts[kMaxRanges + 1];
  int32_t count;
  float* pieces;
  int64_t piece_rows;  // capacity of a piece, or rows of all segments
  int64_t head_dim_v;

  PT_HOST_DEVICE static constexpr int64_t piece_floats(int64_t rows, int64_t head_dim_v) {
    return rows * (head_dim_v + 2);
  }

  PT_HOST_DEVICE Piece piece(int32_t range, End end) const {
    float* base = pieces + (2 * range + end) * piece_floats(piece_rows, head_dim_v);
    return {base, base + piece_rows * head_dim_v, base + piece_rows * (head_dim_v + 1)};
  }
  // Returns the rows of a KV head in the segment with this KV tile.
  PT_HOST_DEVICE Piece segment(const TreeAttentionParams& p, int32_t kv_tile, int32_t kv_head,
                               int64_t first_token) const {
    const int64_t row = row_in_segments(p, shape, kv_tile, kv_head, first_token);
    return {pieces + row * head_dim_v, pieces + piece_rows * head_dim_v + row,
            pieces + piece_rows * (head_dim_v + 1) + row};
  }
};

struct AttentionRange {
  const AttentionRanges* ranges;
  int32_t index;
  void* workspace;  // workspace_bytes(), aligned to kScratchAlignment
};

// Floats for Q, K, V, scores and output of a tile in fp32 (narrower kernels need less), and row states.
PT_HOST_DEVICE constexpr int64_t workspace_floats(int64_t head_dim, int64_t head_dim_v) {
  return (kMTile + kKvTile) * (head_dim + head_dim_v) + kMTile * kKvTile + 4 * kMTile;
}

}  // namespace pagedtree::cpu
