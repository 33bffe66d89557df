// Draws children from a node's filtered distribution, and writes it. One CTA or cluster per node; the first CTA has
// all.
#pragma once

#include "core/drafting.h"
#include "cuda/logits/top_tokens.cuh"

namespace pagedtree::cuda {

struct ChildrenShared {
  RadixShared radix;
  MassColumns columns;
  RowDistribution distribution;
  ChildrenDraw draw;
  TopShared top;
  uint64_t targets[kMaxTreeNodes];
};
static_assert(sizeof(ChildrenShared) <= 99 << 10);  // all GPUs from sm_80

// Integer masses: p = mass / total. A token without mass has probability 0 and is never drawn.
template <DType kDType>
struct Masses {
  LogitReader<kDType> row;
  Scale scale;
  Filter filter;

  __device__ explicit Masses(const RowDistribution& distribution)
      : row(distribution.row), scale(distribution.scale), filter(distribution.filter) {
    row.apply(distribution);
  }

  __device__ uint32_t of(int64_t token, float logit) const {
    const float x = scale(logit);
    return logit > -kInfinity && filter.keeps(token, logit, x) ? weight_of<ScalarMath>(x) : 0;
  }

  __device__ bool may_keep(float largest) const {
    return largest >= filter.min_logit && scale(largest) >= max_of(filter.min_x, kWeightless);
  }

  // Calls f(token, masses) for each four tokens of a word.
  template <typename F>
  __device__ __forceinline__ void each_of_word(int index, const uint4& word, F f) const {
    const bool any = may_keep(row.largest_of_word(word));
    int64_t token = int64_t{index} * row.of_word();
    Four group = word;
#pragma unroll 1
    for (const int64_t end = token + row.of_word(); token < end; token += 4) {
      uint32_t four[4]{};
      if (any) {
        float logits[4];
        row.convert(group, logits);
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = of(token + i, logits[i]);
      }
      f(token, four);
      group.x = group.z;
      group.y = group.w;
    }
  }
};

// Sampling without replacement: top tokens by log-mass + Gumbel noise (Kool et al., ICML 2019).
template <DType kDType>
struct NoisyMasses {
  const LogitReader<kDType>& row;

  // Returns an upper bound of a word's scores, from its first token and largest mass. Not inlined: called twice.
  static __device__ __attribute__((noinline)) float bound(uint32_t token, uint32_t most) {
    const ChildrenDraw& draw = ptx::shared<ChildrenShared>().draw;
    uint32_t words[4];
    const uint32_t group = token / kNoiseGroup;
    philox<ScalarMath, 1>(draw.seed, draw.position, run_block(group), draw.use, words);
    const float log_mass = log_exact<ScalarMath>(ScalarMath::to_float(most));
    return most == 0 ? -kInfinity : log_mass + noise_bound<ScalarMath>(word_of_run(group, words));
  }

  // See list_best(). Not inlined: long.
  static __device__ __attribute__((noinline)) uint64_t best_of(int index, uint64_t least, uint64_t end,
                                                               TopShared* candidates) {
    const ChildrenShared& shared = ptx::shared<ChildrenShared>();
    const Masses<kDType> masses(shared.distribution);
    uint4 word = masses.row.clean_word_at(index);
    const float largest = masses.row.largest_of_word(word);
    uint32_t token = static_cast<uint32_t>(index * masses.row.of_word());
    if (!masses.may_keep(largest)) return 0;
    if (ranked(bound(token, weight_of<ScalarMath>(masses.scale(largest))), 0) < least) return 0;
    const NoiseGroup group(shared.draw.seed, shared.draw.position, shared.draw.use, token / kNoiseGroup);
    uint64_t best = 0;
#pragma unroll 1
    for (int i = 0; i < masses.row.of_word(); ++i, ++token, word = masses.row.without_first(word)) {
      const uint32_t mass = masses.of(token, masses.row.first_of(word));
      const float log_mass = log_exact<ScalarMath>(ScalarMath::to_float(mass));
      const uint64_t rank = ranked(log_mass + group.noise(token % kNoiseGroup), token);
      if (mass != 0 && rank >= least && rank < end) best = collect_item(rank, best, candidates);
    }
    return best;
  }
};

// Independent draws: child r is the first token whose cumulative mass exceeds a 64-bit fraction of the total. Draws the
// children in a warp's words; a lane has mass `own`, and `before` precedes the warp.
template <DType kDType>
__device__ __forceinline__ void draw_in_words(const Masses<kDType>& masses, int index, const uint4& word, uint64_t own,
                                              uint64_t& before, const uint64_t* targets, const ChildrenDraw& draw) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const uint64_t reached = warp_scan(own), all = __shfl_sync(~0u, reached, 31);
#pragma unroll 1
  for (int32_t first = 0; first < draw.count && all > 0; first += 32) {
    const uint64_t target = first + lane < draw.count ? targets[first + lane] - before : ~uint64_t{0};
#pragma unroll 1
    for (uint32_t hits = __ballot_sync(~0u, target < all); hits != 0; hits &= hits - 1) {
      const int hit = __ffs(static_cast<int>(hits)) - 1;
      const uint64_t wanted = __shfl_sync(~0u, target, hit);
      if (wanted >= reached || wanted < reached - own) continue;
      int64_t token = int64_t{index} * masses.row.of_word() - 1;
      uint4 rest = word;
#pragma unroll 1
      for (uint64_t sum = reached - own; sum <= wanted; rest = masses.row.without_first(rest)) {
        sum += masses.of(++token, masses.row.first_of(rest));
      }
      draw.tokens[first + hit] = token;
    }
  }
  before += all;
}

template <DType kDType, bool kIndependent>
__device__ __forceinline__ void draw_children(const LogitRow& logits, const Sampling& sampling,
                                              const ChildrenDraw& draw, float parent, ChildrenShared& shared) {
  BlockShared& block = shared.radix.block;
  if (threadIdx.x == 0) {
    shared.distribution.row = logits;
    shared.draw = draw;
  }
  ptx::meet_cluster();
  find_distribution<kDType>(shared.radix, shared.columns, sampling, shared.distribution);
  const Masses<kDType> masses(shared.distribution);
  const LogitReader<kDType>& row = masses.row;
  const int stride = kIndependent ? 32 : row.own_stride();
  const WarpRun run = kIndependent ? run_of_warp(row.num_words()) : WarpRun{0, row.own_begin(), row.num_words()};
  const bool by_fours = reinterpret_cast<uintptr_t>(draw.probs) % sizeof(float4) == 0;
  uint64_t sum = 0, before = 0;
  float largest = -kInfinity, scale = 0.0f;  // the largest bound
  int index_of_largest = 0;
  int32_t size = draw.count;
  // First pass: masses and bounds. Second pass: probabilities, independent draws. One loop: one copy of the code.
#pragma unroll 1
  for (bool writes = false;; writes = true) {
    row.each_word(
        run.begin, stride, run.end, [&](float most) { return writes || __any_sync(~0u, masses.may_keep(most)); },
        [&](int index, const uint4& word) {
          uint64_t own = 0;
          uint32_t most = 0;
          masses.each_of_word(index, word, [&](int64_t token, const uint32_t (&four)[4]) {
            own += uint64_t{four[0]} + four[1] + four[2] + four[3];
            most = max_of(max_of(most, max_of(four[0], four[1])), max_of(four[2], four[3]));
            if (!writes) return;
            float probs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) probs[i] = ScalarMath::to_float(four[i]) * scale;
            if (by_fours && token + 4 <= row.vocab()) {
              *reinterpret_cast<float4*>(draw.probs + token) = {probs[0], probs[1], probs[2], probs[3]};
              return;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (token + i < row.vocab()) draw.probs[token + i] = probs[i];
            }
          });
          if (kIndependent && writes) draw_in_words(masses, index, word, own, before, shared.targets, draw);
          sum += own;
          const float could = log_exact<ScalarMath>(ScalarMath::to_float(most)) + kMaxNoise;
          if (kIndependent || writes || !__any_sync(~0u, most != 0 && could > largest)) return;
          const float bound = NoisyMasses<kDType>::bound(static_cast<uint32_t>(index * row.of_word()), most);
          if (bound <= largest) return;
          largest = bound;
          index_of_largest = index;
        });
    if (writes) break;
    uint64_t total;
    before = sum_before_warp_of_cluster(block, warp_sum(sum), total);
    scale = static_cast<float>(1.0 / static_cast<double>(total));
    if constexpr (kIndependent) {
      for (int32_t r = threadIdx.x; r < draw.count; r += blockDim.x) {
        uint32_t words[4];
        philox<ScalarMath, 1>(draw.seed, draw.position, static_cast<uint32_t>(r), draw.use, words);
        shared.targets[r] = fraction_of(total, words[0], words[1]);
      }
      __syncthreads();
    } else {
      begin_candidates(shared.top);
      const uint64_t best =
          largest > -kInfinity ? NoisyMasses<kDType>::best_of(index_of_largest, 0, ~uint64_t{0}, nullptr) : 0;
      find_candidate_threshold(static_cast<uint32_t>(best >> 32), draw.count, shared.top);
      size = list_best(NoisyMasses<kDType>{row}, order_key<ScalarMath>(largest), draw.count, shared.top);
    }
  }
  ptx::meet_cluster();  // all tokens and probabilities are written
  if (ptx::cluster_rank() != 0) return;
  for (int32_t r = threadIdx.x; r < draw.count; r += blockDim.x) {
    if (!kIndependent) draw.tokens[r] = r < size ? ranked_id(shared.top.best[r]) : -1;
    const int64_t token = draw.tokens[r];
    const float prob = token >= 0 ? draw.probs[token] : 0.0f;
    const float score = prob > 0.0f ? child_score(parent, log_exact<ScalarMath>(prob), 0.0, 0.0) : -kInfinity;
    draw.scores[r] = score;
    if (!is_present(score)) draw.tokens[r] = -1;
  }
}

}  // namespace pagedtree::cuda
