// C = A x B, or factor[row] * C + A x B, for bf16 A and B and fp32 C: with AMX tiles, or with AVX-512's dot product of
// pairs. Both read B in panels of 16 columns whose neighbouring depths are paired: [columns / 16, depth / 2, 16, 2].
//
// Each special instruction is written here once, beside a plain version: a test build compiles these kernels for any
// machine (PAGEDTREE_EMULATE_AVX512, PAGEDTREE_EMULATE_AMX; see CMakeLists.txt).
#pragma once

#include <algorithm>

#include "cpu/isa/tile/vec.h"

#if defined(__AVX512BF16__) || defined(PAGEDTREE_EMULATE_AVX512)
#define PAGEDTREE_BF16_GEMM
#endif

#if defined(PAGEDTREE_BF16_GEMM)

namespace pagedtree::cpu::PAGEDTREE_ISA {

constexpr int kBf16Panel = 16;
constexpr int kBf16Rows = 32;  // C is written in blocks of this many rows: the memory of A and C must hold full blocks

// acc + the dot products of pairs of bf16.
static inline vfloat dot_pairs(vfloat acc, vuint a, vuint b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  acc += bits<vfloat>(a & 0xffff0000u) * bits<vfloat>(b & 0xffff0000u);
  return acc + bits<vfloat>(a << 16) * bits<vfloat>(b << 16);
#endif
}

template <bool kAccumulate>
static inline void write_row(float* c, vfloat product, float factor) {
  store(c, kAccumulate ? muladd(load(c), splat(factor), product) : product);
}

#if defined(__AMX_BF16__) || defined(PAGEDTREE_EMULATE_AMX)

#if defined(__AMX_BF16__)
#define PT_TILE_ZERO(tile) _tile_zero(tile)
#define PT_TILE_LOAD(tile, base, stride) _tile_loadd(tile, base, stride)
#define PT_TILE_STORE(tile, base, stride) _tile_stored(tile, base, stride)
#define PT_TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)

// Configures eight tiles of 16 rows of 64 bytes for as long as a thread computes.
struct TileSession {
  TileSession() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  ~TileSession() { _tile_release(); }
};
#else
static thread_local vuint emulated_tiles[8][16];
#define PT_TILE_ZERO(tile) std::memset(emulated_tiles[tile], 0, sizeof(emulated_tiles[tile]))
#define PT_TILE_LOAD(tile, base, stride) emulated_load(emulated_tiles[tile], base, stride)
#define PT_TILE_STORE(tile, base, stride) emulated_store(emulated_tiles[tile], base, stride)
#define PT_TILE_DOT(c, a, b) emulated_dot(emulated_tiles[c], emulated_tiles[a], emulated_tiles[b])

static inline void emulated_load(vuint* tile, const void* base, int64_t stride) {
  for (int r = 0; r < 16; ++r) std::memcpy(&tile[r], static_cast<const char*>(base) + r * stride, sizeof(vuint));
}
static inline void emulated_store(const vuint* tile, void* base, int64_t stride) {
  for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(base) + r * stride, &tile[r], sizeof(vuint));
}
static inline void emulated_dot(vuint* c, const vuint* a, const vuint* b) {
  for (int r = 0; r < 16; ++r) {
    vfloat sum = bits<vfloat>(c[r]);
    for (int k = 0; k < 16; ++k) sum = dot_pairs(sum, splat(a[r][k]), b[k]);
    c[r] = bits<vuint>(sum);
  }
}

// A tile that the thread did not configure would fault. NaN stands for that, instead of the last call's values.
struct TileSession {
  TileSession() { std::memset(emulated_tiles, 0xff, sizeof(emulated_tiles)); }
};
#endif

// A block of 32 x 32 of C: 2 x 2 tiles, 32 of the depth per step.
template <bool kAccumulate>
static inline void gemm_bf16(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t depth, const float* factors,
                             float* c, int64_t ldc, int64_t rows, int64_t columns) {
  constexpr int64_t kTileBytes = 16 * 64;
  for (int64_t n = 0; n < columns; n += 2 * kBf16Panel) {
    const uint16_t *left = b + n * depth, *right = left + kBf16Panel * depth;
    for (int64_t r = 0; r < rows; r += kBf16Rows) {
      const uint16_t* block = a + r * lda;
      float* const to = c + r * ldc + n;
      // Few rows find a new maximum, so that factors are 1: then products are added to C in the tiles.
      const int64_t of_c = min_of<int64_t>(kBf16Rows, rows - r);
      const bool adds = kAccumulate && of_c == kBf16Rows &&
                        std::all_of(factors + r, factors + r + of_c, [](float f) { return f == 1.0f; });
      if (adds) {
        PT_TILE_LOAD(0, to, ldc * 4);
        PT_TILE_LOAD(1, to + 16, ldc * 4);
        PT_TILE_LOAD(2, to + 16 * ldc, ldc * 4);
        PT_TILE_LOAD(3, to + 16 * ldc + 16, ldc * 4);
      } else {
        PT_TILE_ZERO(0);
        PT_TILE_ZERO(1);
        PT_TILE_ZERO(2);
        PT_TILE_ZERO(3);
      }
      for (int64_t k = 0; k < depth; k += 32) {
        PT_TILE_LOAD(4, block + k, lda * 2);
        PT_TILE_LOAD(5, block + 16 * lda + k, lda * 2);
        PT_TILE_LOAD(6, left + k * kBf16Panel, 64);
        PT_TILE_LOAD(7, right + k * kBf16Panel, 64);
        PT_TILE_DOT(0, 4, 6);
        PT_TILE_DOT(1, 4, 7);
        PT_TILE_DOT(2, 5, 6);
        PT_TILE_DOT(3, 5, 7);
      }
      if (!kAccumulate || adds) {
        PT_TILE_STORE(0, to, ldc * 4);
        PT_TILE_STORE(1, to + 16, ldc * 4);
        PT_TILE_STORE(2, to + 16 * ldc, ldc * 4);
        PT_TILE_STORE(3, to + 16 * ldc + 16, ldc * 4);
        continue;
      }
      alignas(64) float products[4 * kTileBytes / sizeof(float)];
      PT_TILE_STORE(0, products, 128);
      PT_TILE_STORE(1, products + 16, 128);
      PT_TILE_STORE(2, products + 16 * 32, 128);
      PT_TILE_STORE(3, products + 16 * 32 + 16, 128);
      for (int64_t i = 0; i < of_c; ++i) {
        write_row<true>(to + i * ldc, load(products + i * 32), factors[r + i]);
        write_row<true>(to + i * ldc + 16, load(products + i * 32 + 16), factors[r + i]);
      }
    }
  }
}

#else

struct TileSession {};

constexpr int kDotRows = 12;  // 24 accumulators of 32 registers

template <int kRows, bool kAccumulate>
static inline void dot_block(const uint16_t* a, int64_t lda, const uint16_t* left, const uint16_t* right, int64_t depth,
                             const float* factors, float* c, int64_t ldc) {
  vfloat acc[kRows][2];
  for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
  for (int64_t k = 0; k < depth; k += 2) {
    const vuint b0 = load_as<vuint>(left + k * kBf16Panel), b1 = load_as<vuint>(right + k * kBf16Panel);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      uint32_t pair;
      std::memcpy(&pair, a + r * lda + k, sizeof(pair));
      acc[r][0] = dot_pairs(acc[r][0], splat(pair), b0);
      acc[r][1] = dot_pairs(acc[r][1], splat(pair), b1);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const float factor = kAccumulate ? factors[r] : 0.0f;
    write_row<kAccumulate>(c + r * ldc, acc[r][0], factor);
    write_row<kAccumulate>(c + r * ldc + kBf16Panel, acc[r][1], factor);
  }
}

template <int kRows, bool kAccumulate>
static inline void dot_last_rows(int64_t rows, const uint16_t* a, int64_t lda, const uint16_t* left,
                                 const uint16_t* right, int64_t depth, const float* factors, float* c, int64_t ldc) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return dot_block<kRows, kAccumulate>(a, lda, left, right, depth, factors, c, ldc);
    dot_last_rows<kRows - 1, kAccumulate>(rows, a, lda, left, right, depth, factors, c, ldc);
  }
}

template <bool kAccumulate>
static inline void gemm_bf16(const uint16_t* a, int64_t lda, const uint16_t* b, int64_t depth, const float* factors,
                             float* c, int64_t ldc, int64_t rows, int64_t columns) {
  for (int64_t n = 0; n < columns; n += 2 * kBf16Panel) {
    const uint16_t *left = b + n * depth, *right = left + kBf16Panel * depth;
    int64_t r = 0;
    for (; r + kDotRows <= rows; r += kDotRows) {
      dot_block<kDotRows, kAccumulate>(a + r * lda, lda, left, right, depth, factors + r, c + r * ldc + n, ldc);
    }
    dot_last_rows<kDotRows - 1, kAccumulate>(rows - r, a + r * lda, lda, left, right, depth, factors + r,
                                             c + r * ldc + n, ldc);
  }
}

#endif

}  // namespace pagedtree::cpu::PAGEDTREE_ISA

#endif  // PAGEDTREE_BF16_GEMM
