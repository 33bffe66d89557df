// Many rows against one KV tile in fp32: converts and packs K and V for tile/gemm.h directly from the pages.
// S = Q K^T;  out = factor * out + weights V
// An engine computes one head of a row tile, with all state in that head's workspace: load_q(); per KV tile scores(),
// softmax with store_weights(), accumulate(), or attend() for all three; finish(). If it packs K and V (kPacks), the
// caller prefetches.
#pragma once

#include "cpu/isa/attention/workspace.h"
#include "cpu/isa/tile/gemm.h"
#include "cpu/isa/tile/transpose.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// Packs K^T in key panels [kKvTile / kPanel, D, kPanel].
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

// Packs V in column panels [Dv / kPanel, kKvTile, kPanel].
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

class Fp32Engine {
 public:
  static constexpr bool kPacks = true;

  Fp32Engine(const TreeAttentionParams& p, const RowTile& tile, const Workspace& ws) : p_(p), tile_(tile), ws_(ws) {}

  void load_q() const {
    with_dtype(p_.q_dtype, [&]<DType kType>() {
      for (int64_t r = 0; r < tile_.rows; ++r) {
        const char* row = q_row(p_, tile_, r);
        for (int64_t d = 0; d < p_.head_dim; d += kLanes) {
          store(ws_.q + r * p_.head_dim + d, load_float<kType>(row + d * element_size(kType)));
        }
      }
    });
  }

  void scores(const KeyRows& keys, const KeyRows&) const {
    with_dtype(p_.kv_dtype, [&]<DType kType>() { pack_k<kType>(keys.k, p_.head_dim, ws_.k); });
    gemm<false>(ws_.q, p_.head_dim, ws_.k, p_.head_dim, nullptr, ws_.scores, kKvTile, tile_.rows, kKvTile);
  }

  void store_weights(int64_t r, int64_t key, vfloat weights) const { store(ws_.scores + r * kKvTile + key, weights); }

  void accumulate(const KeyRows& keys, const KeyRows&) const {
    with_dtype(p_.kv_dtype, [&]<DType kType>() { pack_v<kType>(keys.v, p_.head_dim_v, ws_.v); });
    gemm<true>(ws_.scores, kKvTile, ws_.v, kKvTile, ws_.factors, ws_.out, p_.head_dim_v, tile_.rows, p_.head_dim_v);
  }

  void finish() const {}

 private:
  const TreeAttentionParams& p_;
  const RowTile& tile_;
  const Workspace& ws_;
};

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
