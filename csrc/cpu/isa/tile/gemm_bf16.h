// bf16 products with fp32 sums, by AMX tiles or AVX-512 dot products of pairs.
// multiply_tall (scores): C[64, 16] = A[64, depth] B[depth, 16]
// add_wide (values): C[16, columns] += A[16, 64] B[64, columns], columns a multiple of 32
// A has tiles of 16 rows x 32 depths, [depth / 32, 64, 32] and [64 / 32, 16, 32]; B has panels of 16 columns with
// paired depths, [columns / 16, depth / 2, 16, 2].
// Each special instruction has a plain version, for test builds on any machine (PAGEDTREE_EMULATE_AVX512,
// PAGEDTREE_EMULATE_AMX; see CMakeLists.txt).
#pragma once

#include "cpu/isa/tile/vec.h"

#if defined(__AVX512BF16__) || defined(PAGEDTREE_EMULATE_AVX512)
#define PAGEDTREE_BF16_GEMM
#endif

#if defined(PAGEDTREE_BF16_GEMM)

namespace pagedtree::cpu::PAGEDTREE_ISA {

constexpr int kTileRows = 16;                       // of A and C; columns of C
constexpr int kTileDepth = 32;                      // of A and B
constexpr int kTileSize = kTileRows * kTileDepth;   // elements of A and B
constexpr int kTileFloats = kTileRows * kTileRows;  // elements of C
constexpr int kTallRows = 64;                       // of A for scores; depth for values

static inline vfloat dot_pairs(vfloat acc, vuint a, vuint b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  acc += bits<vfloat>(a & 0xffff0000u) * bits<vfloat>(b & 0xffff0000u);
  return acc + bits<vfloat>(a << 16) * bits<vfloat>(b << 16);
#endif
}

#if defined(__AMX_BF16__) || defined(PAGEDTREE_EMULATE_AMX)

#if defined(__AMX_BF16__)
#define PT_TILE_ZERO(tile) _tile_zero(tile)
#define PT_TILE_LOAD(tile, base, stride) _tile_loadd(tile, base, stride)
#define PT_TILE_STORE(tile, base, stride) _tile_stored(tile, base, stride)
#define PT_TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)

// Configures eight tiles of 16 rows x 64 bytes.
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

// NaN stands in for the fault of an unconfigured tile.
struct TileSession {
  TileSession() { std::memset(emulated_tiles, 0xff, sizeof(emulated_tiles)); }
};
#endif

static inline void multiply_tall(const uint16_t* a, const uint16_t* b, int64_t depth, float* c) {
  PT_TILE_ZERO(0);
  PT_TILE_ZERO(1);
  PT_TILE_ZERO(2);
  PT_TILE_ZERO(3);
  for (int64_t k = 0; k < depth; k += kTileDepth, a += kTallRows * kTileDepth, b += kTileSize) {
    PT_TILE_LOAD(4, b, 64);
    PT_TILE_LOAD(5, a, 64);
    PT_TILE_DOT(0, 5, 4);
    PT_TILE_LOAD(6, a + kTileSize, 64);
    PT_TILE_DOT(1, 6, 4);
    PT_TILE_LOAD(7, a + 2 * kTileSize, 64);
    PT_TILE_DOT(2, 7, 4);
    PT_TILE_LOAD(5, a + 3 * kTileSize, 64);
    PT_TILE_DOT(3, 5, 4);
  }
  PT_TILE_STORE(0, c, 64);
  PT_TILE_STORE(1, c + kTileFloats, 64);
  PT_TILE_STORE(2, c + 2 * kTileFloats, 64);
  PT_TILE_STORE(3, c + 3 * kTileFloats, 64);
}

static inline void add_wide(const uint16_t* a, const uint16_t* b, float* c, int64_t columns) {
  PT_TILE_LOAD(6, a, 64);
  PT_TILE_LOAD(7, a + kTileSize, 64);
  for (int64_t n = 0; n < columns; n += 2 * kTileRows, b += 4 * kTileSize, c += 2 * kTileRows) {
    PT_TILE_LOAD(0, c, columns * 4);
    PT_TILE_LOAD(2, b, 64);
    PT_TILE_DOT(0, 6, 2);
    PT_TILE_LOAD(1, c + kTileRows, columns * 4);
    PT_TILE_LOAD(3, b + 2 * kTileSize, 64);
    PT_TILE_DOT(1, 6, 3);
    PT_TILE_LOAD(4, b + kTileSize, 64);
    PT_TILE_DOT(0, 7, 4);
    PT_TILE_LOAD(5, b + 3 * kTileSize, 64);
    PT_TILE_DOT(1, 7, 5);
    PT_TILE_STORE(0, c, columns * 4);
    PT_TILE_STORE(1, c + kTileRows, columns * 4);
  }
}

#else

struct TileSession {};

// Adds 16 rows of A x a panel, over one tile of A.
static inline void dot_tile(vfloat (&acc)[kTileRows], const uint16_t* a, const uint16_t* b) {
  for (int k = 0; k < kTileDepth; k += 2) {
    const auto panel = load_as<vuint>(b + k * kTileRows);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      uint32_t pair;
      std::memcpy(&pair, a + r * kTileDepth + k, sizeof(pair));
      acc[r] = dot_pairs(acc[r], splat(pair), panel);
    }
  }
}

static inline void multiply_tall(const uint16_t* a, const uint16_t* b, int64_t depth, float* c) {
  for (int tile = 0; tile < kTallRows / kTileRows; ++tile, a += kTileSize, c += kTileFloats) {
    vfloat acc[kTileRows];
    for (int r = 0; r < kTileRows; ++r) acc[r] = splat(0.0f);
    for (int64_t k = 0; k < depth; k += kTileDepth) dot_tile(acc, a + k * kTallRows, b + k * kTileRows);
    for (int r = 0; r < kTileRows; ++r) store(c + r * kTileRows, acc[r]);
  }
}

static inline void add_wide(const uint16_t* a, const uint16_t* b, float* c, int64_t columns) {
  for (int64_t n = 0; n < columns; n += kTileRows, b += kTallRows * kTileRows) {
    vfloat acc[kTileRows];
    for (int r = 0; r < kTileRows; ++r) acc[r] = load(c + r * columns + n);
    dot_tile(acc, a, b);
    dot_tile(acc, a + kTileSize, b + kTileSize);
    for (int r = 0; r < kTileRows; ++r) store(c + r * columns + n, acc[r]);
  }
}

#endif

}  // namespace pagedtree::cpu::PAGEDTREE_ISA

#endif  // PAGEDTREE_BF16_GEMM
