// The kernel that runs after attention: joins the pieces of row tiles that a cut crosses.
#pragma once

#include "cuda/attention/output.cuh"
#include "cuda/attention/ranges.cuh"

namespace pagedtree::cuda {

constexpr int kJoinThreads = 128;
constexpr int kPiecesAtOnce = 8;  // their loads are in flight together

// Four columns of a row, joined some pieces at a time in the order of the keys.
struct JoinedColumns {
  static constexpr int kColumns = 4;
  float maximum = -kInfinity, sum = 0.0f;
  float values[kColumns] = {};

  // Pieces [begin, min(begin + kPiecesAtOnce, end)) of the row tile that range `owner` begins.
  __device__ __forceinline__ void add(const Pieces& pieces, int32_t owner, int32_t begin, int32_t end, uint32_t row,
                                      uint32_t column) {
    float2 states[kPiecesAtOnce];
    float4 outs[kPiecesAtOnce];
    float top = maximum;
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {  // past the end the last piece again: branches would part the loads
      const int32_t number = min_of(begin + i, end - 1);
      const Piece piece = pieces.of(owner + number, number == 0);
      states[i] = __ldcg(piece.states + row);
      outs[i] = __ldcg(reinterpret_cast<const float4*>(piece.out + row * pieces.head_dim_v + column));
      top = fmaxf(top, states[i].x);
    }
    const float kept = weight_of(maximum, top);
    maximum = top;
    sum *= kept;
#pragma unroll
    for (float& value : values) value *= kept;
    float weights[kPiecesAtOnce];
    bool all_count = true;
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {
      weights[i] = weight_of(states[i].x, top);
      all_count = all_count && weights[i] != 0.0f && begin + i < end;
    }
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {
      if (!all_count && (weights[i] == 0.0f || begin + i >= end)) continue;  // this piece may hold anything
      sum = __fmaf_rn(states[i].y, weights[i], sum);
      const float of_piece[kColumns] = {outs[i].x, outs[i].y, outs[i].z, outs[i].w};
#pragma unroll
      for (int d = 0; d < kColumns; ++d) values[d] = __fmaf_rn(of_piece[d], weights[i], values[d]);
    }
  }
};

// CTA (range, part of the rows, list) joins a row tile if the tile's first cut is where the range begins.
template <typename T>
__global__ void __launch_bounds__(kJoinThreads)
    join_kernel(const __grid_constant__ TreeAttentionParams p, const __grid_constant__ CallShapes calls) {
  ptx::wait_for_kernels_before();
  const CallShape& call = calls.lists[blockIdx.z];
  const CallRanges ranges(call.work, p.plan, call.pieces.capacity);
  const int32_t owner = static_cast<int32_t>(blockIdx.x), cut_range = owner + 1;
  if (cut_range >= ranges.count) return;
  const WorkPosition begin = ranges.start(owner), cut = ranges.start(cut_range);
  const auto is_inside = [&](const WorkPosition& at) { return at.kv_tile > 0 && at.same_row(cut); };
  if (!is_inside(cut) || is_inside(begin)) return;
  int32_t num_pieces = 1;  // plus one for each range that begins inside the row tile
  for (int32_t first = cut_range, found = kJoinThreads; found == kJoinThreads; first += kJoinThreads) {
    const int32_t range = first + static_cast<int32_t>(threadIdx.x);
    found = __syncthreads_count(range < ranges.count && is_inside(ranges.start(range)));
    num_pieces += found;
  }

  const SequenceWork work = sequence_work(call.work, cut.sequence);
  const RowTile tile = row_tile(p, work, cut.sequence, cut.row_tile, call.pieces.rows);
  const ToOutput<T> output{p, tile, call.out_aligned};
  const uint32_t vectors = static_cast<uint32_t>(call.pieces.head_dim_v) / JoinedColumns::kColumns;
  for (uint32_t i = blockIdx.y * kJoinThreads + threadIdx.x; i < tile.rows * vectors; i += gridDim.y * kJoinThreads) {
    const uint32_t row = i / vectors, column = i % vectors * JoinedColumns::kColumns;
    JoinedColumns joined;
    for (int32_t k = 0; k < num_pieces; k += kPiecesAtOnce) {
      joined.add(call.pieces, owner, k, num_pieces, row, column);
    }
    output.row(row, joined.maximum, joined.sum, column == 0).store(column, joined.values);
  }
}

}  // namespace pagedtree::cuda
