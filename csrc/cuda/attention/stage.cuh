// Copies from global to shared memory: Q of a row tile, and the ring of K and V stages.
#pragma once

#include "core/math.h"
#include "cuda/attention/ranges.cuh"
#include "cuda/tile/mma.cuh"

namespace pagedtree::cuda {

// Types and derived constants of an instance, from its row of kTileShapes.
template <typename T_, typename Kv_, TileShape kTileShape>
struct InstanceOf {
  using T = T_;
  using Kv = Kv_;
  using M = Multiplied<T, Kv>;
  // If the operand type differs from Q's, each row is scaled into its range by a power of two.
  static constexpr bool kScalesRows = !std::is_same_v<T, M>, kCopiesQ = std::is_same_v<T, Kv>;
  static constexpr TileShape kShape = kTileShape;
  static constexpr int kHeadDim = kShape.head_dim, kHeadDimV = kShape.head_dim_v, kMTile = kShape.m_tile;
  static constexpr int kThreads = kShape.threads();
  static constexpr int kWarpKeys = kShape.warp_keys();
  static constexpr int kWarpColumns = kHeadDimV / kShape.column_warps;  // of the output
  static constexpr int kAtoms = kShape.warp_rows() / 16;                // blocks of 16 rows per warp
  static constexpr int kWords = ceil_div(kWarpKeys, kMaskWordBits);
  static_assert(kMTile > 0 && kMTile <= kThreads && kAtoms * 16 * kShape.row_warps == kMTile && kWarpKeys % 8 == 0);
};

template <typename T, typename Kv, int kHeadDim, int kMTile, int kHeadDimV = kHeadDim>
struct Instance : InstanceOf<T, Kv, tile_shape(MatrixEngine::kMmaSync, kHeadDim, kHeadDimV, kMTile)> {
  using QRows = Panels<kHeadDim * 2, kMTile>;
  using KRows = Panels<kHeadDim* static_cast<int>(sizeof(Kv)), Instance::kShape.keys>;
  using VRows = Panels<kHeadDimV* static_cast<int>(sizeof(Kv)), Instance::kShape.keys>;
};

// Stages [first, end) with visible keys; in KV tiles, where stages are larger.
struct StageRange {
  int32_t first, end;

  template <typename I>
  __device__ __forceinline__ static StageRange of(const KeyBounds& bounds, int32_t kv_begin, int32_t kv_end) {
    constexpr uint32_t kKeys = min_of(I::kShape.keys, kKvTile), kStagesInTile = kKvTile / kKeys;
    const uint32_t lowest = static_cast<uint32_t>(bounds.lowest) / kKeys,
                   end = (static_cast<uint32_t>(bounds.highest) + kKeys - 1) / kKeys;
    return {max_of<int32_t>(kv_begin * kStagesInTile, lowest), min_of<int32_t>(kv_end * kStagesInTile, end)};
  }
};

// Addresses of a key's K and V, loaded together; null reads as zeros.
struct alignas(16) KeyRow {
  const char* k;
  const char* v;
};

// Finds a row tile's keys. It loads a page id and computes the addresses one stage later, which hides the latency.
struct KeyReader {
  const char* parts[3];  // page ids, K, V of the head
  int32_t seq_len;

  __device__ __forceinline__ void open(const AttentionParams& p, const RowTile& tile, int32_t length, uint32_t thread) {
    if (thread >= 3) return;
    const auto index = static_cast<uint32_t>(thread == 0 ? tile.sequence : tile.kv_head);
    parts[thread] = p.parts[thread].begin + index * p.parts[thread].bytes;
    if (thread == 0) seq_len = length;
  }

  __device__ __forceinline__ int32_t page(const AttentionParams& p, int32_t key) const {
    const auto* pages = reinterpret_cast<const int32_t*>(parts[0]);
    return key < seq_len ? pages[p.by_page_size.quotient(static_cast<uint32_t>(key))] : -1;
  }

  template <typename Kv>
  __device__ __forceinline__ KeyRow row(const AttentionParams& p, int32_t key, int32_t page) const {
    const auto number = static_cast<uint32_t>(page), slot = p.by_page_size.remainder(static_cast<uint32_t>(key));
    if (number >= p.pages_end) return {nullptr, nullptr};
    const auto offset = [&](const PagedCache& cache) {
      return (number * cache.page_stride + slot * cache.slot_stride) * static_cast<int64_t>(sizeof(Kv));
    };
    return {parts[1] + offset(p.k_cache), parts[2] + offset(p.v_cache)};
  }
};

// Returns the scale of q.k. With softcap, scores are cap * tanh(q.k * scale / cap).
__device__ __forceinline__ float score_scale(const AttentionParams& p, int32_t kv_head) {
  return p.k_scale != nullptr ? p.scale * p.k_scale[kv_head * p.k_scale_stride] : p.scale;
}

template <typename I>
struct alignas(16) Stage {
  unsigned char k[I::KRows::kBytes];
  unsigned char v[I::VRows::kBytes];
  KeyRow rows[I::kShape.keys];  // of the next stage in this slot
};

// Stages follow in memory. stage_wide.cuh has the variant for wide values.
template <typename I>
struct alignas(128) Shared {
  RangeIterator walk;
  union {
    float2 states[I::kShape.key_warps * I::kMTile];  // maximum, sum per row and warp that shares it
    struct {
      KeyBounds bounds[I::kShape.warps()];
      KeyReader reader;  // from here on in memory: accumulators fill the registers
      RowView views[I::kMTile];
      float factors[I::kScalesRows ? I::kMTile : 1];
    };
  };
  alignas(128) unsigned char q[I::QRows::kBytes];

  __device__ __forceinline__ Stage<I>& stage(int i) { return reinterpret_cast<Stage<I>*>(this + 1)[i]; }
  __device__ __forceinline__ float* out() { return reinterpret_cast<float*>(q); }
};

// Returns the larger magnitudes of two bf16 pairs, as bits. NaN is largest.
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
  return max_of(a & 0x7fff0000u, b & 0x7fff0000u) | max_of(a & 0x7fffu, b & 0x7fffu);
}

// Returns the largest magnitude over kLanes neighbouring lanes, as bits.
template <uint32_t kLanes>
__device__ __forceinline__ uint32_t largest_magnitude(uint32_t pair) {
  uint32_t largest = max_of(pair >> 16 & 0x7fffu, pair & 0x7fffu);
#pragma unroll
  for (uint32_t lanes = 1; lanes < kLanes; lanes *= 2) {
    largest = max_of(largest, __shfl_xor_sync(kWholeWarp, largest, static_cast<int>(lanes)));
  }
  return largest;
}

// Scales a bf16 row's maximum into [2^14, 2^15) by a power of two: half is exact down to 2^-32 of it. Skips infinities.
struct RowScale {
  uint32_t exponent;  // biased, of fp32

  __device__ __forceinline__ explicit RowScale(uint32_t largest) {
    constexpr uint32_t kOne = 127, kTarget = kOne + 14;
    const uint32_t of_largest = largest >> 7;
    exponent = of_largest == 255 ? kOne : min_of(kOne + kTarget - of_largest, 2 * kOne - 1);
  }
  __device__ __forceinline__ float inverse() const { return bits_as<float>((254 - exponent) << 23); }
  __device__ __forceinline__ uint32_t pair(uint32_t values) const {
    const float scale = bits_as<float>(exponent << 23);
    return pack_pair<__half>(bits_as<float>(values << 16) * scale, bits_as<float>(values & 0xffff0000u) * scale);
  }
  __device__ __forceinline__ uint4 pairs(const uint4& values) const {
    return make_uint4(pair(values.x), pair(values.y), pair(values.z), pair(values.w));
  }
};

// Loads Q, negated if `negate` so that score factors are positive. Writes `factors` per row if rows are scaled; else
// `factor` is for all. Columns past K's are not stored. Up to 64 bytes per thread are in flight.
template <typename I>
__device__ __forceinline__ void load_q_rows(const AttentionParams& p, const RowTile& tile, uint32_t thread,
                                            bool aligned, bool negate, float factor, unsigned char* q, float* factors) {
  constexpr int kChunks = I::QRows::kChunks;
  constexpr uint32_t kLanes = I::kHeadDim > 128 ? 32 : I::kHeadDim > 64 ? 16 : 8;  // per row
  constexpr int kPerLane = ceil_div(kChunks, static_cast<int>(kLanes));
  constexpr int kTurns = I::kMTile * kLanes / I::kThreads, kAtOnce = kTurns * kPerLane <= 4 ? kTurns : 1;
  static_assert(kTurns * I::kThreads == I::kMTile * kLanes);
  const uint32_t flip = negate ? 0x80008000u : 0u, lane = thread % kLanes;
  const uint32_t chunks = I::kShape.is_wide() ? static_cast<uint32_t>(p.head_dim) / 8 : kChunks;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; turn += kAtOnce) {
    const auto row_of = [&](int i) { return (thread + (turn + i) * I::kThreads) / kLanes; };
    uint4 values[kAtOnce][kPerLane];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t row = row_of(i);
      const uint16_t* of_row = static_cast<const uint16_t*>(p.q);
      if (row < tile.rows) of_row += tile.token(p, row) * p.q_token_stride + tile.head(p, row) * p.q_head_stride;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const uint32_t chunk = lane + j * kLanes;
        uint4& loaded = values[i][j] = make_uint4(0, 0, 0, 0);
        if (row >= tile.rows || chunk >= chunks) continue;
        const uint16_t* from = of_row + chunk * 8;
        if (aligned) {
          loaded = *reinterpret_cast<const uint4*>(from);
        } else {
          const auto pair = [&](int at) { return uint32_t{from[at]} | uint32_t{from[at + 1]} << 16; };
          loaded = make_uint4(pair(0), pair(2), pair(4), pair(6));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t row = row_of(i);
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        uint4& loaded = values[i][j];
        loaded = make_uint4(loaded.x ^ flip, loaded.y ^ flip, loaded.z ^ flip, loaded.w ^ flip);
        if constexpr (I::kScalesRows) {
          const uint32_t of_chunk =
              larger_magnitudes(larger_magnitudes(loaded.x, loaded.y), larger_magnitudes(loaded.z, loaded.w));
          largest = larger_magnitudes(largest, of_chunk);
        }
      }
      if constexpr (I::kScalesRows) {
        const RowScale scale(largest_magnitude<kLanes>(largest));
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) values[i][j] = scale.pairs(values[i][j]);
        if (lane == 0) factors[row] = fmaxf(factor * scale.inverse(), 0x1p-126f);
      }
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const uint32_t chunk = lane + j * kLanes;
        if (chunk < chunks) store_q<typename I::QRows, typename I::Kv>(q, row, chunk, values[i][j]);
      }
    }
  }
}

// Loads Q of the shared row tile; returns the score factor.
template <typename I>
__device__ __forceinline__ float load_scaled_q(const AttentionParams& p, bool aligned, Shared<I>& shared) {
  const RowTile& tile = shared.walk.tile;
  const float scale = score_scale(p, tile.kv_head), factor = score_factor(p, scale * kDecodedScale<typename I::Kv>);
  load_q_rows<I>(p, tile, ptx::thread_index(), aligned, scale < 0.0f, factor, shared.q, shared.factors);
  return factor;
}

// For rare layouts of Q.
template <typename I>
__device__ __attribute__((noinline)) float load_rare_q(const AttentionParams& p, bool aligned, Shared<I>& shared) {
  return load_scaled_q<I>(p, aligned, shared);
}

// Loads Q unless copy_q_tile() did; returns the score factor.
template <typename I>
__device__ __forceinline__ float load_q_tile(const AttentionParams& p, const CallShape& call, Shared<I>& shared) {
  if constexpr (I::kCopiesQ) {
    return call.q_factor > 0.0f ? call.q_factor : load_rare_q<I>(p, call.q_aligned, shared);
  } else {
    return call.q_aligned ? load_scaled_q<I>(p, true, shared) : load_rare_q<I>(p, false, shared);
  }
}

// Issues the copies of Q if it needs no conversion. Rows past the end repeat the last one.
template <typename I>
__device__ __forceinline__ void copy_q_tile(const AttentionParams& p, const CallShape& call, const RowTile& tile,
                                            uint32_t thread, unsigned char* q) {
  if (!I::kCopiesQ || call.q_factor == 0.0f) return;
  constexpr uint32_t kLanes = I::QRows::kChunks > 16 ? 32 : I::QRows::kChunks > 8 ? 16 : 8;  // per row
  const uint32_t to = ptx::smem_addr(q), chunks = I::kShape.is_wide() ? p.head_dim / 8 : I::QRows::kChunks;
#pragma unroll 1
  for (uint32_t row = thread / kLanes; row < I::kMTile; row += I::kThreads / kLanes) {
    const uint32_t own = min_of(row, tile.rows - 1);
    const uint16_t* from =
        static_cast<const uint16_t*>(p.q) + tile.token(p, own) * p.q_token_stride + tile.head(p, own) * p.q_head_stride;
#pragma unroll
    for (uint32_t first = 0; first < I::QRows::kChunks; first += kLanes) {
      const uint32_t chunk = first + thread % kLanes;
      if (chunk < chunks) ptx::cp_async_16(to + I::QRows::offset(row, chunk), from + chunk * 8, true);
    }
  }
}

// Issues the copies of a stage, whose addresses are known.
template <typename I>
__device__ __forceinline__ void copy_stage(Stage<I>& stage, uint32_t thread) {
  const uint32_t k = ptx::smem_addr(stage.k), v = ptx::smem_addr(stage.v);
  const auto row_of = [&](uint32_t key) { return bits_as<KeyRow>(*reinterpret_cast<const uint4*>(&stage.rows[key])); };
  if constexpr (I::kHeadDim == I::kHeadDimV) {
    I::KRows::template for_each_chunk<I::kThreads>(thread, row_of,
                                                   [&](const KeyRow& row, uint32_t chunk, uint32_t offset) {
                                                     const bool known = row.k != nullptr;
                                                     ptx::cp_async_16(k + offset, row.k + chunk * 16, known);
                                                     ptx::cp_async_16(v + offset, row.v + chunk * 16, known);
                                                   });
  } else {
    I::KRows::template for_each_chunk<I::kThreads>(thread, row_of,
                                                   [&](const KeyRow& row, uint32_t chunk, uint32_t offset) {
                                                     ptx::cp_async_16(k + offset, row.k + chunk * 16, row.k != nullptr);
                                                   });
    I::VRows::template for_each_chunk<I::kThreads>(thread, row_of,
                                                   [&](const KeyRow& row, uint32_t chunk, uint32_t offset) {
                                                     ptx::cp_async_16(v + offset, row.v + chunk * 16, row.v != nullptr);
                                                   });
  }
}

// Waits for all but the newest `stages` - 2 copy groups.
__device__ __forceinline__ void wait_for_stage(int stages) {
  switch (stages) {
    case 2:
      return ptx::cp_async_wait<0>();
    case 3:
      return ptx::cp_async_wait<1>();
    default:
      return ptx::cp_async_wait<2>();
  }
}

}  // namespace pagedtree::cuda
