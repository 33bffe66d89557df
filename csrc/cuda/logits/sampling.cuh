// Samples a row of logits: peak, filter threshold, Gumbel race. One CTA or cluster per row. The row comes from memory
// once, afterwards from L2; nothing of its size is written.
#pragma once

#include "cuda/logits/kept_tokens.cuh"

namespace pagedtree::cuda {

struct SamplingShared {
  RadixShared radix;
  MassColumns masses;
  union {
    RaceCandidates notes;
    KeptCandidates kept;
  };
  // In memory to save registers.
  RowDistribution distribution;
  Sampling sampling;
  uint64_t seed;
  int64_t position;
};

// Returns the best x + noise of kept tokens, ranked(), or 0; the lowest id wins ties. The row begins at `first_token`.
template <DType kDType>
__device__ __attribute__((noinline)) uint64_t race_of_kept(SamplingShared& shared, uint32_t first_token) {
  __syncthreads();
  const Scale scale = shared.distribution.scale;
  const Filter filter = shared.distribution.filter;
  const uint64_t seed = shared.seed;
  const int64_t position = shared.position;
  LogitReader<kDType> row(shared.distribution.row);
  row.apply(shared.distribution);
  float bound = kMinNoise;  // the peak's score is no lower
  if (threadIdx.x == 0) shared.notes.bound = order_key<ScalarMath>(bound);
  __syncthreads();
  const float kept_x = max_of(filter.min_x, scale(filter.min_logit));
  uint64_t best = 0;
  const auto has_any = [&](float most) { return __any_sync(~0u, scale(most) >= kept_x) != 0; };
  const uint32_t groups = first_token % row.of_word() == 0 ? 1 : 2;  // per word
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

// Samples in one pass, before the peak is known. Returns -1 if undecided: unclean row, many candidates, or rounding.
template <DType kDType>
__device__ __attribute__((noinline)) int32_t draw_ahead(SamplingShared& shared) {
  LogitReader<kDType> row(shared.distribution.row);
  row.presume_clean();
  Scale scale{0.0f, inverse_temperature(shared.sampling.temperature)};
  const float peak = race_ahead(row, scale, shared.seed, shared.position, shared.notes);
  const uint32_t own = peak != peak ? ~0u : order_key<ScalarMath>(peak + 0.0f);
  scale.peak = ranked_value(cluster_max(shared.radix.block, uint64_t{own} << 32));
  if (!(scale.peak < row.largest() && scale.peak > -kInfinity)) return -1;
  __syncthreads();  // after all writes of notes
  const uint64_t best = winner_of_candidates(shared.notes, scale, shared.radix.block);
  return best == 0 ? -1 : ranked_id(best);
}

// Samples the kept tokens. Returns -1 if they are too many, or for NaN or no finite logit.
template <DType kDType>
__device__ __attribute__((noinline)) int32_t draw_kept(SamplingShared& shared) {
  RowSlice<kDType> slice{LogitReader<kDType>(shared.distribution.row), shared.radix.block};
  const Sampling& sampling = shared.sampling;
  KeptTokens<RowSlice<kDType>> kept{slice,
                                    shared.kept,
                                    sampling,
                                    slice.row.vocab(),
                                    min_p_bound(sampling.min_p),
                                    {0.0f, inverse_temperature(sampling.temperature)}};
  bool bad = false;
  const uint64_t best = kept.best_of_row(0, shared.seed, shared.position, bad);
  return best == kept.kTooMany || best == kept.kNoneFinite ? -1 : ranked_id(best);
}

template <DType kDType>
__device__ __forceinline__ Draw draw_token(const LogitRow& row, const Sampling& sampling, uint64_t seed,
                                           int64_t position, SamplingShared& shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.distribution.row = row;
    shared.sampling = sampling;
    shared.seed = seed;
    shared.position = position;
  }
  __syncthreads();
  const bool greedy = sampling.temperature == 0.0f, filters = has_filter(sampling, row.vocab);
  int32_t token = -1;
  if (!greedy && filters) token = draw_kept<kDType>(shared);
  // In a cluster, threads reread their few words faster than they fetch the code of a race ahead.
  if (!greedy && !filters && ptx::cluster_size() == 1) token = draw_ahead<kDType>(shared);
  if (token >= 0) return {token, false};
  find_distribution<kDType>(shared.radix, shared.masses, shared.sampling, shared.distribution);
  const RowDistribution& found = shared.distribution;
  return {greedy ? found.best : ranked_id(race_of_kept<kDType>(shared, 0)), found.bad};
}

}  // namespace pagedtree::cuda
