// The kernel that runs after attention: joins the pieces of row tiles that a cut crosses.
#pragma once

#include "cuda/attention/output.cuh"

namespace pagedtree::cuda {

constexpr int kJoinThreads = 128;
constexpr int kJoinCtasPerSm = 6;  // as many as registers allow
constexpr int kPiecesAtOnce = 8;   // their loads are in flight together

// Four columns of a row, joined some pieces at a time in the order of the keys.
struct JoinedColumns {
  static constexpr int kColumns = 4;
  float maximum = -kInfinity, sum = 0.0f;
  float values[kColumns] = {};

  // Pieces [begin, min(begin + kPiecesAtOnce, end)) of rows whose first one is CTA `first`'s, the next ones those of
  // every `step`th CTA.
  __device__ __forceinline__ void add(const Pieces& pieces, int32_t first, int32_t step, int32_t begin, int32_t end,
                                      uint32_t row, uint32_t column) {
    float2 states[kPiecesAtOnce];
    float4 outs[kPiecesAtOnce];
    float top = maximum;
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {  // past the end the last piece again: branches would part the loads
      const int32_t number = min_of(begin + i, end - 1);
      const Piece piece = pieces.of(first + number * step, number == 0);
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

struct JoinShared {
  uint32_t votes[kJoinThreads / 32];
};

// The nth number below `count`, from 0 on, that `counts` is true of, or -1. All threads of the CTA meet.
template <typename Counts>
__device__ __forceinline__ int32_t find_nth(int32_t nth, int32_t count, JoinShared& shared, const Counts& counts) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  for (int32_t first = 0; first < count; first += kJoinThreads) {
    const uint32_t votes = __ballot_sync(kWholeWarp, first + thread < count && counts(first + thread));
    if (thread % 32 == 0) shared.votes[thread / 32] = votes;
    __syncthreads();
    for (int32_t warp = 0; warp < kJoinThreads / 32; ++warp) {
      uint32_t left = shared.votes[warp];
      const int32_t found = popcount32(left);
      if (nth < found) {
        while (nth-- > 0) left &= left - 1;
        return first + warp * 32 + popcount32((left & (0u - left)) - 1);
      }
      nth -= found;
    }
    __syncthreads();
  }
  return -1;
}

// Whether a range begins inside the row tile of `cut`.
__device__ __forceinline__ bool is_inside(const WorkPosition& begin, const WorkPosition& cut) {
  return begin.kv_tile > 0 && begin.same_row(cut);
}

// The records that the CTAs of a call have written; those of a range's CTAs lie side by side.
struct CtaRecords {
  const CtaRecord* records;
  int32_t count;

  struct Range {
    WorkPosition begin;
    int32_t sharers;
    WorkPosition end;
    int32_t of_next;  // what lies behind it
  };
  __device__ __forceinline__ Range range(int32_t cta) const {
    uint4 words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] = __ldcg(reinterpret_cast<const uint4*>(records + cta) + i);
    return bits_as<Range>(words);
  }
  __device__ __forceinline__ RowTile cut(int32_t cta) const {
    constexpr int kWords = sizeof(CtaRecord) / 16;
    uint4 words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldcg(reinterpret_cast<const uint4*>(records + cta) + i);
    return bits_as<CtaRecord>(words).cut;
  }
};

// Joins the rows of the row tile that CTA `owner` leaves unfinished. All threads of the CTA meet.
template <typename T>
__device__ __forceinline__ void join_row_tile(const AttentionParams& p, const CallShape& call, const CtaRecords& ctas,
                                              int32_t owner) {
  const RowTile tile = ctas.cut(owner);
  const auto [begin, sharers, cut, of_next] = ctas.range(owner);
  int32_t num_pieces = 1;  // plus one for each range that begins inside the row tile
  for (int32_t first = 1, found = kJoinThreads; found == kJoinThreads; first += kJoinThreads) {
    const int32_t cta = owner + (first + static_cast<int32_t>(threadIdx.x)) * sharers;
    found = __syncthreads_count(cta < ctas.count && is_inside(ctas.range(cta).begin, cut));
    num_pieces += found;
  }

  const ToOutput<T> output{p, tile, call.out_aligned};
  const uint32_t vectors = static_cast<uint32_t>(call.pieces.head_dim_v) / JoinedColumns::kColumns;
  for (uint32_t i = blockIdx.y * kJoinThreads + threadIdx.x; i < tile.rows * vectors; i += gridDim.y * kJoinThreads) {
    const uint32_t row = i / vectors, column = i % vectors * JoinedColumns::kColumns;
    JoinedColumns joined;
    for (int32_t k = 0; k < num_pieces; k += kPiecesAtOnce) {
      joined.add(call.pieces, owner, sharers, k, num_pieces, row, column);
    }
    output.row(row, joined.maximum, joined.sum, column == 0).store(column, joined.values);
  }
}

// The CTAs that leave a row tile unfinished which they began are counted. CTA (n, rows of a row tile, list) joins the
// row tile of the nth, and of every gridDim.x-th one after it.
template <typename T>
__global__ void __launch_bounds__(kJoinThreads, kJoinCtasPerSm)
    join_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ CallShapes calls) {
  ptx::wait_for_kernels_before();
  const CallShape& call = calls.lists[blockIdx.z];
  const CtaRecords ctas{call.pieces.records(), call.pieces.capacity};
  const auto owns = [&](int32_t cta) {
    const auto range = ctas.range(cta);
    return range.end.kv_tile > 0 && !is_inside(range.begin, range.end);
  };
  for (auto n = static_cast<int32_t>(blockIdx.x);; n += static_cast<int32_t>(gridDim.x)) {
    const int32_t owner = find_nth(n, ctas.count, ptx::shared<JoinShared>(), owns);
    if (owner < 0) return;
    join_row_tile<T>(p, call, ctas, owner);
  }
}

}  // namespace pagedtree::cuda
