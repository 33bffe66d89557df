// A few rows against one KV tile with bf16 operands: engine_dot.h's way, where the machine multiplies pairs of bf16, so
// that nothing is converted. V is used two keys at a time; the output keeps the order in which their pairs come.
#pragma once

#include "cpu/attention/engine_bf16.h"
#include "cpu/attention/engine_dot.h"

#if defined(PAGEDTREE_BF16_GEMM)

namespace pagedtree::cpu::PAGEDTREE_ISA {

template <DType kType, int kGroup>
static inline void dot_pair_rows(const uint16_t* q, const char* const* keys, const char* const* next, int64_t head_dim,
                                 float* scores) {
  constexpr int kKeys = kLanes / kGroup;
  for (int64_t key = 0; key < kKvTile; key += kKeys) {
    vfloat acc[kLanes];  // row r, key i in r * kKeys + i
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) acc[i] = splat(0.0f);
    for (int64_t d = 0; d < head_dim; d += kDotBlock) {
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        const vuint pairs = load_pairs<kType>(keys[key + i] + d * element_size(kType));
        __builtin_prefetch(next[key + i] + d * element_size(kType), 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < kGroup; ++r) {
          vfloat& sum = acc[r * kKeys + i];
          sum = dot_pairs(sum, pairs, load_as<vuint>(q + r * head_dim + d));
        }
      }
    }
    const vfloat sums = sum_lanes(acc);
    for (int r = 0; r < kGroup; ++r) {
      std::memcpy(scores + r * kKvTile + key, reinterpret_cast<const char*>(&sums) + r * kKeys * sizeof(float),
                  kKeys * sizeof(float));
    }
  }
}

// `weights` are bf16, kWeightStride apart.
template <DType kType, int kGroup, int64_t kWeightStride>
static inline void add_weighted_pair_rows(const uint16_t* weights, const char* const* keys, const char* const* next,
                                          int64_t head_dim, const float* factors, float* out) {
  constexpr int64_t kBlockBytes = kDotBlock * element_size(kType);
  RowPrefetch prefetch{next, head_dim * element_size(kType)};
  for (int64_t d = 0; d < head_dim; d += kDotBlock) {
    vfloat acc[kGroup][2];
    for (int r = 0; r < kGroup; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
    for (int64_t key = 0; key < kKvTile; key += 2) {
      const vuint first = load_pairs<kType>(keys[key] + d * element_size(kType));
      const vuint second = load_pairs<kType>(keys[key + 1] + d * element_size(kType));
      prefetch.step(kBlockBytes);
      prefetch.step(kBlockBytes);
      const vuint even = (first & 0xffffu) | second << 16, odd = first >> 16 | (second & 0xffff0000u);
#pragma GCC unroll 16
      for (int r = 0; r < kGroup; ++r) {
        uint32_t pair;
        std::memcpy(&pair, weights + r * kWeightStride + key, sizeof(pair));
        acc[r][0] = dot_pairs(acc[r][0], splat(pair), even);
        acc[r][1] = dot_pairs(acc[r][1], splat(pair), odd);
      }
    }
    for (int r = 0; r < kGroup; ++r) {
      for (int i = 0; i < 2; ++i) {
        float* to = out + r * head_dim + d + i * kLanes;
        store(to, muladd(load(to), splat(factors[r]), acc[r][i]));
      }
    }
  }
}

template <DType kType>
class DotBf16Engine {
 public:
  static constexpr bool kPacks = false;

  DotBf16Engine(const TreeAttentionParams& p, const RowTile& tile, const Workspace& ws)
      : p_(p), tile_(tile), ws_(ws), q_(reinterpret_cast<uint16_t*>(ws.q)) {}

  void load_q() const {
    for (int64_t r = 0; r < tile_.rows; ++r) {
      std::memcpy(q_ + r * p_.head_dim, q_row(p_, tile_, r), static_cast<size_t>(p_.head_dim) * sizeof(uint16_t));
    }
  }

  void scores(const KeyRows& keys, const KeyRows& next) const {
    for_row_groups(tile_.rows, [&]<int kGroup>(int64_t r) {
      dot_pair_rows<kType, kGroup>(q_ + r * p_.head_dim, keys.k, next.k, p_.head_dim, ws_.scores + r * kKvTile);
    });
  }

  // In the place of the row's own scores.
  void store_weights(int64_t r, int64_t key, vfloat weights) const {
    store_float<DType::kBFloat16>(weights_of(r) + key, weights);
  }

  void accumulate(const KeyRows& keys, const KeyRows& next) const {
    for_row_groups(tile_.rows, [&]<int kGroup>(int64_t r) {
      add_weighted_pair_rows<kType, kGroup, 2 * kKvTile>(weights_of(r), keys.v, next.v, p_.head_dim, ws_.factors + r,
                                                         ws_.out + r * p_.head_dim);
    });
  }

  void finish() const {
    for (int64_t r = 0; r < tile_.rows; ++r) restore_order<DType::kBFloat16>(ws_.out + r * p_.head_dim, p_.head_dim);
  }

 private:
  uint16_t* weights_of(int64_t r) const { return reinterpret_cast<uint16_t*>(ws_.scores + r * kKvTile); }

  const TreeAttentionParams& p_;
  const RowTile& tile_;
  const Workspace& ws_;
  uint16_t* q_;
};

}  // namespace pagedtree::cpu::PAGEDTREE_ISA

#endif  // PAGEDTREE_BF16_GEMM
