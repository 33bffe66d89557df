// What the host passes to the attention kernels besides the op's parameters, and how a call's scratch is used.
#pragma once

#include <vector_types.h>

#include "core/segments.h"
#include "cuda/attention/row_tile.cuh"

namespace pagedtree::cuda {

// The partial results of a piece: row states (maximum in base 2, sum) and unnormalised output [piece_rows, Dv].
struct Piece {
  float2* states;
  float* out;
};

// Where a piece stands among those of its row tile, in the order of the keys. The first is CTA `first`'s, the next ones
// those of every `sharers`th CTA behind it.
struct PieceOrder {
  int32_t first, number, count;
};

// What a CTA keeps of a row tile of which it has a piece.
struct Cut : TileRows {
  PieceOrder order;
};

// The pieces in scratch, and the tickets by which CTAs join them, in the plan. A row tile that is cut has one piece for
// each range that it lies in. A range has up to two pieces: one of the row tile inside which it begins, and one of a
// row tile that it leaves unfinished, the first of that.
struct Pieces {
  float* memory;  // [2, capacity, rows * (head_dim_v + 2)]: first pieces of row tiles, others; then the cuts
  int32_t* plan;  // of the list
  int32_t capacity;
  int32_t rows;
  int32_t head_dim_v;
  int64_t segment_rows = 0;  // of all segments: then memory has their outputs [segment_rows, head_dim_v] and states

  PT_HOST_DEVICE int64_t floats() const { return int64_t{rows} * (head_dim_v + 2); }
  PT_HOST_DEVICE int64_t bytes() const {
    return 2 * capacity * (floats() * int64_t{sizeof(float)} + int64_t{sizeof(Cut)});
  }
  // Of a CTA, at the begin and the end of its range.
  PT_HOST_DEVICE Cut* cuts(int32_t cta) const {
    return reinterpret_cast<Cut*>(memory + 2 * capacity * floats()) + 2 * cta;
  }
  PT_HOST_DEVICE Piece of(int32_t cta, bool is_first) const {
    float* piece = memory + ((is_first ? 0 : capacity) + cta) * floats();
    return {reinterpret_cast<float2*>(piece), piece + 2 * rows};
  }
  // The CTA's own piece of the row tile at the end of its range, or else at the begin.
  __device__ __forceinline__ Piece of(const Share& share, bool is_first) const {
    const PieceOrder& order = cuts(share.cta)[is_first].order;
    return of(order.first + order.number * share.sharers, is_first);
  }
  // Of the tile's rows, in the segment that has the KV tile. Every row of the call has its place in each segment.
  __device__ __forceinline__ Piece of_segment(const AttentionParams& p, const WorkShape& work, const TileRows& tile,
                                              int32_t kv_tile) const {
    const int64_t row = row_in_segments(p, work, kv_tile, tile.kv_head, tile.first_token) + tile.first_row;
    return {reinterpret_cast<float2*>(memory + segment_rows * head_dim_v) + row, memory + row * head_dim_v};
  }
  // The last words of the CTA's entry; 0 between calls.
  PT_HOST_DEVICE unsigned* ticket(int32_t cta, bool is_first) const {
    return reinterpret_cast<unsigned*>(plan + kPlanEntry * (cta + 2) - (is_first ? 2 : 1));
  }
};

// One launch, for one list of sequences.
struct CallShape {
  WorkShape work;
  Pieces pieces;
  int stages;
  float q_factor;  // of scores, if Q is multiplied as it is where a cache has 16 bits; 0: it is not
  bool q_aligned;  // rows are read 16 bytes at a time
  bool out_aligned;
};

// The pieces of a launch for one kind of tile: the compiler knows their size.
template <typename I>
__device__ __forceinline__ Pieces pieces_of(const CallShape& call) {
  Pieces known = call.pieces;
  known.rows = I::kMTile;
  known.head_dim_v = I::kHeadDimV;
  return known;
}

}  // namespace pagedtree::cuda
