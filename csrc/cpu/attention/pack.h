// Operands of one tile in fp32, in the layouts of tile/gemm.h.
#pragma once

#include "cpu/attention/row_tile.h"
#include "cpu/tile/gemm.h"
#include "cpu/tile/transpose.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// Q rows [rows, D].
template <DType kType>
static inline void pack_q(const TreeAttentionParams& p, const RowTile& tile, float* packed) {
  constexpr int64_t kSize = element_size(kType);
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t offset = tile.token(p, r) * p.q_token_stride + tile.head(p, r) * p.q_head_stride;
    const char* row = static_cast<const char*>(p.q) + offset * kSize;
    for (int64_t d = 0; d < p.head_dim; d += kLanes) {
      store(packed + r * p.head_dim + d, load_float<kType>(row + d * kSize));
    }
  }
}

// K transposed: panels of keys [kKvTile / kPanel, D, kPanel].
template <DType kType>
static inline void pack_k(const char* const* rows, int64_t head_dim, float* packed) {
  constexpr int64_t kSize = element_size(kType);
  for (int64_t key = 0; key < kKvTile; key += kLanes) {
    float* panel = packed + key / kPanel * kPanel * head_dim + key % kPanel;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      vfloat block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = load_float<kType>(rows[key + i] + d * kSize);
      transpose(block);
      for (int i = 0; i < kLanes; ++i) store(panel + (d + i) * kPanel, block[i]);
    }
  }
}

// V: panels of columns [D / kPanel, kKvTile, kPanel].
template <DType kType>
static inline void pack_v(const char* const* rows, int64_t head_dim, float* packed) {
  constexpr int64_t kSize = element_size(kType);
  for (int64_t key = 0; key < kKvTile; ++key) {
    float* row = packed + key * kPanel;
    for (int64_t d = 0; d < head_dim; d += kPanel, row += kKvTile * kPanel) {
      store(row, load_float<kType>(rows[key] + d * kSize));
      store(row + kLanes, load_float<kType>(rows[key] + (d + kLanes) * kSize));
    }
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
