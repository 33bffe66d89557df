// From global to shared memory: Q of a row tile, and the ring of stages through which its keys and values come.
#pragma once

#include "cuda/tile/mma.cuh"
#include "cuda/tree_attention/row_tile.cuh"

namespace pagedtree::cuda {

// The types of one instance of the kernel and what follows from them and its row of kTileShapes.
template <typename T_, typename Kv_, int kHeadDim_, int kMTile_>
struct Instance {
  using T = T_;
  using Kv = Kv_;
  static constexpr int kHeadDim = kHeadDim_, kMTile = kMTile_;
  static constexpr TileShape kShape = tile_shape(kHeadDim, kMTile);
  static constexpr int kThreads = kShape.threads();
  static constexpr int kWarpKeys = kShape.warp_keys();
  static constexpr int kAtoms = kShape.warp_rows() / 16;  // blocks of 16 rows a warp
  static constexpr int kWords = ceil_div(kWarpKeys, kMaskWordBits);
  using QRows = Panels<kHeadDim * 2, kMTile>;
  using KvRows = Panels<kHeadDim* static_cast<int>(sizeof(Kv)), kShape.keys>;
  static_assert(kMTile <= kThreads && kShape.m_tile == kMTile && kAtoms * 16 * kShape.row_warps == kMTile &&
                kWarpKeys % 16 == 0);
};

// Where the K and V rows of a key are; null: they read as zero.
struct KeyRow {
  const char* k;
  const char* v;
};

// The keys of a row tile. Between reading a page id and writing the addresses that it gives lies the work on a stage,
// which hides the wait for it.
struct KeyReader {
  const int32_t* pages;
  const char *k, *v;  // of the head
  int32_t seq_len;
  uint32_t page_size;

  __device__ __forceinline__ static KeyReader of(const TreeAttentionParams& p, const RowTile& tile) {
    const int64_t size = element_size(p.kv_dtype);
    return {p.page_table + tile.sequence * p.page_table_stride,
            static_cast<const char*>(p.k_cache.data) + tile.kv_head * p.k_cache.head_stride * size,
            static_cast<const char*>(p.v_cache.data) + tile.kv_head * p.v_cache.head_stride * size, tile.seq_len,
            static_cast<uint32_t>(min_of<int64_t>(p.page_size, 0x7fffffff))};
  }

  __device__ __forceinline__ int32_t page(int32_t key) const {
    return key < seq_len ? pages[static_cast<uint32_t>(key) / page_size] : -1;
  }

  template <typename Kv>
  __device__ __forceinline__ KeyRow row(const TreeAttentionParams& p, int32_t key, int32_t page) const {
    if (page < 0 || page >= p.num_pages) return {nullptr, nullptr};
    const int64_t slot = static_cast<uint32_t>(key) % page_size;
    return {k + (page * p.k_cache.page_stride + slot * p.k_cache.slot_stride) * static_cast<int64_t>(sizeof(Kv)),
            v + (page * p.v_cache.page_stride + slot * p.v_cache.slot_stride) * static_cast<int64_t>(sizeof(Kv))};
  }
};

template <typename I>
struct alignas(16) Stage {
  unsigned char k[I::KvRows::kBytes];
  unsigned char v[I::KvRows::kBytes];
  KeyRow rows[I::kShape.keys];  // of the stage that comes here next
};

// The launch adds the stages behind it.
template <typename I>
struct alignas(16) Shared {
  union {
    float2 states[I::kShape.key_warps * I::kMTile];  // maximum and sum of each row, of each warp that shares it
    struct {
      KeyBounds bounds[I::kShape.warps()];
      KeyReader reader;  // here, not in registers beside the accumulators
    };
  };
  unsigned char q[I::QRows::kBytes];

  __device__ __forceinline__ Stage<I>& stage(int i) { return reinterpret_cast<Stage<I>*>(this + 1)[i]; }
  __device__ __forceinline__ float* out() { return reinterpret_cast<float*>(q); }
};

// Q, negated where `negate`: scores are then scaled by a positive number.
template <typename I>
__device__ __forceinline__ void load_q_tile(const TreeAttentionParams& p, const RowTile& tile, uint32_t thread,
                                            bool aligned, bool negate, unsigned char* q) {
  constexpr int kChunks = I::QRows::kChunks;
  const uint32_t flip = negate ? 0x80008000u : 0u;
  for (uint32_t i = thread; i < I::kMTile * kChunks; i += I::kThreads) {
    const uint32_t row = i / kChunks, chunk = i % kChunks;
    uint4 values = make_uint4(0, 0, 0, 0);
    if (row < tile.rows) {
      const int64_t offset = tile.token(p, row) * p.q_token_stride + tile.head(p, row) * p.q_head_stride + chunk * 8;
      const uint16_t* from = static_cast<const uint16_t*>(p.q) + offset;
      if (aligned) {
        values = *reinterpret_cast<const uint4*>(from);
      } else {
        const auto pair = [&](int at) { return uint32_t{from[at]} | uint32_t{from[at + 1]} << 16; };
        values = make_uint4(pair(0), pair(2), pair(4), pair(6));
      }
    }
    values = make_uint4(values.x ^ flip, values.y ^ flip, values.z ^ flip, values.w ^ flip);
    store_q<typename I::QRows, typename I::Kv>(q, row, chunk, values);
  }
}

// Starts the copies of a stage whose row addresses are known.
template <typename I>
__device__ __forceinline__ void copy_stage(Stage<I>& stage, uint32_t thread) {
  using Rows = typename I::KvRows;
  const uint32_t k = ptx::smem_addr(stage.k), v = ptx::smem_addr(stage.v);
  Rows::template for_each_chunk<I::kThreads>(thread, [&](uint32_t key, uint32_t chunk, uint32_t offset) {
    const KeyRow row = stage.rows[key];
    const bool known = row.k != nullptr;
    const uint32_t at = known ? chunk * 16 : 0;
    ptx::cp_async_16(k + offset, row.k + at, known);
    ptx::cp_async_16(v + offset, row.v + at, known);
  });
}

// All but the newest `stages` - 2 groups of copies have arrived.
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
