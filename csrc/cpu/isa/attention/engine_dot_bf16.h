// engine_dot.h on machines that multiply bf16 pairs, without conversions. V is read two keys at a time; the output
// keeps the order of the pairs.
#pragma once

#include "cpu/isa/attention/engine_bf16.h"
#include "cpu/isa/attention/engine_dot.h"

#if defined(PAGEDTREE_BF16_GEMM)

namespace pagedtree::cpu::PAGEDTREE_ISA {

template <DType kType>
struct PairBlocks {
  static constexpr int64_t kSize = element_size(kType);
  static constexpr int64_t kKeys = 2;
  using Query = uint16_t;
  using Weight = uint16_t;
  struct Values {
    vuint first, second;  // even and odd elements of two keys
  };

  static inline vuint load_key(const char* p) { return load_pairs<kType>(p); }
  static inline vfloat dot(vfloat sum, vuint key, const Query* q) { return dot_pairs(sum, key, load_as<vuint>(q)); }
  static inline Values load_values(const char* const* keys, int64_t offset) {
    const vuint first = load_key(keys[0] + offset), second = load_key(keys[1] + offset);
    return {(first & 0xffffu) | second << 16, first >> 16 | (second & 0xffff0000u)};
  }
  static inline vuint load_weight(const Weight* p) {
    uint32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return splat(pair);
  }
  static inline vfloat add(vfloat sum, vuint weight, vuint values) { return dot_pairs(sum, weight, values); }
};

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
      dot_rows<PairBlocks<kType>, kGroup>(q_ + r * p_.head_dim, keys.k, next.k, p_.head_dim, ws_.scores + r * kKvTile);
    });
  }

  // Weights overwrite the row's scores.
  void store_weights(int64_t r, int64_t key, vfloat weights) const {
    store_float<DType::kBFloat16>(weights_of(r) + key, weights);
  }

  void accumulate(const KeyRows& keys, const KeyRows& next) const {
    for_row_groups(tile_.rows, [&]<int kGroup>(int64_t r) {
      add_weighted_rows<PairBlocks<kType>, kGroup, 2 * kKvTile>(weights_of(r), keys.v, next.v, p_.head_dim_v,
                                                                ws_.factors + r, ws_.out + r * p_.head_dim_v);
    });
  }

  void finish() const {
    for (int64_t r = 0; r < tile_.rows; ++r)
      restore_order<DType::kBFloat16>(ws_.out + r * p_.head_dim_v, p_.head_dim_v);
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
