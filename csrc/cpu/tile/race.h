// The race of a row's tokens: x and Gumbel noise, of which the largest wins.
#pragma once

#include "cpu/tile/filter.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

struct Winner {
  float score = -kInfinity;
  int64_t token = 0;
};

// The noise words of the tokens id, id + 1, ..., 4 * kLanes of them.
static inline void noise_words(uint64_t seed, int64_t position, int64_t id, vuint words[4]) {
  const uint32_t first = static_cast<uint32_t>(id / 4);
  philox<VectorMath>(seed, position, bits<vuint>(lane_index()) + first, RandomUse::kGumbel, words);  // a block a lane
  interleave_blocks(words);
  if (id % 4 == 0) return;
  uint32_t run[4 * kLanes + 4];
  std::memcpy(run, words, sizeof(vuint) * 4);
  philox<ScalarMath>(seed, position, first + kLanes, RandomUse::kGumbel, run + 4 * kLanes);
  std::memcpy(words, run + id % 4, sizeof(vuint) * 4);
}

// The kept token with the largest x + noise, the lowest on ties. Token 0's noise is that of id `first_id`.
template <typename T>
static inline Winner race(const LogitRow& row, const Scale& scale, const Filter& filter, uint64_t seed,
                          int64_t position, int64_t first_id = 0) {
  constexpr int kGroup = 4 * kLanes;
  Winner best;
  for (int64_t begin = 0; begin < row.vocab; begin += kGroup) {
    vfloat x[4];
    vfloat most = splat(-kInfinity);
    for (int j = 0; j < 4; ++j) {
      x[j] = splat(-kInfinity);
      const int64_t t = begin + j * kLanes;
      if (t >= row.vocab) continue;
      const vfloat logit = load_logits<T>(row, t);
      x[j] = scale(logit);
      x[j] = select(kept_lanes(filter, logit, x[j], t), x[j], splat(-kInfinity));
      most = max(most, x[j]);
    }
    if (lane_bits(most + kMaxGumbel > best.score) == 0) continue;
    vuint words[4];
    noise_words(seed, position, first_id + begin, words);
    for (int j = 0; j < 4; ++j) {
      if (lane_bits(x[j] + gumbel_bound<VectorMath>(words[j]) > best.score) == 0) continue;
      const vfloat score = x[j] + gumbel_of_word<VectorMath>(words[j]);
      for (int i = 0; i < kLanes; ++i) {
        if (score[i] > best.score) best = {score[i], begin + j * kLanes + i};
      }
    }
  }
  return best;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
