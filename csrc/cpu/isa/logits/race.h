// The race of a row's tokens: the largest sum of x and Gumbel noise wins.
#pragma once

#include "cpu/isa/logits/filter.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

struct Winner {
  float score = -kInfinity;
  int64_t token = 0;
};

constexpr int kRaceGroup = 4 * kLanes;  // one Philox block per lane

// Turns the words of the blocks id / 4, id / 4 + 1, ... into those of the tokens id, id + 1, ..., each in its lane.
static inline void shift_words(uint64_t seed, int64_t position, int64_t id, vuint words[4]) {
  interleave_blocks(words);
  uint32_t run[kRaceGroup + 4];
  std::memcpy(run, words, sizeof(vuint) * 4);
  philox<ScalarMath>(seed, position, static_cast<uint32_t>(id / 4) + kLanes, RandomUse::kGumbel, run + kRaceGroup);
  std::memcpy(words, run + id % 4, sizeof(vuint) * 4);
}

// Words above the result give noise of at most `least`, because G <= -log v.
static inline uint32_t largest_word(float least) {
  const float v = least > 0.0f ? exp_exact<ScalarMath>(-least) * 1.001f : 1.0f;
  return static_cast<uint32_t>(min_of(v * 4294967296.0f + 1.0f, 4294967040.0f)) | 0xffu;
}

// The kept token with the largest x + noise, the lowest on ties. Token 0's noise is that of id `first_id`. The peaks of
// the row's blocks may be null.
template <typename T>
static inline Winner race(const LogitRow& row, const Scale& scale, const Filter& filter, const float* peaks,
                          uint64_t seed, int64_t position, int64_t first_id = 0) {
  const bool filtered = filter.min_logit > -kInfinity || filter.min_x > -kInfinity;
  BlockReader<T> logits(row);
  Winner best;
  vfloat x[4];
  const auto load_x = [&](int64_t begin, int j) {
    x[j] = splat(-kInfinity);
    const int64_t t = begin + j * kLanes;
    if (t >= row.vocab) return;
    const vfloat logit = filtered ? logits(t) : load_bounds<T>(row, t);
    x[j] = scale(logit);
    x[j] = select(kept_lanes(filter, logit, x[j], t), x[j], splat(-kInfinity));
  };
  for (int64_t block = 0; block < row.vocab; block += kPeakBlock) {
    if (peaks != nullptr && !reaches(peaks, block, filter.min_logit)) continue;
    if (filtered) logits.open(block, least_kept(filter, scale));
    float most = peaks == nullptr ? 0.0f : reduce_max(scale(peaks_at(peaks, block)));  // an upper bound of x
    uint32_t word = largest_word(best.score - most);
    const int64_t end = min_of(block + kPeakBlock, row.vocab);
    for (int64_t begin = block; begin < end; begin += kRaceGroup) {
      // With a filter few tokens are kept, without one few have enough noise to win. The rarer condition is checked
      // first.
      if (filtered) {
        if (!logits.any_may_reach(begin, 4)) continue;
        for (int j = 0; j < 4; ++j) load_x(begin, j);
        most = reduce_max(max(max(x[0], x[1]), max(x[2], x[3])));
        if (!(most + kMaxGumbel > best.score)) continue;
        word = largest_word(best.score - most);
      }
      const int64_t id = first_id + begin;
      const vuint index = bits<vuint>(lane_index()) + static_cast<uint32_t>(id / 4);
      vuint words[4];
      philox_lanes(seed, position, index, RandomUse::kGumbel, words);
      if (id % 4 != 0) shift_words(seed, position, id, words);
      const vuint least = min(min(words[0], words[1]), min(words[2], words[3]));
      if (lane_bits(least <= splat(word)) == 0) continue;
      if (id % 4 == 0) interleave_blocks(words);
      for (int j = 0; j < 4; ++j) {
        if (!filtered) {
          if (lane_bits(words[j] <= splat(word)) == 0) continue;
          load_x(begin, j);
        }
        if (lane_bits(x[j] + gumbel_bound<VectorMath>(words[j]) > best.score) == 0) continue;
        if constexpr (std::is_same_v<T, AdjustedLogit>) {
          if (!filtered) x[j] = scale(load_logits<T>(row, begin + j * kLanes));
        }
        const vfloat score = x[j] + gumbel_of_word<VectorMath>(words[j]);
        for (int i = 0; i < kLanes; ++i) {
          if (score[i] > best.score) best = {score[i], begin + j * kLanes + i};
        }
      }
      if (!filtered) word = largest_word(best.score - most);
    }
  }
  return best;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
