// Draws a token from a row of logits, by a whole CTA or a cluster: the peak, the filters' threshold, the race of the
// kept tokens' noise. The row is read from memory once and from L2 afterwards; nothing of its size is written.
#pragma once

#include "cuda/filters.cuh"

namespace pagedtree::cuda {

struct SamplingShared {
  RadixShared radix;
  RadixMasses masses;
};

// The best x + noise of this thread's kept tokens, as ranked() has it; 0 where none can beat `bound`, the peak's own
// score. noise_words(token, words) gives the words of the noise of four tokens. Those of a group that cannot win are
// not drawn, and logarithms are for the tokens that still may when their words are known.
template <typename Reader, typename NoiseWords>
__device__ __forceinline__ uint64_t race_of_thread(const Reader& row, const Scale& scale, const Filter& filter,
                                                   float bound, NoiseWords noise_words) {
  uint64_t best = 0;
  row.each_group([&](int64_t token, const Four& group) {
    const float most_logit = row.largest_of(group), most = scale(most_logit);
    if (!(most + kMaxGumbel >= bound) || most < filter.min_x || most_logit < filter.min_logit) return;
    uint32_t words[4];
    noise_words(token, words);
    const uint32_t least = min_of(min_of(words[0], words[1]), min_of(words[2], words[3]));  // of the largest noise
    if (!(most + gumbel_bound<ScalarMath>(least) >= bound)) return;
    float four[4];
    row.convert(group, four);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = scale(four[i]);
      if (!filter.keeps(token + i, four[i], x) || !(x + gumbel_bound<ScalarMath>(words[i]) >= bound)) continue;
      const float score = x + gumbel_of_word<ScalarMath>(words[i]);
      bound = max_of(bound, score);
      best = max_of(best, ranked(score, token + i));
    }
  });
  return best;
}

// The noise of token `id`, whose block of noise has these words.
__device__ __forceinline__ float noise_of(int64_t id, const uint32_t* words) {
  const uint32_t even = id & 1 ? words[1] : words[0], odd = id & 1 ? words[3] : words[2];
  return gumbel_of_word<ScalarMath>(id & 2 ? odd : even);
}

// The kept token with the largest x + noise, the lowest id on ties.
template <DType kDType>
__device__ __forceinline__ int64_t race(const LogitReader<kDType>& row, const Scale& scale, const Filter& filter,
                                        int64_t peak, uint64_t seed, int64_t position, BlockShared& shared) {
  const auto noise_words = [&](int64_t token, uint32_t (&words)[4]) {
    philox<ScalarMath>(seed, position, static_cast<uint32_t>(token / 4), RandomUse::kGumbel, words);
  };
  uint32_t words[4];
  noise_words(peak, words);
  return ranked_id(cluster_max(shared, race_of_thread(row, scale, filter, noise_of(peak, words), noise_words)));
}

template <DType kDType>
__device__ __forceinline__ Draw draw_token(const LogitRow& logits, const Law& law, uint64_t seed, int64_t position,
                                           SamplingShared& shared) {
  LogitReader<kDType> row(logits);
  const Peak peak = find_peak(row, shared.radix.block);
  const bool uniform = peak.logit == -kInfinity;
  row.learn(peak);
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
