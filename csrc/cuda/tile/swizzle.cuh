// Where the rows of a matrix lie in shared memory, so that ldmatrix reads 8 rows of a column at once without bank
// conflicts.
#pragma once

#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

// kRows rows of kRowBytes, in panels: columns of 128 bytes, then one of 64 and one of 32 for what is left. Within a
// panel the 16-byte chunks of a row change places by the row, so that a column of 8 rows covers all 32 banks.
template <int kRowBytes, int kRows>
struct Panels {
  static_assert(kRowBytes % 32 == 0 && kRows % 8 == 0);
  static constexpr int kBytes = kRowBytes * kRows;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kWide = kChunks / 8, kHalf = kChunks / 4 % 2, kQuarter = kChunks / 2 % 2;  // panels

  // Unsigned throughout: the compiler then sees which bits come from the lane and which are constants.
  static __device__ __forceinline__ uint32_t offset(uint32_t row, uint32_t chunk) {
    constexpr uint32_t kWideChunks = kWide * 8, kMost = kWideChunks + kHalf * 4;
    if constexpr (kWideChunks != 0) {
      if (chunk < kWideChunks) return chunk / 8 * 128 * kRows + in_panel<8>(row, chunk % 8);
    }
    if (chunk < kMost) return kWideChunks * 16 * kRows + in_panel<4>(row, (chunk - kWideChunks) % 4);
    return kMost * 16 * kRows + in_panel<2>(row, (chunk - kMost) % 2);
  }

  // Calls f(row, chunk, offset) for the part of `thread` among kThreads: neighbours have neighbouring chunks.
  template <int kThreads, typename F>
  static __device__ __forceinline__ void for_each_chunk(uint32_t thread, const F& f) {
#pragma unroll
    for (int panel = 0; panel < kWide; ++panel) each_in_panel<kThreads, 8>(thread, panel * 8, f);
    if constexpr (kHalf != 0) each_in_panel<kThreads, 4>(thread, kWide * 8, f);
    if constexpr (kQuarter != 0) each_in_panel<kThreads, 2>(thread, kWide * 8 + kHalf * 4, f);
  }

 private:
  template <int kThreads, int kWidth, typename F>
  static __device__ __forceinline__ void each_in_panel(uint32_t thread, uint32_t first_chunk, const F& f) {
    constexpr int kStep = kThreads / kWidth;  // rows at once
    const uint32_t first_row = thread / kWidth, chunk = thread % kWidth;
#pragma unroll
    for (uint32_t row = 0; row < kRows; row += kStep) {
      if (kRows % kStep != 0 && first_row + row >= kRows) return;
      f(first_row + row, first_chunk + chunk, first_chunk * 16 * kRows + in_panel<kWidth>(first_row + row, chunk));
    }
  }

  template <int kWidth>
  static __device__ __forceinline__ uint32_t in_panel(uint32_t row, uint32_t chunk) {
    constexpr uint32_t kRowsInBanks = 8 / kWidth;
    return (row * kWidth + (chunk ^ (row / kRowsInBanks % kWidth))) * 16;
  }
};

}  // namespace pagedtree::cuda
