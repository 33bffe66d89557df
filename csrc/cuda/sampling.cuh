// Draws a token from a row of logits: the peak, the filters' threshold, the race of the kept tokens' noise. A whole CTA
// or a cluster works on one row. The row is read from memory once and from L2 afterwards; nothing of its size is
// written.
#pragma once

#include "cuda/filters.cuh"

namespace pagedtree::cuda {

struct SamplingShared {
  RadixShared radix;
  FilterScratch filter;
  bool bad;  // of the row that is drawn from: no register is left to keep it in
};
static_assert(has_room_for_values(offsetof(SamplingShared, radix), offsetof(SamplingShared, filter)));

// The noise of a row that is a part of a vocabulary and begins with its token `first_token`; `kWhole`: with token 0.
template <bool kWhole>
struct RaceNoise {
  uint64_t seed;
  int64_t position;
  int64_t first_token;

  __device__ __forceinline__ uint32_t id_of(int64_t token) const {
    return static_cast<uint32_t>(kWhole ? token : first_token + token);
  }
  __device__ __forceinline__ NoiseGroup group_of(uint32_t id) const {
    return NoiseGroup(seed, position, RandomUse::kGumbel, id / kNoiseGroup);
  }

  // For each word of a batch the smallest word of its groups, which gives the largest noise.
  template <int kBatch>
  __device__ __forceinline__ void least_of(int token, int stride, int of_word, uint32_t (&least)[kBatch]) const {
    if constexpr (kWhole) {
      philox<ScalarMath>(seed, position, run_block(id_of(token) / kNoiseGroup), RandomUse::kGumbel, least);
    } else {
#pragma unroll 1
      for (int i = 0; i < kBatch; ++i, token += stride) {
        uint32_t word = ~0u;
        const uint32_t last = (id_of(token) + of_word - 1) / kNoiseGroup;
#pragma unroll 1
        for (uint32_t group = id_of(token) / kNoiseGroup; group <= last; ++group) {
          uint32_t words[4];
          philox<ScalarMath, 1>(seed, position, run_block(group), RandomUse::kGumbel, words);
          word = min_of(word, word_of_run(group, words));
        }
#pragma unroll
        for (int j = 0; j + 1 < kBatch; ++j) least[j] = least[j + 1];
        least[kBatch - 1] = word;
      }
    }
  }
};

// The best x + noise of this thread's kept tokens, as ranked() gives it, the lowest id on ties; 0 if none can win. A
// warp draws the largest noise of groups of tokens for its words of logits together, and the others' only where one of
// them may still win.
template <typename Reader, bool kWhole>
__device__ __forceinline__ uint64_t race(const Reader& row, const Scale& scale, const Filter& filter,
                                         const RaceNoise<kWhole>& noise) {
  float bound = kMinNoise;  // the peak's own score is no less
  const float kept_x = max_of(filter.min_x, scale(filter.min_logit));
  uint64_t best = 0;
  row.each_noise_batch([&](int word, int stride, const uint4(&batch)[Reader::kBatch]) {
    float most[Reader::kBatch], most_of_batch = -kInfinity;
#pragma unroll
    for (int i = 0; i < Reader::kBatch; ++i) {
      const float x = scale(row.largest_of_word(batch[i]));
      most[i] = x >= kept_x ? x : -kInfinity;
      most_of_batch = max_of(most_of_batch, most[i]);
    }
    if (!__any_sync(~0u, most_of_batch + kMaxNoise >= bound)) return;
    uint32_t least[Reader::kBatch];
    noise.least_of(word * row.of_word(), stride * row.of_word(), row.of_word(), least);
    most_of_batch = -kInfinity;
#pragma unroll
    for (int i = 0; i < Reader::kBatch; ++i) {
      most[i] += noise_bound<ScalarMath>(least[i]);
      most_of_batch = max_of(most_of_batch, most[i]);
    }
    if (!__any_sync(~0u, most_of_batch >= bound)) return;
#pragma unroll 1
    for (int of_batch = 0; of_batch < Reader::kBatch; ++of_batch, word += stride) {
      const bool may_win = most[0] >= bound;
#pragma unroll
      for (int i = 0; i + 1 < Reader::kBatch; ++i) most[i] = most[i + 1];
      if (!__any_sync(~0u, may_win)) continue;
      if (may_win) {
        uint4 logits = row.clean_word_at(word);  // again: few words come here, and registers are scarce
        const int token = word * row.of_word();
        NoiseGroup group = noise.group_of(noise.id_of(token));
#pragma unroll 1
        for (int i = 0; i < row.of_word(); ++i) {
          const uint32_t id = noise.id_of(token + i), member = id % kNoiseGroup;
          if (!kWhole && i > 0 && member == 0) group = noise.group_of(id);
          const float logit = row.first_of(logits), x = scale(logit);
          if (filter.keeps(token + i, logit, x)) {
            const float score = x + group.noise(member);
            bound = max_of(bound, score);
            if (score >= bound) best = max_of(best, ranked(score, token + i));
          }
          logits = row.without_first(logits);
        }
      }
      // The tokens of other lanes must beat this score.
      bound = logit_of_key<ScalarMath>(__reduce_max_sync(~0u, order_key<ScalarMath>(bound)));
    }
  });
  return best;
}

template <DType kDType>
__device__ __forceinline__ Draw draw_token(const LogitRow& logits, const Sampling& sampling, uint64_t seed,
                                           int64_t position, SamplingShared& shared) {
  LogitReader<kDType> row(logits);
  ValueCounts::Seen seen;
  const Peak peak = find_peak(row, sampling, shared.radix, shared.filter, seen);
  const bool uniform = peak.logit == -kInfinity;
  row.learn(peak);
  if (sampling.temperature == 0.0f) return {peak.token, peak.has_nan || uniform};
  if (threadIdx.x == 0) shared.bad = peak.has_nan || uniform;
  Scale scale{0.0f, 1.0f};
  Filter filter;
  uint64_t ties = 0;
  if (uniform) {
    row.make_uniform();
  } else {
    scale = {peak.logit, inverse_temperature(sampling.temperature)};
    ties = find_threshold(row, sampling, scale, shared.radix, shared.filter, seen, filter);
  }
  // Seldom is it a tie at the threshold that wins. Only then the ties are looked for that the filter keeps.
#pragma unroll 1
  while (true) {
    const uint64_t best = race(row, scale, filter, RaceNoise<true>{seed, position, 0});
    const int64_t token = ranked_id(cluster_max(shared.radix.block, best));
    if (ties > 0 && row.logit(token) == filter.min_logit) {
      filter.tie_end = end_of_ties(row, filter.min_logit, ties, shared.radix.block);
      ties = 0;
      if (token >= filter.tie_end) continue;
    }
    return {token, shared.bad};
  }
}

}  // namespace pagedtree::cuda
