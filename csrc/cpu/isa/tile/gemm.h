// C = A B or C = factor[row] * C + A B in fp32, cache-resident: A [rows, depth], B in panels [columns / kPanel, depth,
// kPanel]. Partial sums of kGemmDepth terms reduce rounding errors.
#pragma once

#include "cpu/isa/tile/vec.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

constexpr int kPanel = 2 * kLanes;
constexpr int64_t kGemmDepth = 64;
#if defined(__AVX512F__)
constexpr int kGemmRows = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int kGemmRows = 6;  // 12 accumulators of 16 registers
#else
constexpr int kGemmRows = 4;
#endif

template <int kRows, bool kAccumulate>
static inline void gemm_block(const float* a, int64_t lda, const float* panel, int64_t depth, const float* factors,
                              float* c, int64_t ldc) {
  for (int64_t begin = 0; begin < depth; begin += kGemmDepth) {
    vfloat acc[kRows][2];
    for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
    for (int64_t k = begin; k < min_of(begin + kGemmDepth, depth); ++k) {
      const vfloat b0 = load(panel + k * kPanel), b1 = load(panel + k * kPanel + kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const vfloat value = splat(a[r * lda + k]);
        acc[r][0] = muladd(value, b0, acc[r][0]);
        acc[r][1] = muladd(value, b1, acc[r][1]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < 2; ++i) {
        float* to = c + r * ldc + i * kLanes;
        if (begin > 0) {
          acc[r][i] += load(to);
        } else if (kAccumulate) {
          acc[r][i] = muladd(load(to), splat(factors[r]), acc[r][i]);
        }
        store(to, acc[r][i]);
      }
    }
  }
}

template <int kRows, bool kAccumulate>
static inline void gemm_last_rows(int64_t rows, const float* a, int64_t lda, const float* panel, int64_t depth,
                                  const float* factors, float* c, int64_t ldc) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return gemm_block<kRows, kAccumulate>(a, lda, panel, depth, factors, c, ldc);
    gemm_last_rows<kRows - 1, kAccumulate>(rows, a, lda, panel, depth, factors, c, ldc);
  }
}

template <bool kAccumulate>
static inline void gemm(const float* a, int64_t lda, const float* b, int64_t depth, const float* factors, float* c,
                        int64_t ldc, int64_t rows, int64_t columns) {
  for (int64_t n = 0; n < columns; n += kPanel) {
    const float* panel = b + n * depth;
    int64_t r = 0;
    for (; r + kGemmRows <= rows; r += kGemmRows) {
      gemm_block<kGemmRows, kAccumulate>(a + r * lda, lda, panel, depth, factors + r, c + r * ldc + n, ldc);
    }
    gemm_last_rows<kGemmRows - 1, kAccumulate>(rows - r, a + r * lda, lda, panel, depth, factors + r, c + r * ldc + n,
                                               ldc);
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
