// Many rows against one KV tile in bf16 (an engine, see engine_fp32.h): bf16 queries, bf16 or fp8 cache. e4m3 is exact
// in bf16; softmax weights are rounded.
// S^T = K Q^T;  out = factor * out + 2^(S - base) V
// K is used in place, Q is packed once. Q rows are lanes, so maxima and sums need no shuffles.
#pragma once

#include "cpu/isa/attention/softmax.h"
#include "cpu/isa/tile/gemm_bf16.h"
#include "cpu/isa/tile/transpose.h"

#if defined(PAGEDTREE_BF16_GEMM)

namespace pagedtree::cpu::PAGEDTREE_ISA {

static_assert(kLanes == kTileRows && kKvTile == kTallRows && kMTile % kTileRows == 0);

static inline vshort bf16_from_e4m3(vshort code) {
  // Multiples of 2^-9.
  const vshort small = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const vshort magnitude = code & 0x7f;
  vshort value = (magnitude << 4) + (120 << 7);
  value = magnitude < 8 ? __builtin_shuffle(small, magnitude) : value;
  value = magnitude == 0x7f ? vshort{} + 0x7fc0 : value;
  return value | ((code & 0x80) << 8);
}

template <DType kType>
static inline vuint load_pairs(const char* p) {
  if constexpr (kType == DType::kBFloat16) {
    return load_as<vuint>(p);
  } else {
    static_assert(kType == DType::kFloat8E4M3);
    typedef uint8_t vcodes __attribute__((vector_size(2 * kLanes)));
    return bits<vuint>(bf16_from_e4m3(__builtin_convertvector(load_as<vcodes>(p), vshort)));
  }
}

// Rounds to bf16 and pairs lane by lane.
static inline vuint pairs_of(vfloat first, vfloat second) {
#if defined(__AVX512BF16__)
  const auto halves = bits<vshort>(_mm512_cvtne2ps_pbh(second, first));
  vshort order;
  for (short i = 0; i < 2 * kLanes; ++i) order[i] = static_cast<short>(i / 2 + i % 2 * kLanes);
  return bits<vuint>(__builtin_shuffle(halves, order));
#else
  return bfloat16_from_float(first) | bfloat16_from_float(second) << 16;
#endif
}

// Packs 16 rows as [D / 2, 16, 2].
static inline void pack_panel(const char* const* rows, int64_t head_dim, uint16_t* panel) {
  for (int64_t d = 0; d < head_dim; d += kTileDepth, panel += kTileSize) {
    vfloat block[kLanes];
    for (int i = 0; i < kLanes; ++i) block[i] = load_as<vfloat>(rows[i] + d * 2);
    transpose(block);
    std::memcpy(panel, block, sizeof(block));
  }
}

// Copies K as [D / 32, kKvTile, 32].
template <DType kType>
static inline void copy_k(const char* const* rows, int64_t head_dim, uint16_t* to) {
  for (int64_t key = 0; key < kKvTile; ++key) {
    for (int64_t d = 0; d < head_dim; d += kTileDepth) {
      const vuint pairs = load_pairs<kType>(rows[key] + d * element_size(kType));
      std::memcpy(to + d * kKvTile + key * kTileDepth, &pairs, sizeof(pairs));
    }
  }
}

// Packs V in column panels [Dv / 16, kKvTile / 2, 16, 2].
template <DType kType>
static inline void pack_v(const char* const* rows, int64_t head_dim, uint16_t* packed) {
  for (int64_t key = 0; key < kKvTile; key += 2) {
    uint16_t* to = packed + key * kLanes;
    for (int64_t d = 0; d < head_dim; d += 2 * kLanes, to += 2 * kKvTile * kLanes) {
      const int64_t offset = d * element_size(kType);
      vshort low, high;
      interleave(bits<vshort>(load_pairs<kType>(rows[key] + offset)),
                 bits<vshort>(load_pairs<kType>(rows[key + 1] + offset)), low, high);
      std::memcpy(to, &low, sizeof(low));
      std::memcpy(to + kKvTile * kLanes, &high, sizeof(high));
    }
  }
}

class Bf16Engine {
 public:
  Bf16Engine(const TreeAttentionParams& p, const RowTile& tile, const Workspace& ws)
      : p_(p),
        tile_(tile),
        ws_(ws),
        bases_(ws.factors),
        sums_(ws.scores),
        scores_(sums_ + kMTile),
        weights_(half(scores_ + kKvTile * kLanes)) {}

  static bool takes(const TreeAttentionParams& p) {
    return p.q_dtype == DType::kBFloat16 && (p.kv_dtype == DType::kBFloat16 || p.kv_dtype == DType::kFloat8E4M3);
  }

  void load_q() const {
    for (int64_t first = 0; first < tile_.rows; first += kLanes) {
      const char* rows[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) rows[i] = first + i < tile_.rows ? q_row(p_, tile_, first + i) : kZeroRow;
      pack_panel(rows, p_.head_dim, half(ws_.q) + first * p_.head_dim);
      store(bases_ + first, splat(-kInfinity));
      store(sums_ + first, splat(0.0f));
    }
  }

  // Attends to one KV tile. `visible`: key mask per token, null if all are visible.
  void attend(const KeyRows& keys, const KeyRows& next, const uint64_t* visible) const {
    if (p_.kv_dtype == DType::kBFloat16) {
      copy_k<DType::kBFloat16>(keys.k, p_.head_dim, half(ws_.k));
      pack_v<DType::kBFloat16>(keys.v, p_.head_dim_v, half(ws_.v));
    } else {
      copy_k<DType::kFloat8E4M3>(keys.k, p_.head_dim, half(ws_.k));
      pack_v<DType::kFloat8E4M3>(keys.v, p_.head_dim_v, half(ws_.v));
    }
    const ScoreMap score = score_map(p_, tile_.kv_head);
    const int64_t blocks = ceil_div<int64_t>(tile_.rows, kLanes);
    TilePrefetch prefetch(p_, next);
    const int64_t share = ceil_div<int64_t>(prefetch.lines(), blocks * kKvTile / 2);
    for (int64_t row = 0; row < tile_.rows; row += kLanes) {
      multiply_tall(half(ws_.k), half(ws_.q) + row * p_.head_dim, p_.head_dim, scores_);
      if (visible != nullptr) {
        softmax<true>(row, score, visible, prefetch, share);
      } else {
        softmax<false>(row, score, nullptr, prefetch, share);
      }
      add_wide(weights_, half(ws_.v), ws_.out + row * p_.head_dim_v, p_.head_dim_v);
    }
  }

  void finish() const {
    for (int32_t r = 0; r < tile_.rows; ++r) ws_.states[r] = {bases_[r], sums_[r]};
  }

 private:
  static uint16_t* half(float* memory) { return reinterpret_cast<uint16_t*>(memory); }

  static vint sees(const vuint (&seen)[kKvTile / 32], int key) { return (seen[key / 32] & (1u << key % 32)) != 0; }

  // Replaces scores of 16 rows (lanes) by 2^(score - base). A base may stay up to kSlack below the row's maximum, so
  // that few tiles rescale the output.
  template <bool kMasked>
  void softmax(int64_t row, const ScoreMap& score, const uint64_t* visible, TilePrefetch& prefetch,
               int64_t share) const {
    constexpr float kSlack = 8.0f;
    vuint seen[kKvTile / 32] = {};
    if constexpr (kMasked) {
      for (int64_t i = 0; i < min_of<int64_t>(kLanes, tile_.rows - row); ++i) {
        const int64_t token = (tile_.first_row + row + i) / p_.group_size - tile_.first_row / p_.group_size;
        for (int64_t word = 0; word < kKvTile / 32; ++word) seen[word][i] = visible[token] >> (32 * word);
      }
    }
    const float scale = score.cap == 0.0f ? score.scale : 1.0f;
    vfloat tops[4];
    for (vfloat& top : tops) top = splat(-kInfinity);
    for (int key = 0; key < kKvTile; key += 4) {
      for (int i = 0; i < 4; ++i) {
        float* at = scores_ + (key + i) * kLanes;
        vfloat value = load(at);
        if (score.cap != 0.0f) {
          value = score(value);
          store(at, value);
        }
        tops[i] = max(tops[i], kMasked ? select(sees(seen, key + i), value * scale, splat(-kInfinity)) : value * scale);
      }
    }
    const vfloat top = max(max(tops[0], tops[1]), max(tops[2], tops[3]));
    vfloat base = load(bases_ + row), sum = splat(0.0f), before = load(sums_ + row);
    if (const vint exceeds = top > base + kSlack; lane_bits(exceeds) != 0) {
      const vfloat factors = select(exceeds, exp2(base - top), splat(1.0f));
      base = select(exceeds, top, base);
      store(bases_ + row, base);
      before *= factors;
      for (int64_t i = 0; i < kLanes; ++i) {
        float* out = ws_.out + (row + i) * p_.head_dim_v;
        if (factors[i] == 1.0f) continue;
        for (int64_t d = 0; d < p_.head_dim_v; d += kLanes) store(out + d, load(out + d) * factors[i]);
      }
    }
    // A finite base for rows without a visible key keeps -inf - base from being NaN.
    base = select(base == -kInfinity, splat(0.0f), base);
    for (int half = 0; half < kKvTile / kTileDepth; ++half) {
      vfloat pairs[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        prefetch.step(share);
        const float* two = scores_ + (half * kTileDepth + 2 * i) * kLanes;
        // Rounded products, as above: a maximum minus itself is 0.
        vfloat first = exp2_weight(load(two) * scale - base), second = exp2_weight(load(two + kLanes) * scale - base);
        if constexpr (kMasked) {
          first = select(sees(seen, half * kTileDepth + 2 * i), first, splat(0.0f));
          second = select(sees(seen, half * kTileDepth + 2 * i + 1), second, splat(0.0f));
        }
        sum += first + second;
        pairs[i] = bits<vfloat>(pairs_of(first, second));
      }
      transpose(pairs);
      std::memcpy(weights_ + half * kTileSize, pairs, sizeof(pairs));
    }
    store(sums_ + row, before + sum);
  }

  const TreeAttentionParams& p_;
  const RowTile& tile_;
  const Workspace& ws_;
  float *bases_, *sums_;  // [kMTile]
  float* scores_;         // [kKvTile, 16]
  uint16_t* weights_;     // [kKvTile / 32, 16, 32]
};

}  // namespace pagedtree::cpu::PAGEDTREE_ISA

#endif  // PAGEDTREE_BF16_GEMM
