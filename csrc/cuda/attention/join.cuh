// How CTAs join the pieces of a row tile that cuts cross. Eight neighbours make a group. The last CTA to finish one
// joins the group's pieces into the first of them, and goes on as the CTA of that larger piece, until a group is the
// whole row tile. No CTA waits for another one, and the sums do not depend on which CTA comes last.
#pragma once

#include <bit>

#include "cuda/attention/output.cuh"

namespace pagedtree::cuda {

constexpr int32_t kGroupPieces = 8;

// A thread's columns of a row.
template <typename I>
struct JoinedColumns {
  static constexpr uint32_t kVectors = I::kHeadDimV > 256 ? 4 : 2;   // of four columns
  static constexpr uint32_t kThreads = I::kHeadDimV / 4 / kVectors;  // of a warp, that have the columns of a row
  float maximum = -kInfinity, sum = 0.0f;
  float values[kVectors][4] = {};

  static __device__ __forceinline__ uint32_t column(uint32_t thread, uint32_t vector) {
    return (vector * kThreads + thread) * 4;
  }

  // Loads are in flight together. Pieces past `size` are not there, and those of weight 0 may hold anything.
  template <typename PieceOf>
  __device__ __forceinline__ JoinedColumns(const PieceOf& piece_of, int32_t size, uint32_t row, uint32_t thread) {
    float2 states[kGroupPieces];
    float4 outs[kGroupPieces][kVectors];
#pragma unroll
    for (int32_t i = 0; i < kGroupPieces; ++i) {
      states[i] = make_float2(-kInfinity, 0.0f);
      if (i >= size) continue;
      const Piece piece = piece_of(i);
      states[i] = __ldcg(piece.states + row);
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v) {
        outs[i][v] = __ldcg(reinterpret_cast<const float4*>(piece.out + row * I::kHeadDimV + column(thread, v)));
      }
    }
#pragma unroll
    for (const float2& state : states) maximum = fmaxf(maximum, state.x);
#pragma unroll
    for (int32_t i = 0; i < kGroupPieces; ++i) {
      const float weight = weight_of(states[i].x, maximum);
      if (weight == 0.0f) continue;
      sum = __fmaf_rn(states[i].y, weight, sum);
#pragma unroll
      for (uint32_t v = 0; v < kVectors; ++v) {
        const float of_piece[4] = {outs[i][v].x, outs[i][v].y, outs[i][v].z, outs[i][v].w};
#pragma unroll
        for (int d = 0; d < 4; ++d) values[v][d] = __fmaf_rn(of_piece[d], weight, values[v][d]);
      }
    }
  }

  template <typename Target>
  __device__ __forceinline__ void store(const Target& target, uint32_t row, uint32_t thread) const {
    const typename Target::Row to = target.row(row, maximum, sum, thread == 0);
#pragma unroll
    for (uint32_t v = 0; v < kVectors; ++v) to.store(column(thread, v), values[v]);
  }
};

// Joins the pieces of `rows` rows, each row by neighbouring threads of a warp, into the first one or to the output.
template <typename I, typename T, typename PieceOf>
__device__ __forceinline__ void join_group(const PieceOf& piece_of, int32_t size, uint32_t rows, uint32_t num_threads,
                                           bool is_whole, const ToOutput<T>& output) {
  using Columns = JoinedColumns<I>;
  constexpr uint32_t kLanes = std::bit_ceil(Columns::kThreads);
  static_assert(kLanes <= 32);
#pragma unroll 1
  for (uint32_t i = ptx::thread_index(); i / 32 * 32 < rows * kLanes; i += num_threads) {
    const uint32_t row = i / kLanes, lane = i % kLanes;
    const bool has_columns = row < rows && lane < Columns::kThreads;
    const Columns joined(piece_of, has_columns ? size : 0, row, lane);
    __syncwarp();  // the row's states are read
    if (!has_columns) continue;
    if (is_whole) {
      joined.store(output, row, lane);
    } else {
      joined.store(ToPiece{piece_of(0), I::kHeadDimV}, row, lane);
    }
  }
}

// Joins what is ready with a piece, which the `num_threads` threads of the CTA have stored; meet() is their barrier.
template <typename I, typename Meet>
__device__ __forceinline__ void join_pieces(const AttentionParams& p, const CallShape& call, Walk& walk, Cut cut,
                                            uint32_t num_threads, const Meet& meet) {
  const ToOutput<typename I::T> output{p, cut, call.out_aligned};
  const Pieces pieces = pieces_of<I>(call);
  auto [first, number, count] = cut.order;
  const int32_t sharers = walk.share.sharers;
#pragma unroll 1
  for (int32_t level = 0, step = sharers; count > 1; ++level, step *= kGroupPieces) {
    const int32_t begin = number / kGroupPieces * kGroupPieces, size = min_of(count - begin, kGroupPieces);
    const int32_t cta = first + begin * step;
    number /= kGroupPieces;
    count = ceil_div(count, kGroupPieces);
    if (size == 1) continue;
    meet();
    if (ptx::thread_index() == 0) {  // each level has a ticket of its own, that of another one of the pieces
      unsigned* const ticket = pieces.ticket(cta + level * sharers, begin == 0 && level == 0);
      const auto last = static_cast<unsigned>(size - 1);
      walk.joins = ptx::increment(ticket, last) >= last;
    }
    meet();
    if (!walk.joins) return;
    const auto piece_of = [&](int32_t i) { return pieces.of(cta + i * step, begin + i == 0); };
    join_group<I>(piece_of, size, cut.rows, num_threads, count == 1, output);
  }
}

// Of a range's two cuts, after its end: until then accumulators fill the registers.
template <typename I, typename Meet>
__device__ __forceinline__ void join_cuts(const AttentionParams& p, const CallShape& call, Walk& walk,
                                          uint32_t num_threads, const Meet& meet) {
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (walk.is_cut[i]) join_pieces<I>(p, call, walk, call.pieces.cuts(walk.share.cta)[i], num_threads, meet);
  }
}

}  // namespace pagedtree::cuda
