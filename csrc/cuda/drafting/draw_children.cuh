// Draws a draft node's children from the filtered distribution of its row of logits, and writes that distribution. A
// whole CTA works on one node.
#pragma once

#include "core/drafting.h"
#include "cuda/sampling.cuh"

namespace pagedtree::cuda {

struct ChildrenShared {
  BestShared best;
  MassColumns columns;
  uint64_t targets[kMaxTreeNodes];
};
static_assert(sizeof(ChildrenShared) <= 99 << 10);  // what every GPU from sm_80 on gives

// Tokens as integer masses; probabilities are mass / total. A token without mass has probability 0 and is never drawn.
template <DType kDType>
struct Masses {
  LogitReader<kDType> row;
  Scale scale;
  Filter filter;

  __device__ uint32_t of(int64_t token, float logit) const {
    const float x = scale(logit);
    return logit > -kInfinity && filter.keeps(token, logit, x) ? weight_of<ScalarMath>(x) : 0;
  }
  __device__ uint32_t at(int64_t token) const { return of(token, row.logit(token)); }

  // Calls f(token, masses) for each group of four tokens of this thread.
  template <typename F>
  __device__ __forceinline__ void each_four(F f) const {
    row.each_four([&](int64_t token, const float (&logits)[4]) {
      uint32_t four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = of(token + i, logits[i]);
      f(token, four);
    });
  }
};

// Draws without replacement: the best tokens by log-mass + Gumbel noise, best first (Kool et al., ICML 2019). The
// scores pass through draw.probs, so that noise is computed once.
template <DType kDType>
__device__ __forceinline__ void draw_distinct(const Masses<kDType>& masses, const ChildrenDraw& draw,
                                              BestShared& shared) {
  NoiseGroup group;
  masses.each_four([&](int64_t token, const uint32_t (&four)[4]) {
    const uint32_t member = static_cast<uint32_t>(token) % kNoiseGroup;
    if (member == 0 || masses.row.is_wide()) {  // else the four before began the group
      group = NoiseGroup(draw.seed, draw.position, draw.use, static_cast<uint32_t>(token) / kNoiseGroup);
    }
    uint32_t left[4] = {four[0], four[1], four[2], four[3]};
#pragma unroll 1
    for (uint32_t i = 0; i < 4 && token + i < masses.row.vocab(); ++i) {
      const float log_mass = log_exact<ScalarMath>(ScalarMath::to_float(left[0]));
      draw.probs[token + i] = left[0] != 0 ? log_mass + group.noise(member + i) : -kInfinity;
#pragma unroll
      for (int j = 0; j < 3; ++j) left[j] = left[j + 1];
    }
  });
  __syncthreads();
  const ScoreItems items{draw.probs, masses.row.vocab(), false};
  const int32_t size = list_best(shared, items, items.kDigits, draw.count);
  for (int32_t r = threadIdx.x; r < draw.count; r += blockDim.x) {
    draw.tokens[r] = r < size ? ranked_id(shared.best[r]) : -1;
  }
}

// Independent draws: child r is the first token whose cumulative mass exceeds a 64-bit fraction of the total. Each warp
// takes a run of tokens and the draws that fall into it.
template <DType kDType>
__device__ __forceinline__ void draw_independent(const Masses<kDType>& masses, uint64_t total, const ChildrenDraw& draw,
                                                 ChildrenShared& shared) {
  for (int32_t r = threadIdx.x; r < draw.count; r += blockDim.x) {
    uint32_t words[4];
    philox<ScalarMath>(draw.seed, draw.position, static_cast<uint32_t>(r), draw.use, words);
    shared.targets[r] = fraction_of(total, words[0], words[1]);
  }
  const WarpRun run = run_of_warp(masses.row.vocab());
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto mass_up_to = [&](int64_t begin) {  // the mass of the lanes up to this one
    uint64_t mass = begin + lane < run.end ? masses.at(begin + lane) : 0;
    for (int delta = 1; delta < 32; delta *= 2) {
      const uint64_t before = __shfl_up_sync(~0u, mass, delta);
      if (lane >= delta) mass += before;
    }
    return mass;
  };
  uint64_t of_run = 0, all;
  for (int64_t begin = run.begin; begin < run.end; begin += 32) of_run += __shfl_sync(~0u, mass_up_to(begin), 31);
  uint64_t before = sum_before_warp(shared.best.radix.block, of_run, all);
  for (int64_t begin = run.begin; begin < run.end; begin += 32) {
    const uint64_t mass = mass_up_to(begin), of_group = __shfl_sync(~0u, mass, 31);
    for (int32_t first = 0; first < draw.count && of_group > 0; first += 32) {
      const uint64_t target = first + lane < draw.count ? shared.targets[first + lane] : ~uint64_t{0};
      for (uint32_t hits = __ballot_sync(~0u, target >= before && target < before + of_group); hits != 0;
           hits &= hits - 1) {
        const int hit = __ffs(static_cast<int>(hits)) - 1;
        const uint64_t wanted = __shfl_sync(~0u, target, hit) - before;
        const uint32_t past = __ballot_sync(~0u, mass > wanted);
        if (lane == 0) draw.tokens[first + hit] = begin + __ffs(static_cast<int>(past)) - 1;
      }
    }
    before += of_group;
  }
}

template <DType kDType>
__device__ __forceinline__ void draw_children(const LogitRow& logits, const Sampling& sampling,
                                              const ChildrenDraw& draw, ChildrenShared& shared) {
  RadixShared& radix = shared.best.radix;
  Masses<kDType> masses{LogitReader<kDType>(logits), {0.0f, 1.0f}, {}};
  const Peak peak = find_peak(masses.row, radix.block);
  const bool greedy = sampling.temperature == 0.0f;
  if (peak.logit == -kInfinity) {
    masses.row.make_uniform();
    if (greedy) masses.filter = {.min_logit = 0.0f, .tie_end = 1};
  } else {
    masses.scale = {peak.logit, greedy ? 1.0f : inverse_temperature(sampling.temperature)};
    masses.filter = greedy ? Filter{.min_logit = peak.logit, .tie_end = peak.token + 1}
                           : find_filter(masses.row, sampling, masses.scale, radix, shared.columns);
  }
  uint64_t sum = 0;
  masses.each_four([&](int64_t, const uint32_t (&four)[4]) { sum += uint64_t{four[0]} + four[1] + four[2] + four[3]; });
  const uint64_t total = block_sum(radix.block, sum);
  if (draw.law == GrowthLaw::kIid) {
    draw_independent(masses, total, draw, shared);
  } else {
    draw_distinct(masses, draw, shared.best);
  }
  __syncthreads();
  const float scale = static_cast<float>(1.0 / static_cast<double>(total));
  masses.each_four([&](int64_t token, const uint32_t (&four)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (token + i < masses.row.vocab()) draw.probs[token + i] = ScalarMath::to_float(four[i]) * scale;
    }
  });
  __syncthreads();
  for (int32_t r = threadIdx.x; r < draw.count; r += blockDim.x) {
    const int64_t token = draw.tokens[r];
    draw.scores[r] = token >= 0 ? log_exact<ScalarMath>(draw.probs[token]) : -kInfinity;
  }
}

}  // namespace pagedtree::cuda
