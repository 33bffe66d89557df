// Wide values: shared memory and copies from the cache.
#pragma once

#include "cuda/attention/stage.cuh"

namespace pagedtree::cuda {

// One lane per row, one mask bit per key. Stages follow in memory. V has the offsets of K's first columns.
template <typename I>
  requires(I::kShape.is_wide())
struct alignas(128) Shared<I> {
  static constexpr int kWarps = I::kShape.warps();
  using WeightRows = Panels<I::kShape.keys * 2, I::kMTile>;
  static_assert(I::kMTile <= 32 && I::kShape.keys == kMaskWordBits && kWarps == 4 && I::kWarpKeys == 8);
  static_assert(I::KRows::kBytes == I::kShape.stage_bytes(sizeof(typename I::Kv)) && I::KRows::kQuarter == 0);
  RangeIterator walk;
  KeyBounds bounds;
  KeyReader reader;
  float4 tops[I::kMTile];  // maxima per row and softmax warp
  float factors[I::kScalesRows ? I::kMTile : 1];
  union alignas(128) {
    float4 dots[kWarps][I::kAtoms][32];  // the partner's partial sums of a warp's keys
    unsigned char weights[WeightRows::kBytes];
    float2 states[kWarps * I::kMTile];  // maximum, sum per row and warp's keys
  };
  alignas(128) unsigned char q[I::QRows::kBytes];

  __device__ __forceinline__ unsigned char* stage(int i) {
    return reinterpret_cast<unsigned char*>(this + 1) + i * I::KRows::kBytes;
  }
  __device__ __forceinline__ float* out() { return reinterpret_cast<float*>(q); }
};

// Returns row `lane`'s mask of a stage. Recomputed at use: few stages need it.
__device__ __forceinline__ uint32_t keys_visible_to_lane(const AttentionParams& p, const RowTile& tile, uint32_t lane,
                                                         int32_t first_key) {
  return lane < tile.rows ? row_visibility(p, tile, lane).visible32(first_key) : 0;
}

// Ring of alternating K and V stages, or latent ones. Each warp copies 8 keys; their page ids came a stage earlier.
template <typename I>
class WideRing {
 public:
  __device__ __forceinline__ WideRing(const AttentionParams& params, Shared<I>& of_cta, int stages,
                                      const StageRange& range)
      : p_(params),
        shared_(of_cta),
        stages_(stages),
        next_(range.first * sides()),
        end_(range.end * sides()),
        page_(page_of_next()) {}

  // Issues the next stage's copies, if any, into a free slot.
  __device__ __forceinline__ void start() {
    if (next_ < end_) {
      copy();
      ++next_;
      page_ = page_of_next();
    }
    filled_ = filled_ + 1 == stages_ ? 0 : filled_ + 1;
    ptx::cp_async_commit();
  }

  // Waits for a stage. Its barrier frees all earlier ones.
  __device__ __forceinline__ uint32_t wait() {
    wait_for_stage(stages_);
    __syncthreads();
    const int place = used_;
    used_ = used_ + 1 == stages_ ? 0 : used_ + 1;
    return ptx::smem_addr(shared_.stage(place));
  }

 private:
  static constexpr int kKeys = I::kShape.keys;

  __device__ __forceinline__ int32_t sides() const { return p_.latent ? 1 : 2; }
  __device__ __forceinline__ int32_t first_key() const { return next_ / sides() * kKeys; }
  __device__ __forceinline__ static uint32_t key_of_lane() {
    const uint32_t thread = ptx::thread_index();
    return thread / 32 * 8 + thread % 8;
  }
  __device__ __forceinline__ int32_t page_of_next() const {
    return next_ < end_ ? shared_.reader.page(p_, first_key() + static_cast<int32_t>(key_of_lane())) : -1;
  }

  // Returns the lane's row of K or V, or null for zeros: also for fully masked keys, which may hold NaN.
  __device__ __forceinline__ const char* row_of_lane(bool is_value) const {
    const KeyReader& reader = shared_.reader;
    const uint32_t key = key_of_lane();
    bool is_read = page_ >= 0 && page_ < p_.num_pages;
    if (!shared_.bounds.is_unmasked(first_key(), kKeys)) {
      const uint32_t lane = ptx::thread_index() % 32;
      const uint32_t seen =
          __reduce_or_sync(kWholeWarp, keys_visible_to_lane(p_, shared_.walk.tile, lane, first_key()));
      is_read = is_read && (seen >> key & 1u) != 0;
    }
    if (!is_read) return nullptr;
    const PagedCache& cache = is_value ? p_.v_cache : p_.k_cache;
    const int64_t offset = p_.by_page_size.remainder(static_cast<uint32_t>(first_key()) + key);
    return reader.parts[is_value ? 2 : 1] +
           (page_ * cache.page_stride + offset * cache.slot_stride) * static_cast<int64_t>(sizeof(typename I::Kv));
  }

  __device__ __forceinline__ void copy() const {
    using Rows = typename I::KRows;
    constexpr uint32_t kValueChunks = I::kHeadDimV * sizeof(typename I::Kv) / 16;
    const uint32_t lane = ptx::thread_index() % 32, first_row = ptx::thread_index() / 32 * 8;
    const uint32_t to = ptx::smem_addr(shared_.stage(filled_));
    const bool is_value = !p_.latent && next_ % 2 != 0, has_rest = !is_value && p_.head_dim > I::kHeadDimV;
    const auto of_lane = reinterpret_cast<uintptr_t>(row_of_lane(is_value));
    const auto row_of = [&](uint32_t row) {
      return reinterpret_cast<const char*>(__shfl_sync(kWholeWarp, of_lane, static_cast<int>(row)));
    };
    const auto copy_chunk = [&](const char* from, uint32_t row, uint32_t chunk) {
      ptx::cp_async_16(to + Rows::offset(first_row + row, chunk), from + chunk * 16, from != nullptr);
    };
#pragma unroll
    for (uint32_t rows = 0; rows < 8; rows += 4) {
      const uint32_t row = rows + lane / 8;
      const char* const from = row_of(row);
#pragma unroll
      for (uint32_t panel = 0; panel < Rows::kWide; ++panel) {
        if (panel * 8 < kValueChunks || has_rest) copy_chunk(from, row, panel * 8 + lane % 8);
      }
    }
    if constexpr (Rows::kHalf != 0) {
      const char* const from = row_of(lane / 4);
      if (has_rest) copy_chunk(from, lane / 4, Rows::kWide * 8 + lane % 4);
    }
  }

  const AttentionParams& p_;
  Shared<I>& shared_;
  const int stages_;
  int filled_ = 0, used_ = 0;  // slots of the next copy and wait
  int32_t next_, end_;         // stages; K and V count separately
  int32_t page_;               // of the lane's key in stage next_
};

}  // namespace pagedtree::cuda
