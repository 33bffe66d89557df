// Launch parameters of the attention kernels, and the layout of a call's scratch.
#pragma once

#include <vector_types.h>

#include "core/segments.h"
#include "cuda/attention/row_tile.cuh"

namespace pagedtree::cuda {

// A partial result: row states (maximum in base 2, sum) and unnormalized output [rows, Dv].
struct Piece {
  float2* states;
  float* out;
};

// Position among a row tile's partial results, in key order: CTA `first`'s, then every `sharers`th CTA's after it.
struct PieceOrder {
  int32_t first, number, count;
};

// A CTA's record of a split row tile.
struct Cut : TileRows {
  PieceOrder order;
};

// Partial results in scratch, and tickets in the plan. A split row tile has one per range that overlaps it. A range has
// up to two: of the row tile in which it begins, and of one that it leaves unfinished, as that one's first.
struct Pieces {
  float* memory;  // [2, capacity, rows * (head_dim_v + 2)]: first ones of row tiles, others; then the cuts
  int32_t* plan;  // of the list
  int32_t capacity;
  int32_t rows;
  int32_t head_dim_v;
  int64_t segment_rows = 0;  // of all segments; then memory has outputs [segment_rows, head_dim_v] and states

  PT_HOST_DEVICE int64_t floats() const { return int64_t{rows} * (head_dim_v + 2); }
  PT_HOST_DEVICE int64_t bytes() const {
    return 2 * capacity * (floats() * int64_t{sizeof(float)} + int64_t{sizeof(Cut)});
  }
  PT_HOST_DEVICE Cut* cuts(int32_t cta) const {
    return reinterpret_cast<Cut*>(memory + 2 * capacity * floats()) + 2 * cta;
  }
  PT_HOST_DEVICE Piece of(int32_t cta, bool is_first) const {
    float* piece = memory + ((is_first ? 0 : capacity) + cta) * floats();
    return {reinterpret_cast<float2*>(piece), piece + 2 * rows};
  }
  // Returns the partial result at the end of the CTA's range, or at its beginning.
  __device__ __forceinline__ Piece of(const Share& share, bool is_first) const {
    const PieceOrder& order = cuts(share.cta)[is_first].order;
    return of(order.first + order.number * share.sharers, is_first);
  }
  // Returns the tile's rows in the segment of a KV tile. Each segment has all rows of the call.
  __device__ __forceinline__ Piece of_segment(const AttentionParams& p, const WorkShape& work, const TileRows& tile,
                                              int32_t kv_tile) const {
    const int64_t row = row_in_segments(p, work, kv_tile, tile.kv_head, tile.first_token) + tile.first_row;
    return {reinterpret_cast<float2*>(memory + segment_rows * head_dim_v) + row, memory + row * head_dim_v};
  }
  // Returns a ticket, in the last two words of the CTA's plan entry; 0 between calls.
  PT_HOST_DEVICE unsigned* ticket(int32_t cta, bool is_first) const {
    return reinterpret_cast<unsigned*>(plan + kPlanEntry * (cta + 2) - (is_first ? 2 : 1));
  }
};

struct CallShape {
  WorkShape work;
  Pieces pieces;
  int stages;
  float q_factor;  // score factor, if Q needs no conversion (16-bit caches); else 0
  bool q_aligned;  // 16-byte aligned
  bool out_aligned;
};

// Returns the launch's scratch with compile-time sizes.
template <typename I>
__device__ __forceinline__ Pieces pieces_of(const CallShape& call) {
  Pieces known = call.pieces;
  known.rows = I::kMTile;
  known.head_dim_v = I::kHeadDimV;
  return known;
}

}  // namespace pagedtree::cuda
