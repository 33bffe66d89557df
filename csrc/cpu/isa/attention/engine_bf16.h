// Many rows against one KV tile with bf16 operands (an engine, see engine_fp32.h): for bf16 queries over a bf16 or fp8
// cache, where the machine multiplies bf16. e4m3 is exact in bf16; the weights are rounded to it.
#pragma once

#include "cpu/isa/attention/workspace.h"
#include "cpu/isa/tile/gemm_bf16.h"
#include "cpu/isa/tile/transpose.h"

#if defined(PAGEDTREE_BF16_GEMM)

namespace pagedtree::cpu::PAGEDTREE_ISA {

static_assert(kLanes == kBf16Panel && kMTile % kBf16Rows == 0);

// Elements 2i and 2i + 1 of a row as bf16 in lane i.
template <DType kType>
static inline vuint load_pairs(const char* p) {
  if constexpr (kType == DType::kBFloat16) {
    return load_as<vuint>(p);
  } else {
    static_assert(kType == DType::kFloat8E4M3);
    const vuint codes = __builtin_convertvector(load_as<vhalf>(p), vuint);
    const vuint low = bits<vuint>(float_from_e4m3(codes & 0xffu)), high = bits<vuint>(float_from_e4m3(codes >> 8));
    return (low >> 16) | (high & 0xffff0000u);
  }
}

// K: panels of keys [kKvTile / 16, D / 2, 16, 2].
template <DType kType>
static inline void pack_k_pairs(const char* const* rows, int64_t head_dim, uint16_t* packed) {
  constexpr int64_t kSize = element_size(kType);
  for (int64_t key = 0; key < kKvTile; key += kLanes, packed += kLanes * head_dim) {
    for (int64_t d = 0; d < head_dim; d += 2 * kLanes) {
      vfloat block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = bits<vfloat>(load_pairs<kType>(rows[key + i] + d * kSize));
      transpose(block);
      for (int i = 0; i < kLanes; ++i) std::memcpy(packed + (d + 2 * i) * kLanes, &block[i], sizeof(vfloat));
    }
  }
}

// V: panels of columns [Dv / 16, kKvTile / 2, 16, 2].
template <DType kType>
static inline void pack_v_pairs(const char* const* rows, int64_t head_dim, uint16_t* packed) {
  constexpr int64_t kSize = element_size(kType);
  for (int64_t key = 0; key < kKvTile; key += 2) {
    uint16_t* to = packed + key * kLanes;
    for (int64_t d = 0; d < head_dim; d += 2 * kLanes, to += 2 * kKvTile * kLanes) {
      const auto first = bits<vshort>(load_pairs<kType>(rows[key] + d * kSize)),
                 second = bits<vshort>(load_pairs<kType>(rows[key + 1] + d * kSize));
      vshort low, high;
      interleave(first, second, low, high);
      std::memcpy(to, &low, sizeof(low));
      std::memcpy(to + kKvTile * kLanes, &high, sizeof(high));
    }
  }
}

class Bf16Engine {
 public:
  static constexpr bool kPacks = true;

  Bf16Engine(const TreeAttentionParams& p, const RowTile& tile, const Workspace& ws)
      : p_(p), tile_(tile), ws_(ws), weights_(half(ws.scores)) {}

  void load_q() const {
    for (int64_t r = 0; r < tile_.rows; ++r) {
      std::memcpy(half(ws_.q) + r * p_.head_dim, q_row(p_, tile_, r),
                  static_cast<size_t>(p_.head_dim) * sizeof(uint16_t));
    }
  }

  static bool takes(const TreeAttentionParams& p) {
    return p.q_dtype == DType::kBFloat16 && (p.kv_dtype == DType::kBFloat16 || p.kv_dtype == DType::kFloat8E4M3);
  }

  void scores(const KeyRows& keys, const KeyRows&) const {
    if (p_.kv_dtype == DType::kBFloat16) {
      pack_k_pairs<DType::kBFloat16>(keys.k, p_.head_dim, half(ws_.k));
    } else {
      pack_k_pairs<DType::kFloat8E4M3>(keys.k, p_.head_dim, half(ws_.k));
    }
    gemm_bf16<false>(half(ws_.q), p_.head_dim, half(ws_.k), p_.head_dim, nullptr, ws_.scores, kKvTile, tile_.rows,
                     kKvTile);
  }

  void store_weights(int64_t r, int64_t key, vfloat weights) const {
    store_float<DType::kBFloat16>(weights_ + r * kKvTile + key, weights);
  }

  void accumulate(const KeyRows& keys, const KeyRows&) const {
    if (p_.kv_dtype == DType::kBFloat16) {
      pack_v_pairs<DType::kBFloat16>(keys.v, p_.head_dim_v, half(ws_.v));
    } else {
      pack_v_pairs<DType::kFloat8E4M3>(keys.v, p_.head_dim_v, half(ws_.v));
    }
    gemm_bf16<true>(weights_, kKvTile, half(ws_.v), kKvTile, ws_.factors, ws_.out, p_.head_dim_v, tile_.rows,
                    p_.head_dim_v);
  }

  void finish() const {}

 private:
  static uint16_t* half(float* memory) { return reinterpret_cast<uint16_t*>(memory); }

  const TreeAttentionParams& p_;
  const RowTile& tile_;
  const Workspace& ws_;
  uint16_t* weights_;  // [kMTile, kKvTile], over the scores: a row's weights replace earlier rows' scores
};

}  // namespace pagedtree::cpu::PAGEDTREE_ISA

#endif  // PAGEDTREE_BF16_GEMM
