// Gumbel noise -log(Exp(1)) by groups of eight tokens. The minimum of eight Exp(1) variates is Exp(1) / 8, each is
// equally likely to attain it, and the others exceed it by independent Exp(1) variates. One word gives a group's
// largest noise; only possible winners of a race draw the rest: a member's index and seven words.
#pragma once

#include "core/philox.h"

namespace pagedtree {

constexpr int kNoiseGroup = 8;
constexpr int kNoiseRun = 128;  // groups that share 32 consecutive blocks
constexpr float kMaxNoise = 25.0f, kMinNoise = -3.25f;

// Assigns word run_word(g) of block run_block(g) to group g: a lane draws one block for four groups 32 apart.
PT_HOST_DEVICE uint32_t run_block(uint32_t group) { return group / kNoiseRun * 32 + group % 32; }
PT_HOST_DEVICE uint32_t run_word(uint32_t group) { return group / 32 % 4; }

PT_HOST_DEVICE uint32_t word_of_run(uint32_t group, const uint32_t* words) {
  const uint32_t at = run_word(group), even = at & 2 ? words[2] : words[0], odd = at & 2 ? words[3] : words[1];
  return at & 1 ? odd : even;
}

template <typename M>
PT_HOST_DEVICE typename M::Float least_exponential(typename M::Uint word) {
  return exponential_of_word<M>(word) * (1.0f / kNoiseGroup);
}

// Returns -log(exponential), absolute error below 2e-6.
template <typename M>
PT_HOST_DEVICE typename M::Float noise_of(typename M::Float exponential) {
  return -log_exact<M>(exponential);
}

// Returns a cheap upper bound, at most 0.07 too high for noise above 5: -log(1 - v) >= v, and log2(1 + f) >= f for the
// mantissa f.
template <typename M>
PT_HOST_DEVICE typename M::Float noise_bound(typename M::Uint word) {
  const auto log2_bits = M::to_float(M::template bits<typename M::Int>(M::to_float(word)));  // (log2(word) + 127) 2^23
  return M::fma(log2_bits, M::splat(-kLn2 / 8388608.0f), M::splat((32 + 3 + 127) * kLn2 + 1e-3f));
}

struct NoiseGroup {
  uint32_t words[kNoiseGroup]{};
  float least = 0.0f;

  NoiseGroup() = default;
  PT_HOST_DEVICE NoiseGroup(uint64_t seed, int64_t position, RandomUse use, uint32_t group) {
    PT_NO_UNROLL
    for (uint32_t i = 0; i < 3; ++i) {
      for (int w = 0; w < 4; ++w) words[w] = words[w + 4];
      const uint32_t block = i == 0 ? run_block(group) : 2 * group + i - 1;
      philox<ScalarMath, 1>(seed, position, block, i == 0 ? use : use_of_others(use), words + 4);
      if (i == 0) least = least_exponential<ScalarMath>(word_of_run(group, words + 4));
    }
  }

  // Returns the member with the smallest exponential.
  PT_HOST_DEVICE uint32_t first() const { return words[0] >> 29; }
  // Selects words in steps: an index would move the array to memory.
  PT_HOST_DEVICE float noise(uint32_t member) const {
    const uint32_t at = member + (member < first());
    const auto pick = [](uint32_t second, uint32_t a, uint32_t b) { return second ? b : a; };
    uint32_t four[4];
    for (int i = 0; i < 4; ++i) four[i] = pick(at & 4, words[i], words[i + 4]);
    const uint32_t word = pick(at & 1, pick(at & 2, four[0], four[2]), pick(at & 2, four[1], four[3]));
    return noise_of<ScalarMath>(least + (member == first() ? 0.0f : exponential_of_word<ScalarMath>(word)));
  }
};

}  // namespace pagedtree
