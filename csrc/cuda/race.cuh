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

struct SamplingShared {
  RadixShared radix;
  MassColumns masses;
  // A race takes the sums by the first digit, which nobody needs then.
  __device__ RaceNotes& notes() {
    static_assert(sizeof(RaceNotes) <= sizeof(radix.first));
    return *reinterpret_cast<RaceNotes*>(radix.first);
  }
  bool bad;  // of the row that is drawn from: no register is left to keep it in
};
// The columns are one array for those that need no sums.
static_assert(offsetof(SamplingShared, masses) == offsetof(SamplingShared, radix.counts) + sizeof(Columns));

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

// A word of shared memory that other threads may change meanwhile: the newest value or one before.
__device__ __forceinline__ uint32_t value_now(uint32_t& word) {
#if defined(__CUDACC__)
  return *const_cast<volatile uint32_t*>(&word);
#else
  return std::atomic_ref(word).load();
#endif
}

// What a thread learns of a row in a race that is ahead of its peak.
struct Ahead {
  float peak = -kInfinity;                // its largest logit, NaN if there is one
  float mass = 0.0f, reference = -1e30f;  // the sum of 2^(logit log2(e) / T - reference), if it is wanted
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

// The best x + noise of this thread's kept tokens, as ranked() gives it, the lowest id on ties; 0 if none can win. A
// warp draws the largest noise of groups of tokens for its words of logits together, and the others' only for the words
// that may still win, the one with the largest bound first.
//
// If `is_ahead`, the peak is not known: `scale` has the peak 0, and what may win with the true one is noted. The two
// ways to round a score differ by at most 2^-22 of it and 2e-5. If kMasses, masses are added and the maxima of batches
// kept.
template <bool kMasses = false, typename Reader, bool kWhole>
__device__ __forceinline__ uint64_t race(const Reader& row, const Scale& scale, const Filter& filter,
                                         const RaceNoise<kWhole>& noise, RaceNotes& notes, bool is_ahead, Ahead& ahead,
                                         uint16_t* maxima = nullptr) {
  // The peak's own score is no less.
  float bound = is_ahead ? -kMaxFloat : kMinNoise;
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
    if (kMasses && is_ahead) add_masses(row, words, seen.most, scale.inverse_temperature * kLog2E, ahead);
    return seen;
  };
  BatchMaxima of_batches{maxima};
  row.each_noise_batch(see, [&](int word, int stride, const Seen& seen) {
    float most[Reader::kBatch], most_of_batch = -kInfinity;
    if (is_ahead) {
      const float of_lane = largest_or_nan(seen.most);
      ahead.peak = larger_or_nan(ahead.peak, of_lane);
      if (kMasses) of_batches.add(of_lane);
    }
#pragma unroll
    for (int i = 0; i < Reader::kBatch; ++i) {
      const float x = scale(seen.most[i]);
      most[i] = x >= kept_x ? x : -kInfinity;
      most_of_batch = max_of(most_of_batch, most[i]);
    }
    bound = max_of(bound, logit_of_key<ScalarMath>(value_now(notes.bound)));
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
      bound = max_of(bound, is_ahead ? most_of_word - 1e-3f - 0x1p-20f * ScalarMath::max(most_of_word, -most_of_word)
                                     : most_of_word);
      if (lane == 0) atomicMax(&notes.bound, order_key<ScalarMath>(bound));
      if (!(own >= bound)) continue;
      if (!is_ahead) {
        best = max_of(best, ranked(score, token));
      } else if (const uint32_t place = atomicAdd(&notes.count, 1u); place < RaceNotes::kMost) {
        notes.notes[place] = {logit, own_noise, static_cast<uint32_t>(token)};
      }
    }
  });
  return best;
}

// The winner of a race ahead; 0 if it is not among the tokens noted, or if the row is not clean. `scale` gets the peak.
template <typename Reader>
__device__ __forceinline__ uint64_t winner_of_notes(const Reader& row, const Ahead& ahead, const RaceNotes& notes,
                                                    Scale& scale, BlockShared& shared) {
  constexpr uint64_t kUnknown = ~uint64_t{0};
  const uint64_t key = cluster_max(shared, ahead.peak != ahead.peak ? ~0u : order_key<ScalarMath>(ahead.peak + 0.0f));
  scale.peak = logit_of_key<ScalarMath>(static_cast<uint32_t>(key));
  const float size = scale.peak * scale.inverse_temperature;
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

// Calls f(word, its first token) for the words with a logit that is no less, in batches whose maxima this thread has.
template <typename Reader, typename F>
__device__ __forceinline__ void each_word_with(const Reader& row, float logit, uint16_t* maxima, F f) {
  BatchMaxima of_batches{maxima};
  row.each_noise_place([&](int first, int stride) {
    const bool may_have = of_batches.may_have(logit);
    const uint32_t lanes = __ballot_sync(~0u, may_have);
    if (lanes == 0) return;
    // Other lanes load what one of these loads.
    const int lane = static_cast<int>(may_have ? threadIdx.x % 32 : __ffs(static_cast<int>(lanes)) - 1);
    row.with_batch_of(lane, first, stride, [&](int index, uint4(&words)[Reader::kBatch]) {
#pragma unroll 1
      for (int i = 0; i < Reader::kBatch; ++i, index += stride) {
        if (may_have && row.largest_of_word(words[0]) >= logit) f(words[0], index * row.of_word());
#pragma unroll
        for (int j = 0; j + 1 < Reader::kBatch; ++j) words[j] = words[j + 1];
      }
    });
  });
}

// The mass of the tokens before this one, in the order of the filters.
template <typename Reader>
__device__ __forceinline__ float mass_before(const Reader& row, const Scale& scale, float logit, int64_t token,
                                             uint16_t* maxima) {
  float mass = 0.0f;
  each_word_with(row, logit, maxima, [&](const uint4& word, int id) {
    mass += row.sum_of_word(word, [&](float other) {
      const bool before = other > logit || (other == logit && id < token);
      ++id;
      return before ? ptx::ex2((other - scale.peak) * (scale.inverse_temperature * kLog2E)) : 0.0f;
    });
  });
  return mass;
}

// Of all tokens, and of those before one.
struct MassesOfRow {
  float all, before;
};
__device__ __forceinline__ MassesOfRow cluster_sums(BlockShared& shared, MassesOfRow of_thread) {
  const auto pack = [](MassesOfRow m) {
    return uint64_t{ScalarMath::bits<uint32_t>(m.all)} << 32 | ScalarMath::bits<uint32_t>(m.before);
  };
  const auto unpack = [](uint64_t both) {
    return MassesOfRow{ScalarMath::bits<float>(static_cast<uint32_t>(both >> 32)),
                       ScalarMath::bits<float>(static_cast<uint32_t>(both))};
  };
  const auto add = [&](uint64_t a, uint64_t b) {
    const MassesOfRow first = unpack(a), second = unpack(b);
    return pack({first.all + second.all, first.before + second.before});
  };
  return unpack(fold_ctas(shared, block_fold(shared, pack(of_thread), add), add));
}

// Whether draw_ahead() can ask for the mass that top-p needs: that of all tokens.
__device__ __forceinline__ bool draws_ahead(const Sampling& sampling, int64_t vocab) {
  const bool by_count = sampling.top_k > 0 && sampling.top_k < vocab;
  return !by_count && (sampling.top_p >= 1.0f || sampling.joint || sampling.min_p < kMinNormal);
}

// Draws from a row that is read once: what may win is known before the peak. If kFiltered, the winner is asked then
// whether the filters keep it, and if not, the best of the tokens that they may keep. Returns -1 if the token is not
// known: of a row that is not clean, of too many that may win, or where rounding might decide.
template <bool kFiltered, DType kDType>
__device__ __forceinline__ int64_t draw_ahead(const LogitRow& logits, const Sampling& sampling, uint64_t seed,
                                              int64_t position, SamplingShared& shared) {
  LogitReader<kDType> row(logits);
  row.presume_clean();
  Ahead ahead;
  Scale scale{0.0f, inverse_temperature(sampling.temperature)};
  Filter filter;
  uint16_t* const maxima = reinterpret_cast<uint16_t*>(shared.radix.counts);
#pragma unroll 1
  for (bool again = false;; again = true) {
    uint64_t best =
        race<kFiltered>(row, scale, filter, RaceNoise<true>{seed, position, 0}, shared.notes(), !again, ahead, maxima);
    best = again ? cluster_max(shared.radix.block, best)
                 : winner_of_notes(row, ahead, shared.notes(), scale, shared.radix.block);
    if (best == 0) return -1;
    const int64_t token = ranked_id(best);
    if constexpr (!kFiltered) return token;
    const float logit = row.logit(token), min_x = min_p_bound(sampling.min_p);
    if (scale(logit) < min_x) {
      filter.min_x = min_x;
      continue;
    }
    if (sampling.top_p >= 1.0f) return token;
    const float rebase = ScalarMath::fma(-scale.peak, scale.inverse_temperature * kLog2E, ahead.reference);
    const MassesOfRow sums = cluster_sums(
        shared.radix.block, {ahead.mass * ptx::ex2(rebase), mass_before(row, scale, logit, token, maxima)});
    const float needed = sampling.top_p * sums.all;
    // Of floats, of which a thread adds 2^10, and of the integers that decide.
    const float error = 0x1p-13f * (needed + sums.before) + static_cast<float>(row.vocab()) * 0x1p-31f;
    if (sums.before == 0.0f || sums.before + error < needed) return token;
    if (sums.before - error <= needed) return -1;
    filter = {logit, token, min_x};
  }
}

}  // namespace pagedtree::cuda
