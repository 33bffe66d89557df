// Swizzled matrices in shared memory: ldmatrix reads 8 rows of a column without bank conflicts.
#pragma once

#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

// kRows rows of kRowBytes as panels of 128 bytes, then one of 64 and one of 32 for the remainder. Within a panel a
// chunk of 16 bytes is xor-ed with its row, so that 8 rows of a column cover all 32 banks.
template <int kRowBytes, int kRows>
struct Panels {
  static_assert(kRowBytes % 32 == 0 && kRows % 8 == 0);
  static constexpr int kBytes = kRowBytes * kRows;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kWide = kChunks / 8, kHalf = kChunks / 4 % 2, kQuarter = kChunks / 2 % 2;  // panels

  // Unsigned, so that the compiler separates the lane's bits from constants.
  static __device__ __forceinline__ uint32_t offset(uint32_t row, uint32_t chunk) {
    constexpr uint32_t kWideChunks = kWide * 8, kMost = kWideChunks + kHalf * 4;
    if constexpr (kWideChunks != 0) {
      if (chunk < kWideChunks) return chunk / 8 * 128 * kRows + in_panel<8>(row, chunk % 8);
    }
    if (chunk < kMost) return kWideChunks * 16 * kRows + in_panel<4>(row, (chunk - kWideChunks) % 4);
    return kMost * 16 * kRows + in_panel<2>(row, (chunk - kMost) % 2);
  }

  // Calls copy(load(row), chunk, offset) for the thread's chunks, all load() first, so that their latencies overlap.
  template <int kThreads, typename Load, typename Copy>
  static __device__ __forceinline__ void for_each_chunk(uint32_t thread, const Load& load, const Copy& copy) {
    if constexpr (kWide != 0) each_in_panels<kThreads, 8, kWide>(thread, 0, load, copy);
    if constexpr (kHalf != 0) each_in_panels<kThreads, 4, 1>(thread, kWide * 8, load, copy);
    if constexpr (kQuarter != 0) each_in_panels<kThreads, 2, 1>(thread, kWide * 8 + kHalf * 4, load, copy);
  }

 private:
  template <int kThreads, int kWidth, int kPanels, typename Load, typename Copy>
  static __device__ __forceinline__ void each_in_panels(uint32_t thread, uint32_t first_chunk, const Load& load,
                                                        const Copy& copy) {
    constexpr int kStep = kThreads / kWidth, kSteps = (kRows + kStep - 1) / kStep;  // rows per step
    const uint32_t first_row = thread / kWidth, chunk = thread % kWidth;
    const auto is_inside = [&](uint32_t row) { return kRows % kStep == 0 || row < kRows; };
    decltype(load(first_row)) rows[kSteps];
#pragma unroll
    for (uint32_t i = 0; i < kSteps; ++i) {
      const uint32_t row = first_row + i * kStep;
      if (is_inside(row)) rows[i] = load(row);
    }
#pragma unroll
    for (uint32_t i = 0; i < kSteps; ++i) {
      const uint32_t row = first_row + i * kStep;
      if (!is_inside(row)) return;
#pragma unroll
      for (uint32_t panel = 0; panel < kPanels; ++panel) {
        const uint32_t first = first_chunk + panel * kWidth;
        copy(rows[i], first + chunk, first * 16 * kRows + in_panel<kWidth>(row, chunk));
      }
    }
  }

  template <int kWidth>
  static __device__ __forceinline__ uint32_t in_panel(uint32_t row, uint32_t chunk) {
    constexpr uint32_t kRowsInBanks = 8 / kWidth;
    return (row * kWidth + (chunk ^ (row / kRowsInBanks % kWidth))) * 16;
  }
};

}  // namespace pagedtree::cuda
