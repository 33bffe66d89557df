// Draws a token from a row of logits: the peak, the filters' threshold, the race of the kept tokens' noise. A whole CTA
// or a cluster works on one row. The row is read from memory once and from L2 afterwards; nothing of its size is
// written.
#pragma once

#include "cuda/race.cuh"

namespace pagedtree::cuda {

// The `wanted`-th of this CTA's keys, 0 if it has fewer.
__device__ __forceinline__ uint32_t find_key(TopTokens& top, const uint16_t* keys, uint32_t wanted) {
  const uint32_t pairs = top.keys / 2;
  uint32_t key = 0;
#pragma unroll 1
  for (int bit = 15; bit >= 0; --bit) {
    const uint32_t next = key | 1u << bit;
    uint32_t found = 0;
    for (uint32_t i = threadIdx.x; i < pairs; i += blockDim.x) {
      const uint32_t pair = reinterpret_cast<const uint32_t*>(keys)[i];
      found += ((pair & 0xffffu) >= next) + (pair >> 16 >= next);
    }
    found = __reduce_add_sync(~0u, found);
    if (threadIdx.x % 32 == 0 && found > 0) atomicAdd(&top.at_least[bit], found);
    __syncthreads();
    if (top.at_least[bit] >= wanted) key = next;
  }
  return key;
}

// The best x + noise of the listed tokens that the filters keep, ranked(). Each thread asks for its token which ones
// are before it: first their number, which says whether it has a weight, then their weights.
__device__ __forceinline__ uint64_t race_of_top(SamplingShared& shared, const Scale& scale, float min_x) {
  const Sampling& sampling = shared.sampling;
  const TopTokens& top = shared.top;
  uint32_t* const weights = shared.masses;
  uint64_t best = 0;
#pragma unroll 1
  for (int weighed = 0; weighed < 2; ++weighed) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < top.size; i += blockDim.x) {
      const uint64_t own = top.ranks[i];
      const float x = scale(ranked_value(own));
      int32_t greater = 0;
      uint64_t before = 0, all = 0;
#pragma unroll 1
      for (uint32_t j = 0; j < top.size; ++j) {
        const uint64_t other = top.ranks[j];
        const uint64_t weight = weighed ? weights[j] : 0;
        greater += other >> 32 > own >> 32;
        before += other > own ? weight : 0;
        all += weight;
      }
      const bool keeps = greater < sampling.top_k && (sampling.joint || x >= min_x);
      if (!weighed) {
        weights[i] = keeps ? weight_of<ScalarMath>(x) : 0;
      } else if (keeps && x >= min_x && (sampling.top_p >= 1.0f || before < top_p_mass(sampling.top_p, all))) {
        const uint32_t token = static_cast<uint32_t>(ranked_id(own));
        const NoiseGroup group(shared.seed, shared.position, RandomUse::kGumbel, token / kNoiseGroup);
        best = max_of(best, ranked(x + group.noise(token % kNoiseGroup), token));
      }
    }
    __syncthreads();
  }
  return best;
}

// Whether the tokens that draw_of_top() lists suffice for the filters. The more CTAs share a row, the lower is the
// bound of the list, and too many tokens are above it.
__device__ __forceinline__ bool draws_of_top(const Sampling& sampling, int32_t vocab) {
  constexpr uint32_t kMostCtas = 4;
  return ptx::cluster_size() <= kMostCtas && sampling.top_k > 0 && sampling.top_k <= TopTokens::kMostWanted &&
         has_filter(sampling, vocab) && (sampling.top_p >= 1.0f || !sampling.joint);
}

// Draws from the largest tokens of a row with top-k, given the maxima of its batches: the k-th of them is a lower bound
// of its k-th logit. Returns -1 if the tokens above the bound are too many.
template <DType kDType>
__device__ __forceinline__ int32_t draw_of_top(float largest, const Scale& scale, float min_x, BatchMaxima maxima,
                                               SamplingShared& shared) {
  const Sampling& sampling = shared.sampling;
  TopTokens& top = shared.top;
  if (threadIdx.x < 16) top.at_least[threadIdx.x] = 0;
  if (threadIdx.x == 0) top.size = 0;
  // The last warp has the fewest batches, at most one less than others.
  maxima.add(-kInfinity);
  if (threadIdx.x == blockDim.x - 1) top.keys = min_of(maxima.batch - threadIdx.x / 32, BatchMaxima::kMost) * 32;
  __syncthreads();
  const uint32_t wanted = ceil_div<uint32_t>(static_cast<uint32_t>(sampling.top_k), ptx::cluster_size());
  const uint32_t of_cta = find_key(top, maxima.keys, wanted);
  const uint32_t least_key = ~static_cast<uint32_t>(cluster_max(shared.radix.block, uint64_t{~of_cta} << 32) >> 32);
  read_largest<kDType>(shared, max_of(-largest, logit_of_key<ScalarMath>(least_key << 16)), 0, true);
  ptx::meet_cluster();
  uint64_t best = 0;
  if (ptx::cluster_rank() == 0 && top.size <= TopTokens::kMost) best = race_of_top(shared, scale, min_x);
  best = cluster_max(shared.radix.block, best);
  return best == 0 ? -1 : ranked_id(best);
}

// Draws from a row that is read once. A race ahead of the peak has a winner, which is asked whether the filters keep
// it; if not, the best of the tokens that they may keep. If `of_top`, the largest tokens are listed instead. Returns -1
// if the token is not known so: of a row that is not clean, of too many that may win, or where rounding might decide.
template <DType kDType, bool kFilters>
__device__ __attribute__((noinline)) int32_t draw_ahead(SamplingShared& shared, bool of_top) {
  const Sampling& sampling = shared.sampling;
  LogitReader<kDType> row(shared.distribution.row);
  row.presume_clean();
  Ahead ahead;
  Scale scale{0.0f, inverse_temperature(sampling.temperature)};
  const bool has_filters = kFilters && has_filter(sampling, row.vocab());
  BatchMaxima maxima{has_filters ? maxima_in(shared) : nullptr};
  race_ahead(row, scale, shared.seed, shared.position, shared.notes, ahead, maxima, of_top);
  const uint32_t own = ahead.peak != ahead.peak ? ~0u : order_key<ScalarMath>(ahead.peak + 0.0f);
  scale.peak = ranked_value(cluster_max(shared.radix.block, uint64_t{own} << 32));
  if (!(scale.peak < row.largest() && scale.peak > -kInfinity)) return -1;
  if (threadIdx.x == 0) {
    shared.distribution.scale = scale;
    shared.distribution.uniform = shared.distribution.bad = false;
  }
  __syncthreads();  // all have noted
  const float min_x = min_p_bound(sampling.min_p);
  if (kFilters && of_top) return draw_of_top<kDType>(row.largest(), scale, min_x, maxima, shared);
  uint64_t best = winner_of_notes(shared.notes, scale, shared.radix.block);
#pragma unroll 1
  while (best != 0) {
    const int32_t token = ranked_id(best);
    if (!has_filters) return token;
    const float logit = row.logit(token);
    Filter filter{.min_x = min_x};
    if (scale(logit) >= min_x) {
      if (sampling.top_p >= 1.0f) return token;
      const float rebase = ScalarMath::fma(-scale.peak, log2_scale(scale), ahead.reference);
      const float mass_before = read_largest<kDType>(shared, logit, token, false);
      float sums[] = {mass_before, ahead.mass * ptx::ex2(rebase)};
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {  // one copy of the code
        const uint64_t sum = cluster_sum(shared.radix.block, static_cast<uint64_t>(sums[0] * 0x1p40f));
        sums[0] = sums[1];
        sums[1] = static_cast<float>(sum) * 0x1p-40f;
      }
      const float before = sums[0], needed = sampling.top_p * sums[1];
      // Of floats, of which a thread adds 2^10, and of the integers that decide.
      const float error = 0x1p-13f * (needed + before) + static_cast<float>(row.vocab()) * 0x1p-31f;
      if (before == 0.0f || before + error < needed) return token;
      if (before - error <= needed) return -1;
      filter = {logit, token, min_x};
    }
    if (threadIdx.x == 0) shared.distribution.filter = filter;
    best = race_of_kept<kDType>(shared, 0);
  }
  return -1;
}

// Whether draw_ahead() can ask for the mass that top-p needs: that of all tokens. Without a filter, a few words a
// thread are read again sooner than the code of a race ahead is.
__device__ __forceinline__ bool draws_ahead(const Sampling& sampling, int32_t vocab) {
  if (!has_filter(sampling, vocab)) return ptx::cluster_size() == 1;
  const bool by_count = sampling.top_k > 0 && sampling.top_k < vocab;
  return !by_count && (sampling.top_p >= 1.0f || sampling.joint || sampling.min_p < kMinNormal);
}

// Without kFilters, rows under filters are not drawn ahead: of kernels with lists of their own, few such rows are left.
template <DType kDType, bool kFilters = true>
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
  const bool greedy = sampling.temperature == 0.0f;
  int32_t token = -1;
  if (!greedy && (kFilters || !has_filter(sampling, row.vocab))) {
    const bool races = draws_ahead(sampling, row.vocab);
    if (races || (kFilters && draws_of_top(sampling, row.vocab))) token = draw_ahead<kDType, kFilters>(shared, !races);
  }
  if (token >= 0) return {token, false};
  find_distribution<kDType>(shared.radix, shared.masses, shared.sampling, shared.distribution);
  const RowDistribution& found = shared.distribution;
  return {greedy ? found.best : ranked_id(race_of_kept<kDType>(shared, 0)), found.bad};
}

}  // namespace pagedtree::cuda
