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

// The best x + noise of this thread's kept tokens, as ranked() gives it; 0 if none can beat `bound`, the peak's own
// score. noise_words(token, count, words) gives the noise words of the `count` tokens in a word of logits. A warp draws
// noise for its words of logits together, unless none of them can win. Logarithms are computed only for tokens that may
// still win with their noise.
template <typename Reader, typename NoiseWords>
__device__ __forceinline__ uint64_t race_of_thread(const Reader& row, const Scale& scale, const Filter& filter,
                                                   float bound, NoiseWords noise_words) {
  const float kept_x = max_of(filter.min_x, scale(filter.min_logit));
  uint64_t best = 0;
  row.each_own_batch([&](int word, const uint4(&batch)[Reader::kBatch]) {
    float most[Reader::kBatch], most_of_batch = -kInfinity;
#pragma unroll
    for (int i = 0; i < Reader::kBatch; ++i) {
      most[i] = scale(row.largest_of_word(batch[i]));
      most_of_batch = max_of(most_of_batch, most[i]);
    }
    const auto may_win = [&](float x, float noise) { return x >= kept_x && x + noise >= bound; };
    if (!__any_sync(~0u, may_win(most_of_batch, kMaxGumbel))) return;
#pragma unroll 1
    for (int of_batch = 0; of_batch < Reader::kBatch; ++of_batch, word += row.own_stride()) {
      const float x_of_word = most[0];
#pragma unroll
      for (int i = 0; i + 1 < Reader::kBatch; ++i) most[i] = most[i + 1];
      if (!__any_sync(~0u, may_win(x_of_word, kMaxGumbel))) continue;
      const int token = word * row.of_word();
      uint32_t noise[kMostOfWord]{}, least = ~0u;  // the smallest word gives the largest noise
      noise_words(token, row.of_word(), noise);
#pragma unroll
      for (int i = 0; i < kMostOfWord; ++i) {
        if (i < row.of_word()) least = min_of(least, noise[i]);
      }
      if (!__any_sync(~0u, may_win(x_of_word, gumbel_bound<ScalarMath>(least)))) continue;
      uint4 logits = row.clean_word_at(word);  // again: few words come here, and registers are scarce
#pragma unroll 1
      for (int i = 0; i < row.of_word(); ++i) {
        const float logit = row.first_of(logits), x = scale(logit);
        if (may_win(x, gumbel_bound<ScalarMath>(noise[0])) && filter.keeps(token + i, logit, x)) {
          const float score = x + gumbel_of_word<ScalarMath>(noise[0]);
          bound = max_of(bound, score);
          best = max_of(best, ranked(score, token + i));
        }
        logits = row.without_first(logits);
#pragma unroll
        for (int j = 0; j + 1 < kMostOfWord; ++j) noise[j] = noise[j + 1];
      }
      // The tokens of other lanes must beat this score.
      bound = logit_of_key<ScalarMath>(__reduce_max_sync(~0u, order_key<ScalarMath>(bound)));
    }
  });
  return best;
}

// The noise of token `id`, whose block of noise has these words.
__device__ __forceinline__ float noise_of(int64_t id, const uint32_t* words) {
  const uint32_t even = id & 1 ? words[1] : words[0], odd = id & 1 ? words[3] : words[2];
  return gumbel_of_word<ScalarMath>(id & 2 ? odd : even);
}

// The noise words of a row's tokens. A row that is a part of a vocabulary begins with its token `first_token`, anywhere
// in a block of noise.
template <bool kWhole>
struct RaceNoise {
  uint64_t seed;
  int64_t position;
  int64_t first_token;

  __device__ __forceinline__ void block_of(int64_t id, uint32_t* words) const {
    philox<ScalarMath>(seed, position, static_cast<uint32_t>(id) / 4, RandomUse::kGumbel, words);
  }

  __device__ __forceinline__ void operator()(int token, int count, uint32_t (&words)[kMostOfWord]) const {
    if constexpr (kWhole) {
#pragma unroll
      for (int i = 0; i < kMostOfWord; i += 4) {
        if (i < count) block_of(token + i, words + i);
      }
    } else {
      const int64_t id = first_token + token;
      const int skew = static_cast<int>(id % 4);  // of the first token in its block of noise
      uint32_t blocks[kMostOfWord + 4];
#pragma unroll
      for (int i = 0; i < kMostOfWord + 4; i += 4) {
        if (i < count || (i == count && skew != 0)) block_of(id + i, blocks + i);
      }
#pragma unroll
      for (int shift = 1; shift <= 2; ++shift) {
#pragma unroll
        for (int i = 0; i + shift < kMostOfWord + 4; ++i) {
          if (skew & shift) blocks[i] = blocks[i + shift];
        }
      }
#pragma unroll
      for (int i = 0; i < kMostOfWord; ++i) words[i] = blocks[i];
    }
  }
};

// This thread's candidate for the kept token with the largest x + noise, the lowest id on ties. `peak` is the id of the
// best token in the whole vocabulary, of which the row may be a part.
template <typename Reader, bool kWhole>
__device__ __forceinline__ uint64_t race(const Reader& row, const Scale& scale, const Filter& filter, int64_t peak,
                                         const RaceNoise<kWhole>& noise) {
  uint32_t of_peak[4];
  noise.block_of(peak, of_peak);
  return race_of_thread(row, scale, filter, noise_of(peak, of_peak), noise);
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
    const uint64_t best = race(row, scale, filter, peak.token, RaceNoise<true>{seed, position, 0});
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
