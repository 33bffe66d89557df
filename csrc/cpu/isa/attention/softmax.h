// Online softmax over one tile of scores (base 2).
#pragma once

#include "cpu/isa/attention/workspace.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// score = scale * q.k, or with a softcap cap * tanh(q.k * scale / cap).
struct ScoreMap {
  float scale;  // factor of q.k; with a softcap, the exponent in tanh(x) = 1 - 2 / (2^(x * 2 log2 e) + 1)
  float cap;    // 0: none

  vfloat operator()(vfloat dot) const {
    if (cap == 0.0f) return dot * scale;
    return cap - (2.0f * cap) / (exp2(dot * scale) + 1.0f);
  }
};

static inline ScoreMap score_map(const TreeAttentionParams& p, int32_t kv_head) {
  const float scale = p.k_scale != nullptr ? p.scale * p.k_scale[kv_head * p.k_scale_stride] : p.scale;
  if (p.softcap == 0.0f) return {scale * kLog2E, 0.0f};
  return {scale * 2.0f * kLog2E / p.softcap, p.softcap * kLog2E};
}

// Replaces q.k [kKvTile] by 2^(score - maximum), 0 where `visible` has no bit. Returns the rescale factor of earlier
// output.
template <bool kMasked, typename StoreWeights>
static inline float softmax_row(const float* dots, uint64_t visible, const ScoreMap& score, RowState& state,
                                const StoreWeights& store_weights) {
  constexpr int kVectors = kKvTile / kLanes;
  const vint lane_bit = splat(1) << lane_index();
  vfloat scores[kVectors];
  vfloat top = splat(-kInfinity);
  for (int i = 0; i < kVectors; ++i) {
    scores[i] = score(load(dots + i * kLanes));
    if constexpr (kMasked) {
      const vint mask = (splat(static_cast<int32_t>(visible >> (i * kLanes))) & lane_bit) != 0;
      scores[i] = select(mask, scores[i], splat(-kInfinity));
    }
    top = max(top, scores[i]);
  }
  const float maximum = __builtin_fmaxf(state.maximum, reduce_max(top));
  // A finite base for rows without a visible key keeps -inf - base from being NaN.
  const float base = maximum == -kInfinity ? 0.0f : maximum;
  vfloat sum = splat(0.0f);
  for (int i = 0; i < kVectors; ++i) {
    const vfloat weight = exp2(scores[i] - base);
    sum += weight;
    store_weights(i * kLanes, weight);
  }
  const float factor = maximum == state.maximum ? 1.0f : __builtin_exp2f(state.maximum - base);
  state.sum = state.sum * factor + reduce_add(sum);
  state.maximum = maximum;
  return factor;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
