// Parts of Gumbel races: noise per word, and a race before the row's peak is known (sampling.cuh).
#pragma once

#include "cuda/logits/filters.cuh"

namespace pagedtree::cuda {

// Candidates of a race before the peak is known, and the CTA's least score that may win.
struct RaceCandidates {
  static constexpr uint32_t kMost = 256;
  struct Note {
    float logit, noise;
    uint32_t token;
  };
  uint32_t bound;  // an order_key
  uint32_t count;
  Note notes[kMost];
};

// Returns the noise of a token per lane; all are in one word, whose group has this smallest noise word.
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

// Reads a shared word that other threads may change: its newest value or an earlier one.
__device__ __forceinline__ uint32_t value_now(uint32_t& word) {
#if defined(__CUDACC__)
  return *const_cast<volatile uint32_t*>(&word);
#else
  return std::atomic_ref(word).load();
#endif
}

template <int kCount>
__device__ __forceinline__ float largest_or_nan(const float (&numbers)[kCount]) {
  uint32_t bits[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) bits[i] = ScalarMath::bits<uint32_t>(numbers[i]);
  return StoredLogits<DType::kFloat32>(DType::kFloat32).largest_of(bits);
}
__device__ __forceinline__ float larger_or_nan(float a, float b) { return largest_or_nan<2>({a, b}); }

// Collects the tokens that may win by x + noise, with peak 0 in `scale`; the two roundings of a score differ by at most
// 2^-22 of it plus 2e-5. A warp draws the largest noise of all its groups at once, other noise only for words that may
// still win, in order of bounds. Returns this thread's largest logit, or NaN.
template <typename Reader>
__device__ __forceinline__ float race_ahead(const Reader& row, const Scale& scale, uint64_t seed, int64_t position,
                                            RaceCandidates& notes) {
  float bound = -kMaxFloat, peak = -kInfinity;
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
    return seen;
  };
  row.each_noise_batch(see, [&](int word, int stride, const Seen& seen) {
    const float of_lane = largest_or_nan(seen.most);
    peak = larger_or_nan(peak, of_lane);
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
      // One token of the word per lane.
      const int token = __shfl_sync(~0u, word_of_lane, from) * row.of_word() + lane % row.of_word();
      const float logit = row.logit(token);
      const float own_noise =
          noise_of_word(seed, position, static_cast<uint32_t>(token), __shfl_sync(~0u, least_of_lane, from));
      const float own = lane < row.of_word() ? scale(logit) + own_noise : -kInfinity;
      const float most_of_word = logit_of_key<ScalarMath>(__reduce_max_sync(~0u, order_key<ScalarMath>(own)));
      bound = max_of(bound, most_of_word - 1e-3f - 0x1p-20f * ScalarMath::max(most_of_word, -most_of_word));
      if (lane == 0) atomicMax(&notes.bound, order_key<ScalarMath>(bound));
      if (!(own >= bound)) continue;
      if (const uint32_t place = atomicAdd(&notes.count, 1u); place < RaceCandidates::kMost) {
        notes.notes[place] = {logit, own_noise, static_cast<uint32_t>(token)};
      }
    }
  });
  return peak;
}

// Returns the winner, given the peak, or 0 if it may not be among the candidates.
__device__ __forceinline__ uint64_t winner_of_candidates(const RaceCandidates& notes, const Scale& scale,
                                                         BlockShared& shared) {
  constexpr uint64_t kUnknown = ~uint64_t{0};
  const float size = scale.peak * scale.inverse_temperature;
  const uint32_t count = notes.count;
  const bool known = size > -0x1p24f && size < 0x1p24f && count <= RaceCandidates::kMost;
  uint64_t best = known ? 0 : kUnknown;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; known && i < count; i += blockDim.x) {
    const RaceCandidates::Note& note = notes.notes[i];
    best = max_of(best, ranked(scale(note.logit) + note.noise, note.token));
  }
  best = cluster_max(shared, best);
  return best == kUnknown ? 0 : best;
}

}  // namespace pagedtree::cuda
