// Races: the best of the kept tokens by score and noise, with the peak known or ahead of it. See sampling.cuh.
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

// The tokens above a lower bound of top-k's threshold, in the order of the filters.
struct TopTokens {
  static constexpr uint32_t kMost = 512;
  static constexpr int32_t kMostWanted = 256;
  uint32_t size, keys, at_least[16];
  uint64_t ranks[kMost];  // of the cluster's first CTA
};

struct SamplingShared {
  RadixShared radix;
  MassColumns masses;
  union {
    RaceNotes notes;
    TopTokens top;
  };
  // No registers are left to keep these in.
  RowDistribution distribution;
  Sampling sampling;
  uint64_t seed;
  int64_t position;
};
// The columns are one array for those that need no sums.
static_assert(offsetof(SamplingShared, masses) == offsetof(SamplingShared, radix.counts) + sizeof(Columns));

// The noise of a token of each lane; all are of one word of logits, whose group has this least word.
__device__ __forceinline__ float noise_of_word(uint64_t seed, int64_t position, uint32_t id, uint32_t least) {
  uint32_t words[4];
  const uint32_t half = threadIdx.x % 32 / 16;
  philox<ScalarMath>(seed, position, 2 * (id / kNoiseGroup) + half, use_of_others(RandomUse::kGumbel), words);
  NoiseGroup group;
#pragma unroll
  for (int i = 0; i < kNoiseGroup; ++i) group.words[i] = __shfl_sync(~0u, words[i % 4], i / 4 * 16);
  group.least = least_exponential<ScalarMath>(least);
  return group.noise(id % kNoiseGroup);
}

// A word of shared memory that other threads may change meanwhile: the newest value or one before.
__device__ __forceinline__ uint32_t value_now(uint32_t& word) {
#if defined(__CUDACC__)
  return *const_cast<volatile uint32_t*>(&word);
#else
  return std::atomic_ref(word).load();
#endif
}

__device__ __forceinline__ uint16_t* maxima_in(SamplingShared& shared) {
  return reinterpret_cast<uint16_t*>(shared.radix.counts);
}

// What a thread learns of a row in a race that is ahead of its peak.
struct Ahead {
  float peak = -kInfinity;  // its largest logit, NaN if there is one
  // The sum of 2^(logit log2(e) / T - reference), if it is wanted. Less than the first reference has no mass where
  // notes have a winner, and its rounding would be an overflow.
  float mass = 0.0f, reference = -0x1p25f;
};

// The largest logits of lanes in batches: the upper halves of their order keys.
struct BatchMaxima {
  static constexpr uint32_t kMost = (sizeof(Columns) + sizeof(MassColumns)) / (32 * sizeof(uint16_t));  // of a CTA
  uint16_t* keys;
  uint32_t batch = threadIdx.x / 32;  // the next one of this warp

  static __device__ uint32_t key(float logit) { return order_key<ScalarMath>(logit + 0.0f) >> 16; }
  __device__ void add(float most) {
    if (batch < kMost) keys[batch * 32 + threadIdx.x % 32] = static_cast<uint16_t>(key(most));
    batch += blockDim.x / 32;
  }
  // Whether this lane may have a logit in the next batch that is no less.
  __device__ bool may_have(float logit) {
    const bool may = batch >= kMost || keys[batch * 32 + threadIdx.x % 32] >= key(logit);
    batch += blockDim.x / 32;
    return may;
  }
};

// The largest number; NaN wins.
template <int kCount>
__device__ __forceinline__ float largest_or_nan(const float (&numbers)[kCount]) {
  uint32_t bits[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) bits[i] = ScalarMath::bits<uint32_t>(numbers[i]);
  return StoredLogits<DType::kFloat32>(DType::kFloat32).largest_of(bits);
}
__device__ __forceinline__ float larger_or_nan(float a, float b) { return largest_or_nan<2>({a, b}); }

// The reference follows the lane's largest logit, so that neither the masses of the largest ones nor the sum overflow.
template <typename Reader, int kCount>
__device__ __forceinline__ void add_masses(const Reader& row, const uint4 (&words)[kCount], const float (&most)[kCount],
                                           float log2_scale, Ahead& ahead) {
  const float top = largest_or_nan(most) * log2_scale;
  if (top > ahead.reference + 64.0f) {
    ahead.mass *= ptx::ex2(ahead.reference - top);
    ahead.reference = top;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    ahead.mass += row.sum_of_word(
        words[i], [&](float logit) { return ptx::ex2(ScalarMath::fma(logit, log2_scale, -ahead.reference)); });
  }
}

// Notes the tokens of a row that may win by x + noise. The peak is not known: `scale` has the peak 0. The two ways to
// round a score differ by at most 2^-22 of it and 2e-5. A warp draws the largest noise of groups of tokens for its
// words of logits together, and the others' only for the words that may still win, the one with the largest bound
// first. With `maxima`, masses are added and the maxima of batches kept; if only these are wanted, nothing can win.
template <typename Reader>
__device__ __forceinline__ void race_ahead(const Reader& row, const Scale& scale, uint64_t seed, int64_t position,
                                           RaceNotes& notes, Ahead& ahead, BatchMaxima& maxima, bool only_maxima) {
  float bound = only_maxima ? kInfinity : -kMaxFloat;
  __syncthreads();
  if (threadIdx.x == 0) {
    notes.bound = order_key<ScalarMath>(bound);
    notes.count = 0;
  }
  __syncthreads();
  struct Seen {
    float most[Reader::kBatch];
  };
  const auto see = [&](const uint4(&words)[Reader::kBatch]) {
    Seen seen;
#pragma unroll
    for (int i = 0; i < Reader::kBatch; ++i) seen.most[i] = row.largest_of_word(words[i]);
    if (maxima.keys != nullptr && !only_maxima) add_masses(row, words, seen.most, log2_scale(scale), ahead);
    return seen;
  };
  row.each_noise_batch(see, [&](int word, int stride, const Seen& seen) {
    const float of_lane = largest_or_nan(seen.most);
    ahead.peak = larger_or_nan(ahead.peak, of_lane);
    if (maxima.keys != nullptr) maxima.add(of_lane);
    bound = max_of(bound, logit_of_key<ScalarMath>(value_now(notes.bound)));
    if (!__any_sync(~0u, scale(of_lane) + kMaxNoise >= bound)) return;
    uint32_t least[Reader::kBatch];
    const uint32_t id = static_cast<uint32_t>(word * row.of_word());
    philox<ScalarMath>(seed, position, run_block(id / kNoiseGroup), RandomUse::kGumbel, least);
    float most[Reader::kBatch];
#pragma unroll
    for (int i = 0; i < Reader::kBatch; ++i) most[i] = scale(seen.most[i]) + noise_bound<ScalarMath>(least[i]);
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
      const float logit = row.logit(token);
      const float own_noise =
          noise_of_word(seed, position, static_cast<uint32_t>(token), __shfl_sync(~0u, least_of_lane, from));
      const float own = lane < row.of_word() ? scale(logit) + own_noise : -kInfinity;
      const float most_of_word = logit_of_key<ScalarMath>(__reduce_max_sync(~0u, order_key<ScalarMath>(own)));
      bound = max_of(bound, most_of_word - 1e-3f - 0x1p-20f * ScalarMath::max(most_of_word, -most_of_word));
      if (lane == 0) atomicMax(&notes.bound, order_key<ScalarMath>(bound));
      if (!(own >= bound)) continue;
      if (const uint32_t place = atomicAdd(&notes.count, 1u); place < RaceNotes::kMost) {
        notes.notes[place] = {logit, own_noise, static_cast<uint32_t>(token)};
      }
    }
  });
}

// The best x + noise of the tokens that the distribution in `shared` keeps, as ranked() gives it, the lowest id on
// ties; 0 if none can win. The row may be a part of a vocabulary that begins with its token `first_token`.
template <DType kDType>
__device__ __attribute__((noinline)) uint64_t race_of_kept(SamplingShared& shared, uint32_t first_token) {
  __syncthreads();
  const Scale scale = shared.distribution.scale;
  const Filter filter = shared.distribution.filter;
  const uint64_t seed = shared.seed;
  const int64_t position = shared.position;
  LogitReader<kDType> row(shared.distribution.row);
  row.learn(shared.distribution);
  float bound = kMinNoise;  // the peak's own score is no less
  if (threadIdx.x == 0) shared.notes.bound = order_key<ScalarMath>(bound);
  __syncthreads();
  const float kept_x = max_of(filter.min_x, scale(filter.min_logit));
  uint64_t best = 0;
  const auto has_any = [&](float most) { return __any_sync(~0u, scale(most) >= kept_x) != 0; };
  const uint32_t groups = first_token % row.of_word() == 0 ? 1 : 2;  // of a word
  row.each_own_word(has_any, [&](int index, const uint4& word) {
    const float most = scale(row.largest_of_word(word));
    const int begin = index * row.of_word();
    const uint32_t id = first_token + static_cast<uint32_t>(begin);
    bound = max_of(bound, logit_of_key<ScalarMath>(value_now(shared.notes.bound)));
#pragma unroll 1
    for (uint32_t group = id / kNoiseGroup; group < id / kNoiseGroup + groups; ++group) {
      uint32_t words[4];
      philox<ScalarMath, 1>(seed, position, run_block(group), RandomUse::kGumbel, words);
      const float of_group = noise_bound<ScalarMath>(word_of_run(group, words));
      if (!__any_sync(~0u, most >= kept_x && most + of_group >= bound)) continue;
      const NoiseGroup noise(seed, position, RandomUse::kGumbel, group);
      uint4 rest = word;
#pragma unroll 1
      for (int i = 0; i < row.of_word(); ++i, rest = row.without_first(rest)) {
        const float logit = row.first_of(rest), x = scale(logit);
        if ((id + i) / kNoiseGroup != group || !filter.keeps(begin + i, logit, x)) continue;
        const float score = x + noise.noise((id + i) % kNoiseGroup);
        if (!(score >= bound)) continue;
        bound = score;
        best = max_of(best, ranked(score, begin + i));
      }
      bound = logit_of_key<ScalarMath>(__reduce_max_sync(~0u, order_key<ScalarMath>(bound)));
      if (threadIdx.x % 32 == 0) atomicMax(&shared.notes.bound, order_key<ScalarMath>(bound));
    }
  });
  return cluster_max(shared.radix.block, best);
}

// The winner of a race ahead, whose peak is known now; 0 if it is not among the tokens noted.
__device__ __forceinline__ uint64_t winner_of_notes(const RaceNotes& notes, const Scale& scale, BlockShared& shared) {
  constexpr uint64_t kUnknown = ~uint64_t{0};
  const float size = scale.peak * scale.inverse_temperature;
  const uint32_t count = notes.count;
  const bool known = size > -0x1p24f && size < 0x1p24f && count <= RaceNotes::kMost;
  uint64_t best = known ? 0 : kUnknown;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; known && i < count; i += blockDim.x) {
    const RaceNotes::Note& note = notes.notes[i];
    best = max_of(best, ranked(scale(note.logit) + note.noise, note.token));
  }
  best = cluster_max(shared, best);
  return best == kUnknown ? 0 : best;
}

// Reads the words with a logit that is no less than this one again, in batches whose maxima this thread has. Lists
// their tokens, or returns the mass of those before this token in the order of the filters.
template <DType kDType>
__device__ __attribute__((noinline)) float read_largest(SamplingShared& shared, float least, int token, bool lists) {
  LogitReader<kDType> row(shared.distribution.row);
  row.presume_clean();
  const Scale scale = shared.distribution.scale;
  const float factor = log2_scale(scale);
  TopTokens& of_first = *ptx::of_cta(&shared.top, 0);
  BatchMaxima of_batches{maxima_in(shared)};
  float mass = 0.0f;
  row.each_noise_place([&](int first, int stride) {
    const bool may_have = of_batches.may_have(least);
    const uint32_t lanes = __ballot_sync(~0u, may_have);
    if (lanes == 0) return;
    // Other lanes load what one of these loads.
    const int lane = may_have ? row.own_lane() : __ffs(static_cast<int>(lanes)) - 1;
    row.with_batch(lane, first, stride, [&](int index, uint4(&words)[LogitReader<kDType>::kBatch]) {
#pragma unroll 1
      for (int i = 0; i < row.kBatch; ++i, index += stride) {
        uint4 word = words[0];
        const bool has_any = may_have && row.largest_of_word(word) >= least;
        int id = index * row.of_word();
        if (has_any && !lists) {
          mass += row.sum_of_word(word, [&](float logit) {
            const bool before = logit > least || (logit == least && id < token);
            ++id;
            return before ? ptx::ex2((logit - scale.peak) * factor) : 0.0f;
          });
        }
#pragma unroll 1
        for (const int end = id + row.of_word(); has_any && lists && id < end; ++id) {
          const float logit = row.first_of(word);
          word = row.without_first(word);
          if (!(logit >= least)) continue;
          if (const uint32_t place = atomicAdd(&of_first.size, 1u); place < TopTokens::kMost)
            of_first.ranks[place] = ranked(logit, id);
        }
#pragma unroll
        for (int j = 0; j + 1 < row.kBatch; ++j) words[j] = words[j + 1];
      }
    });
  });
  return mass;
}

}  // namespace pagedtree::cuda
