// A few rows (plain decode) against one KV tile (an engine, see engine_fp32.h): reads K and V in place, since packing
// would cost more than the arithmetic, and prefetches the next tile.
// S[r, key] = Q[r] . K[key];  out[r] = factor[r] * out[r] + sum over keys of weight[r, key] V[key]
// kGroup rows meet kLanes / kGroup keys: kLanes dot products, whose lanes are summed together. Blocks multiplies
// kDotBlock elements (FloatBlocks, PairBlocks). bf16 splits into even and odd elements, which is cheapest; Q and the
// output keep that order.
#pragma once

#include "cpu/isa/attention/workspace.h"
#include "cpu/isa/tile/transpose.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

constexpr int64_t kDotBlock = 2 * kLanes;

template <DType kType>
static inline void load_block(const char* p, vfloat& first, vfloat& second) {
  if constexpr (kType == DType::kBFloat16) {
    const vuint pairs = load_as<vuint>(p);
    first = bits<vfloat>(pairs << 16);
    second = bits<vfloat>(pairs & 0xffff0000u);
  } else {
    first = load_float<kType>(p);
    second = load_float<kType>(p + kLanes * element_size(kType));
  }
}

template <DType kType>
static inline int64_t block_lane(int64_t i) {
  return kType == DType::kBFloat16 ? i % 2 * kLanes + i / 2 : i;
}

template <DType kType>
static inline int64_t block_position(int64_t d) {
  return d / kDotBlock * kDotBlock + block_lane<kType>(d % kDotBlock);
}

template <DType kType>
static inline void restore_order(float* row, int64_t head_dim) {
  if constexpr (kType != DType::kBFloat16) return;
  for (int64_t d = 0; d < head_dim; d += kDotBlock) {
    vfloat low, high;
    interleave(load(row + d), load(row + d + kLanes), low, high);
    store(row + d, low);
    store(row + d + kLanes, high);
  }
}

// Returns the sum of v[i] in lane i.
static inline vfloat sum_lanes(vfloat (&v)[kLanes]) {
#pragma GCC unroll 4
  for (int count = kLanes / 2; count >= 1; count /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      vfloat low, high;
      interleave(v[i], v[i + count], low, high);
      v[i] = low + high;
    }
  }
  return v[0];
}

template <DType kType>
struct FloatBlocks {
  static constexpr int64_t kSize = element_size(kType);
  static constexpr int64_t kKeys = 1;
  using Query = float;
  using Weight = float;
  struct Block {
    vfloat first, second;
  };

  static inline Block load_key(const char* p) {
    Block block;
    load_block<kType>(p, block.first, block.second);
    return block;
  }
  static inline vfloat dot(vfloat sum, const Block& key, const Query* q) {
    return muladd(key.second, load(q + kLanes), muladd(key.first, load(q), sum));
  }
  static inline Block load_values(const char* const* keys, int64_t offset) { return load_key(keys[0] + offset); }
  static inline vfloat load_weight(const Weight* p) { return splat(*p); }
  static inline vfloat add(vfloat sum, vfloat weight, vfloat values) { return muladd(weight, values, sum); }
};

template <typename Blocks, int kGroup>
static inline void dot_rows(const typename Blocks::Query* q, const char* const* keys, const char* const* next,
                            int64_t head_dim, float* scores) {
  constexpr int kKeys = kLanes / kGroup;
  for (int64_t key = 0; key < kKvTile; key += kKeys) {
    vfloat acc[kLanes];  // row r, key i in r * kKeys + i
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) acc[i] = splat(0.0f);
    for (int64_t d = 0; d < head_dim; d += kDotBlock) {
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        const auto block = Blocks::load_key(keys[key + i] + d * Blocks::kSize);
        __builtin_prefetch(next[key + i] + d * Blocks::kSize, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < kGroup; ++r) {
          vfloat& sum = acc[r * kKeys + i];
          sum = Blocks::dot(sum, block, q + r * head_dim + d);
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

// Prefetches rows in memory order, which is faster than the order of the loops over V's columns.
struct RowPrefetch {
  const char* const* row;
  int64_t row_bytes;
  int64_t offset = 0;

  void step(int64_t bytes) {
    __builtin_prefetch(*row + offset, 0, 2);
    offset += bytes;
    if (offset == row_bytes) offset = 0, ++row;
  }
};

template <typename Blocks, int kGroup, int64_t kWeightStride>
static inline void add_weighted_rows(const typename Blocks::Weight* weights, const char* const* keys,
                                     const char* const* next, int64_t head_dim, const float* factors, float* out) {
  RowPrefetch prefetch{next, head_dim * Blocks::kSize};
  for (int64_t d = 0; d < head_dim; d += kDotBlock) {
    vfloat acc[kGroup][2];
    for (int r = 0; r < kGroup; ++r) acc[r][0] = acc[r][1] = splat(0.0f);
    for (int64_t key = 0; key < kKvTile; key += Blocks::kKeys) {
      const auto values = Blocks::load_values(keys + key, d * Blocks::kSize);
      for (int64_t i = 0; i < Blocks::kKeys; ++i) prefetch.step(kDotBlock * Blocks::kSize);
#pragma GCC unroll 16
      for (int r = 0; r < kGroup; ++r) {
        const auto weight = Blocks::load_weight(weights + r * kWeightStride + key);
        acc[r][0] = Blocks::add(acc[r][0], weight, values.first);
        acc[r][1] = Blocks::add(acc[r][1], weight, values.second);
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

// Splits [0, rows) into groups.
template <typename Body>
static inline void for_row_groups(int64_t rows, const Body& body) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) body.template operator()<4>(r);
  if (r + 2 <= rows) body.template operator()<2>(r), r += 2;
  if (r < rows) body.template operator()<1>(r);
}

template <DType kType>
class DotEngine {
 public:
  static constexpr bool kPacks = false;

  DotEngine(const TreeAttentionParams& p, const RowTile& tile, const Workspace& ws) : p_(p), tile_(tile), ws_(ws) {}

  void load_q() const {
    with_dtype(p_.q_dtype, [&]<DType kQType>() {
      for (int64_t r = 0; r < tile_.rows; ++r) {
        const char* row = q_row(p_, tile_, r);
        for (int64_t d = 0; d < p_.head_dim; d += kLanes) {
          store(ws_.k + d, load_float<kQType>(row + d * element_size(kQType)));
        }
        for (int64_t d = 0; d < p_.head_dim; ++d) ws_.q[r * p_.head_dim + block_position<kType>(d)] = ws_.k[d];
      }
    });
  }

  void scores(const KeyRows& keys, const KeyRows& next) const {
    for_row_groups(tile_.rows, [&]<int kGroup>(int64_t r) {
      dot_rows<FloatBlocks<kType>, kGroup>(ws_.q + r * p_.head_dim, keys.k, next.k, p_.head_dim,
                                           ws_.scores + r * kKvTile);
    });
  }

  void store_weights(int64_t r, int64_t key, vfloat weights) const { store(ws_.scores + r * kKvTile + key, weights); }

  void accumulate(const KeyRows& keys, const KeyRows& next) const {
    for_row_groups(tile_.rows, [&]<int kGroup>(int64_t r) {
      add_weighted_rows<FloatBlocks<kType>, kGroup, kKvTile>(ws_.scores + r * kKvTile, keys.v, next.v, p_.head_dim_v,
                                                             ws_.factors + r, ws_.out + r * p_.head_dim_v);
    });
  }

  void finish() const {
    for (int64_t r = 0; r < tile_.rows; ++r) restore_order<kType>(ws_.out + r * p_.head_dim_v, p_.head_dim_v);
  }

 private:
  const TreeAttentionParams& p_;
  const RowTile& tile_;
  const Workspace& ws_;
};

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
