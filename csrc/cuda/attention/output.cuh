// Epilogue: merges warps that share a tile's keys, then stores to the output or, for a split row tile, to scratch.
#pragma once

#include "cuda/attention/attend.cuh"
#include "cuda/attention/call.h"

namespace pagedtree::cuda {

// Returns the factor that rescales a part to the maximum of all.
__device__ __forceinline__ float weight_of(float maximum, float of_all) {
  return maximum == -kInfinity ? 0.0f : ptx::ex2(maximum - of_all);
}

// In shared memory: partial results of warps that share keys, or columns of warps that share them, with equal maxima.
template <typename I>
struct WarpParts {
  Shared<I>& shared;

  // Chunks of four columns, xor-ed with the row: a column of 8 rows covers all banks.
  static __device__ __forceinline__ uint32_t offset(uint32_t part, uint32_t row, uint32_t column) {
    constexpr uint32_t kChunks = I::kHeadDimV / 4;
    return ((part * I::kMTile + row) * kChunks + (column / 4 ^ row % 8)) * 4 + column % 4;
  }
  __device__ __forceinline__ float2 state(uint32_t part, uint32_t row) const {
    return shared.states[part * I::kMTile + row];
  }
  __device__ __forceinline__ float4 out(uint32_t part, uint32_t row, uint32_t column) const {
    return *reinterpret_cast<const float4*>(shared.out() + offset(part, row, column));
  }

  __device__ __forceinline__ void store(const Accumulator<I>& sums) const {
    constexpr float kScale = kDecodedScale<typename I::Kv>;
    const uint32_t thread = ptx::thread_index(), lane = thread % 32, warp = thread / 32,
                   state = warp / I::kShape.row_warps, part = state / I::kShape.column_warps,
                   first_column = state % I::kShape.column_warps * I::kWarpColumns;
#pragma unroll
    for (uint32_t a = 0; a < I::kAtoms; ++a) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t row = warp % I::kShape.row_warps * I::kShape.warp_rows() + a * 16 + half * 8 + lane / 4;
        const float sum = quad_sum(sums.sum[a][half]);
        if (lane % 4 == 0) shared.states[state * I::kMTile + row] = make_float2(sums.maximum[a][half], sum);
#pragma unroll
        for (uint32_t column = 0; column < I::kWarpColumns; column += 16) {
#pragma unroll
          for (uint32_t i = 0; i < 2; ++i) {
            const ColumnPair pair = accumulator_columns<typename I::Kv>(sums.out[a][column / 8],
                                                                        sums.out[a][column / 8 + 1], lane, half, i);
            *reinterpret_cast<float2*>(shared.out() + offset(part, row, first_column + column + pair.first)) =
                make_float2(pair.values[0] * kScale, pair.values[1] * kScale);
          }
        }
      }
    }
  }
};

template <typename I>
struct JoinedState {
  static constexpr uint32_t kParts = I::kShape.key_warps * I::kShape.column_warps;
  float maximum;
  float sum;
  float weights[kParts];

  __device__ __forceinline__ JoinedState(const WarpParts<I>& parts, uint32_t row) : maximum(-kInfinity), sum(0.0f) {
    float2 states[kParts];
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part) {
      states[part] = parts.state(part, row);
      maximum = fmaxf(maximum, states[part].x);
    }
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part) {
      weights[part] = weight_of(states[part].x, maximum);
      sum = __fmaf_rn(states[part].y, weights[part], sum);
    }
  }
};

// Destinations: target.row(...).store(column, values). `has_first`: the thread stores column 0 and the row's state.
struct ToPiece {
  Piece piece;
  uint32_t head_dim_v;
  uint32_t first_row = 0;  // of the partial result

  struct Row {
    float* to;

    template <int kColumns>
    __device__ __forceinline__ void store(uint32_t column, const float (&values)[kColumns]) const {
      if constexpr (kColumns == 2) *reinterpret_cast<float2*>(to + column) = make_float2(values[0], values[1]);
#pragma unroll
      for (int i = 0; i + 4 <= kColumns; i += 4) {
        *reinterpret_cast<float4*>(to + column + i) =
            make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
      }
    }
  };
  __device__ __forceinline__ Row row(uint32_t row, float maximum, float sum, bool has_first) const {
    if (has_first) piece.states[first_row + row] = make_float2(maximum, sum);
    return {piece.out + (first_row + row) * head_dim_v};
  }
};

template <typename T>
struct ToOutput {
  const AttentionParams& p;
  const TileRows& tile;
  bool aligned;

  struct Row {
    uint16_t* to;
    float factor;
    bool aligned;

    template <int kColumns>
    __device__ __forceinline__ void store(uint32_t column, const float (&values)[kColumns]) const {
      uint32_t pairs[kColumns / 2];
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) pairs[i] = pack(values[2 * i], values[2 * i + 1]);
      put(column, pairs);
    }
    __device__ __forceinline__ uint32_t pack(float low, float high) const {
      return pack_pair<T>(low * factor, high * factor);
    }
    template <int kPairs>
    __device__ __forceinline__ void put(uint32_t column, uint32_t (&pairs)[kPairs]) const {
      if (!aligned) {
#pragma unroll 1
        for (int i = 0; i < kPairs * 2; i += 2) {
          to[column + i] = static_cast<uint16_t>(pairs[0]);
          to[column + i + 1] = static_cast<uint16_t>(pairs[0] >> 16);
#pragma unroll
          for (int next = 1; next < kPairs; ++next) pairs[next - 1] = pairs[next];
        }
      } else if constexpr (kPairs == 4) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      } else {
        *reinterpret_cast<uint2*>(to + column) = make_uint2(pairs[0], pairs[1]);
      }
    }
  };
  __device__ __forceinline__ Row row(uint32_t row, float maximum, float sum, bool has_first) const {
    const int64_t token = tile.token(p, row), head = tile.head(p, row);
    float factor = 1.0f;
    if (p.sinks != nullptr && p.sinks[head] > -kInfinity) {
      const float sink = p.sinks[head] * kLog2E, top = fmaxf(maximum, sink);
      factor = ptx::ex2(maximum - top);
      sum = __fmaf_rn(sum, factor, ptx::ex2(sink - top));
      maximum = top;
    }
    if (has_first && p.lse != nullptr) {
      const float lse = sum == 0.0f ? -kInfinity : __fmaf_rn(maximum, kLn2, logf(sum));
      p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = lse;
    }
    const float v_scale = p.v_scale != nullptr ? p.v_scale[tile.kv_head * p.v_scale_stride] : 1.0f;
    return {static_cast<uint16_t*>(p.out) + token * p.out_token_stride + head * p.out_head_stride,
            sum == 0.0f ? 0.0f : factor * v_scale / sum, aligned};
  }
};

// Merges and stores. Returns true if a result may be poisoned: NaN because P = 0 met a masked, non-finite value. A row
// whose sum is NaN attends to one.
template <typename I, typename T>
__device__ __forceinline__ bool join(const WarpParts<I>& parts, uint32_t rows, bool is_whole, const ToOutput<T>& output,
                                     const ToPiece& piece) {
  bool is_poisoned = false;
  constexpr uint32_t kVectors = I::kHeadDimV / 8;
  using State = JoinedState<I>;
#pragma unroll 1  // one pass: unrolled code costs instruction fetches
  for (uint32_t i = ptx::thread_index(); i < rows * kVectors; i += I::kThreads) {
    const uint32_t row = i / kVectors, column = i % kVectors * 8;
    const State state(parts, row);
    float values[8] = {};
#pragma unroll
    for (uint32_t part = 0; part < I::kShape.key_warps; ++part) {
      const float4 low = parts.out(part, row, column), high = parts.out(part, row, column + 4);
      const float of_part[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int d = 0; d < 8; ++d) values[d] = __fmaf_rn(of_part[d], state.weights[part], values[d]);
    }
    float rest = 0.0f;
#pragma unroll
    for (int d = 0; d < 8; ++d) rest = __fmaf_rn(values[d], 0.0f, rest);
    is_poisoned |= rest != 0.0f && state.sum == state.sum;
    if (is_whole) {
      output.row(row, state.maximum, state.sum, column == 0).store(column, values);
    } else {
      piece.row(row, state.maximum, state.sum, column == 0).store(column, values);
    }
  }
  return is_poisoned;
}

// Sets out to 0 and lse to -inf for rows outside all sequences (padding of a captured graph).
template <typename I>
__device__ __forceinline__ void clear_padding(const AttentionParams& p, int32_t cta, int num_threads) {
  const NodeRange used = used_rows(p.cu_seqlens_q, p.batch, p.num_tokens);
  const int64_t columns = int64_t{p.num_kv_heads} * p.group_size * I::kHeadDimV;
  for (int64_t row = cta; row < p.num_tokens - used.size(); row += gridDim.x) {
    const int64_t token = row < used.begin ? row : row + used.size();
#pragma unroll 1
    for (int64_t i = threadIdx.x; i < columns; i += num_threads) {
      const int64_t head = i / I::kHeadDimV, column = i % I::kHeadDimV;
      static_cast<uint16_t*>(p.out)[token * p.out_token_stride + head * p.out_head_stride + column] = 0;
      if (column == 0 && p.lse != nullptr) {
        p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = -kInfinity;
      }
    }
  }
}

template <typename I>
__device__ __attribute__((noinline)) void clear_rare_padding(const AttentionParams& p, int32_t cta) {
  clear_padding<I>(p, cta, I::kThreads);
}

__device__ __forceinline__ bool has_padding(const AttentionParams& p) {
  return p.batch == 0 || p.cu_seqlens_q[0] > 0 || p.cu_seqlens_q[p.batch] < p.num_tokens;
}

}  // namespace pagedtree::cuda
