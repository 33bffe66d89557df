// Draws a token from a row of logits: the peak, the filters' threshold, the race of the kept tokens' noise. A whole CTA
// or a cluster works on one row. The row is read from memory once and from L2 afterwards; nothing of its size is
// written.
#pragma once

#include "cuda/filters.cuh"

namespace pagedtree::cuda {

// Tokens of a race whose winner is known only once the row's peak is, and what the warps of a CTA have to beat.
struct RaceNotes {
  static constexpr uint32_t kMost = 256;
  struct Note {
    float logit, noise;
    uint32_t token;
  };
  uint32_t bound;  // an order_key
  uint32_t count;
  Note notes[kMost];
};

struct SamplingShared {
  RadixShared radix;
  FilterScratch filter;
  // A race takes the sums by the first digit, which nobody needs then.
  __device__ RaceNotes& notes() {
    static_assert(sizeof(RaceNotes) <= sizeof(radix.first));
    return *reinterpret_cast<RaceNotes*>(radix.first);
  }
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

  // The noise of a token of each lane; all are of one word of logits, whose group has this least word.
  __device__ __forceinline__ float of_word(uint32_t id, [[maybe_unused]] uint32_t least) const {
    if constexpr (!kWhole) {
      return NoiseGroup(seed, position, RandomUse::kGumbel, id / kNoiseGroup).noise(id % kNoiseGroup);
    } else {
      uint32_t words[4];
      const uint32_t half = threadIdx.x % 32 / 16;
      philox<ScalarMath>(seed, position, 2 * (id / kNoiseGroup) + half, use_of_others(RandomUse::kGumbel), words);
      NoiseGroup group;
#pragma unroll
      for (int i = 0; i < kNoiseGroup; ++i) group.words[i] = __shfl_sync(~0u, words[i % 4], i / 4 * 16);
      group.least = least_exponential<ScalarMath>(least);
      return group.noise(id % kNoiseGroup);
    }
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

// The larger number; NaN wins.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
  const uint32_t both[] = {ScalarMath::bits<uint32_t>(a), ScalarMath::bits<uint32_t>(b)};
  return StoredLogits<DType::kFloat32>(DType::kFloat32).largest_of(both);
}

// The best x + noise of this thread's kept tokens, as ranked() gives it, the lowest id on ties; 0 if none can win. A
// warp draws the largest noise of groups of tokens for its words of logits together, and the others' only for the words
// that may still win, the one with the largest bound first.
//
// With `peak` the race is ahead of the peak: `scale` has the peak 0, and what may win with the true one is noted. The
// two ways to round a score differ by at most 2^-22 of it and 2e-5. `*peak` becomes the largest logit that the thread
// has seen, NaN if there is one.
template <typename Reader, bool kWhole>
__device__ __forceinline__ uint64_t race(const Reader& row, const Scale& scale, const Filter& filter,
                                         const RaceNoise<kWhole>& noise, RaceNotes& notes, float* peak = nullptr) {
  const bool ahead = peak != nullptr;
  // The peak's own score is no less.
  float bound = ahead ? -kMaxFloat : kMinNoise;
  __syncthreads();
  if (threadIdx.x == 0) {
    notes.bound = order_key<ScalarMath>(bound);
    notes.count = 0;
  }
  __syncthreads();
  const float kept_x = max_of(filter.min_x, scale(filter.min_logit));
  uint64_t best = 0;
  struct Seen {
    float most[Reader::kBatch];
  };
  const auto see = [&](const uint4(&words)[Reader::kBatch]) {
    Seen seen;
#pragma unroll
    for (int i = 0; i < Reader::kBatch; ++i) seen.most[i] = row.largest_of_word(words[i]);
    return seen;
  };
  row.each_noise_batch(see, [&](int word, int stride, const Seen& seen) {
    float most[Reader::kBatch], most_of_batch = -kInfinity;
#pragma unroll
    for (int i = 0; i < Reader::kBatch; ++i) {
      if (ahead) *peak = larger_or_nan(*peak, seen.most[i]);
      const float x = scale(seen.most[i]);
      most[i] = x >= kept_x ? x : -kInfinity;
      most_of_batch = max_of(most_of_batch, most[i]);
    }
    bound = max_of(bound, logit_of_key<ScalarMath>(*const_cast<volatile uint32_t*>(&notes.bound)));
    if (!__any_sync(~0u, most_of_batch + kMaxNoise >= bound)) return;
    uint32_t least[Reader::kBatch];
    noise.least_of(word * row.of_word(), stride * row.of_word(), row.of_word(), least);
#pragma unroll
    for (int i = 0; i < Reader::kBatch; ++i) most[i] += noise_bound<ScalarMath>(least[i]);
#pragma unroll 1
    while (true) {
      float bound_of_lane = most[0];
      uint32_t least_of_lane = least[0];
      int word_of_lane = word;
#pragma unroll
      for (int i = 1; i < Reader::kBatch; ++i) {
        if (!(most[i] > bound_of_lane)) continue;
        bound_of_lane = most[i];
        least_of_lane = least[i];
        word_of_lane = word + i * stride;
      }
      if (!__any_sync(~0u, bound_of_lane >= bound)) return;
      const uint32_t key = order_key<ScalarMath>(bound_of_lane);
      const int lane = static_cast<int>(threadIdx.x % 32);
      const int from = __ffs(static_cast<int>(__ballot_sync(~0u, key == __reduce_max_sync(~0u, key)))) - 1;
#pragma unroll
      for (int i = 0; i < Reader::kBatch; ++i) {
        if (lane == from && word_of_lane == word + i * stride) most[i] = -kInfinity;
      }
      // Each lane takes a token of the word.
      const int token = __shfl_sync(~0u, word_of_lane, from) * row.of_word() + lane % row.of_word();
      const float logit = row.logit(token), x = scale(logit);
      const float own_noise = noise.of_word(noise.id_of(token), __shfl_sync(~0u, least_of_lane, from));
      const bool counts = lane < row.of_word() && filter.keeps(token, logit, x);
      const float score = x + own_noise, own = counts ? score : -kInfinity;
      const float most_of_word = logit_of_key<ScalarMath>(__reduce_max_sync(~0u, order_key<ScalarMath>(own)));
      bound = max_of(
          bound, ahead ? most_of_word - 1e-3f - 0x1p-20f * ScalarMath::max(most_of_word, -most_of_word) : most_of_word);
      if (lane == 0) atomicMax(&notes.bound, order_key<ScalarMath>(bound));
      if (!(own >= bound)) continue;
      if (!ahead) {
        best = max_of(best, ranked(score, token));
      } else if (const uint32_t place = atomicAdd(&notes.count, 1u); place < RaceNotes::kMost) {
        notes.notes[place] = {logit, own_noise, static_cast<uint32_t>(token)};
      }
    }
  });
  return best;
}

// The winner of a race ahead, given the largest logit of each thread; 0 if it is not among the tokens noted, or if the
// row is not clean.
template <typename Reader>
__device__ __forceinline__ uint64_t winner_of_notes(const Reader& row, float peak_of_thread, float inverse_temperature,
                                                    const RaceNotes& notes, BlockShared& shared) {
  constexpr uint64_t kUnknown = ~uint64_t{0};
  const bool is_nan = peak_of_thread != peak_of_thread;
  const uint64_t key = cluster_max(shared, is_nan ? ~0u : order_key<ScalarMath>(peak_of_thread + 0.0f));
  const Scale scale{logit_of_key<ScalarMath>(static_cast<uint32_t>(key)), inverse_temperature};
  const float size = scale.peak * inverse_temperature;
  __syncthreads();  // all have noted
  const uint32_t count = notes.count;
  const bool known = scale.peak < row.largest() && size > -0x1p24f && size < 0x1p24f && count <= RaceNotes::kMost;
  uint64_t best = known ? 0 : kUnknown;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; known && i < count; i += blockDim.x) {
    const RaceNotes::Note& note = notes.notes[i];
    best = max_of(best, ranked(scale(note.logit) + note.noise, note.token));
  }
  best = cluster_max(shared, best);
  return best == kUnknown ? 0 : best;
}

// Draws once the peak and what the filters keep are known. Not inlined: with this in it, the loop of a race ahead would
// have too few registers.
template <DType kDType>
__device__ __attribute__((noinline)) Draw draw_by_peak(const LogitRow& logits, const Sampling& sampling, uint64_t seed,
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
    const uint64_t best = race(row, scale, filter, RaceNoise<true>{seed, position, 0}, shared.notes());
    const int64_t token = ranked_id(cluster_max(shared.radix.block, best));
    if (ties > 0 && row.logit(token) == filter.min_logit) {
      filter.tie_end = end_of_ties(row, filter.min_logit, ties, shared.radix.block);
      ties = 0;
      if (token >= filter.tie_end) continue;
    }
    return {token, shared.bad};
  }
}

// Without a filter the row is read once: what may win is known before the peak.
template <DType kDType>
__device__ __forceinline__ Draw draw_token(const LogitRow& logits, const Sampling& sampling, uint64_t seed,
                                           int64_t position, SamplingShared& shared) {
  if (sampling.temperature > 0.0f && !has_filter(sampling, logits.vocab)) {
    LogitReader<kDType> row(logits);
    row.presume_clean();
    const float inverse = inverse_temperature(sampling.temperature);
    float peak = -kInfinity;
    race(row, Scale{0.0f, inverse}, Filter{}, RaceNoise<true>{seed, position, 0}, shared.notes(), &peak);
    const uint64_t best = winner_of_notes(row, peak, inverse, shared.notes(), shared.radix.block);
    if (best != 0) return {ranked_id(best), false};
  }
  return draw_by_peak<kDType>(logits, sampling, seed, position, shared);
}

}  // namespace pagedtree::cuda
