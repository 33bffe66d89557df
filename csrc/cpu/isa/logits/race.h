// Gumbel-max race: winner = argmax over kept tokens of x + noise.
#pragma once

#include "cpu/isa/logits/filter.h"
#include "cpu/isa/logits/noise.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

struct Winner {
  float score = -kInfinity;
  int32_t token = 0;
};

// Returns the lowest token on ties. Token 0 has the noise of id `first_id`. `peaks` may be null.
template <typename T>
static inline Winner race(const LogitRow& row, const Scale& scale, const Filter& filter, const float* peaks,
                          uint64_t seed, int64_t position, int64_t first_id = 0) {
  const bool filtered = filter.min_logit > -kInfinity || filter.min_x > -kInfinity;
  BlockReader<T> logits(row);
  Noise noise(seed, position, RandomUse::kGumbel, first_id);
  Winner best;
  const auto logit_at = [&](int64_t t) {
    if (t >= row.vocab) return splat(-kInfinity);
    return filtered ? logits(t) : load_bounds<T>(row, t);
  };
  for (int64_t block = 0; block < row.vocab; block += kPeakBlock) {
    if (peaks != nullptr && !reaches(peaks, block, filter.min_logit)) continue;
    if (filtered) logits.open(block, least_kept(filter, scale));
    const float most_of_block = peaks == nullptr ? 0.0f : reduce_max(scale(peaks_at(peaks, block)));  // bounds x
    if (!(most_of_block + kMaxNoise > best.score)) continue;
    const int64_t end = min_of<int64_t>(block + kPeakBlock, row.vocab);
    for (int64_t begin = block; begin < end; begin += kGroupsTokens) {
      // Filters keep few tokens; otherwise few have enough noise. Test the rarer first.
      if (filtered && !logits.any_may_reach(begin, kNoiseGroup)) continue;
      if (!filtered && lane_bits(most_of_block + noise.bounds(begin) > best.score) == 0) continue;
      vfloat x[kNoiseGroup], most = splat(-kInfinity);
      for (int j = 0; j < kNoiseGroup; ++j) {
        x[j] = logit_at(begin + j * kLanes);
        most = max(most, x[j]);
      }
      if (filtered && lane_bits((most >= filter.min_logit) & (scale(most) >= filter.min_x)) == 0) continue;
      for (int j = 0; j < kNoiseGroup; ++j) {
        const vfloat logit = x[j];
        x[j] = scale(logit);
        if (filtered) x[j] = select(kept_lanes(filter, logit, x[j], begin + j * kLanes), x[j], splat(-kInfinity));
      }
      most = largest_of_groups(x);
      if (lane_bits(most + kMaxNoise > best.score) == 0) continue;
      const vfloat bounds = noise.bounds(begin);
      for (uint32_t lanes = lane_bits(most + bounds > best.score); lanes != 0; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes);
        for (int at = lane * kNoiseGroup; at < (lane + 1) * kNoiseGroup; ++at) {
          float of_token = x[at / kLanes][at % kLanes];
          if (!(of_token + bounds[lane] > best.score)) continue;
          if (!filtered && std::is_same_v<T, AdjustedLogit>) {
            of_token = scale(load_logits<T>(row, begin + at / kLanes * kLanes))[at % kLanes];
          }
          const float score = of_token + noise.of_token(begin + at);
          if (score > best.score) best = {score, static_cast<int32_t>(begin + at)};
        }
      }
    }
  }
  return best;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
