// Draws a token from a row of logits, by a whole CTA or a cluster: the peak, the filters' threshold, the race of the
// kept tokens' noise. The row is read from memory once and from L2 afterwards; nothing of its size is written.
#pragma once

#include "cuda/logits.cuh"

namespace pagedtree::cuda {

struct SamplingShared {
  RadixShared radix;
  RadixMasses masses;
};

// The kept token with the largest x + noise, the lowest id on ties. Noise is drawn only for tokens that may still beat
// the peak's own score.
template <DType kDType>
__device__ __forceinline__ int64_t race(const LogitReader<kDType>& row, const Scale& scale, const Filter& filter,
                                        int64_t peak, uint64_t seed, int64_t position, BlockShared& shared) {
  const auto noise_words = [&](int64_t token, uint32_t (&words)[4]) {
    philox<ScalarMath>(seed, position, static_cast<uint32_t>(token / 4), RandomUse::kGumbel, words);
  };
  uint32_t words[4];
  noise_words(peak, words);
  const uint32_t even = peak & 1 ? words[1] : words[0], odd = peak & 1 ? words[3] : words[2];
  float bound = gumbel_of_word<ScalarMath>(peak & 2 ? odd : even);
  uint64_t best = 0;
  row.each_four([&](int64_t token, const float (&four)[4]) {
    float x[4];
    float most = -kInfinity;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = scale(four[i]);
      if (!filter.keeps(token + i, four[i], x[i])) x[i] = -kInfinity;
      most = max_of(most, x[i]);
    }
    if (!(most + kMaxGumbel >= bound)) return;
    noise_words(token, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(x[i] + gumbel_bound<ScalarMath>(words[i]) >= bound)) continue;
      const float score = x[i] + gumbel_of_word<ScalarMath>(words[i]);
      bound = max_of(bound, score);
      best = max_of(best, ranked(score, token + i));
    }
  });
  return ranked_id(cluster_max(shared, best));
}

template <DType kDType>
__device__ __forceinline__ Draw draw_token(const LogitRow& logits, const Law& law, uint64_t seed, int64_t position,
                                           SamplingShared& shared) {
  LogitReader<kDType> row(logits);
  const Peak peak = find_peak(row, shared.radix.block);
  const bool uniform = peak.logit == -kInfinity;
  if (law.temperature == 0.0f) return {peak.token, peak.has_nan || uniform};
  Scale scale{0.0f, 1.0f};
  Filter filter;
  if (uniform) {
    row.make_uniform();
  } else {
    scale = {peak.logit, inverse_temperature(law.temperature)};
    filter = find_filter(row, law, scale, shared.radix, shared.masses);
  }
  return {race(row, scale, filter, peak.token, seed, position, shared.radix.block), peak.has_nan || uniform};
}

}  // namespace pagedtree::cuda
