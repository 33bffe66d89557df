// Philox4x32-10 (Salmon et al., SC 2011): key = the request's seed, counter = (position, index, use). Nothing else
// enters, so a draw does not depend on the batch, the tree or the thread.
#pragma once

#include "core/math.h"

namespace pagedtree {

// Uses at one position never share words. The values are part of every seeded result.
enum class RandomUse : uint32_t {
  kGumbel = 0,     // token noise of sample and verify_sampled: core/noise.h
  kCoin = 1,       // words 0 and 1 of block r: the acceptance coin of sibling rank r
  kFinalDraw = 2,  // words 0 and 1 of block 0: the bonus
  kDraft = 3,      // a draft model's draws, see draft_use
};

// Separates the draft nodes at one position. Traversal verification needs independent draws: a cousin with the same
// draws would reveal them.
PT_HOST_DEVICE RandomUse draft_use(int64_t node) {
  return static_cast<RandomUse>(static_cast<uint32_t>(RandomUse::kDraft) | static_cast<uint32_t>(node) << 8);
}

// Separates the words of a noise group's other members, whose minimum is of `use`.
PT_HOST_DEVICE RandomUse use_of_others(RandomUse use) {
  return static_cast<RandomUse>(static_cast<uint32_t>(use) | 0x80u);
}

// Draws 4 words for each lane of M; counter words: (position low, position high, index, use). Rare draws on a GPU
// choose a small kUnroll for short code.
template <typename M, int kUnroll = 10>
PT_HOST_DEVICE void philox(uint64_t seed, int64_t position, typename M::Uint index, RandomUse use,
                           typename M::Uint words[4]) {
  const uint64_t counter = static_cast<uint64_t>(position);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  auto c0 = M::splat(static_cast<uint32_t>(counter)), c1 = M::splat(static_cast<uint32_t>(counter >> 32));
  auto c2 = index, c3 = M::splat(static_cast<uint32_t>(use));
#if defined(__CUDA_ARCH__)
#pragma unroll kUnroll
#endif
  for (int round = 0; round < 10; ++round) {
    typename M::Uint high0, low0, high1, low1;
    M::multiply(c0, 0xD2511F53u, high0, low0);
    M::multiply(c2, 0xCD9E8D57u, high1, low1);
    c0 = high1 ^ c1 ^ key0;
    c1 = low1;
    c2 = high0 ^ c3 ^ key1;
    c3 = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// Returns a multiple of 2^-53 in [0, 1).
PT_HOST_DEVICE double uniform_of(uint64_t seed, int64_t position, uint32_t index, RandomUse use) {
  uint32_t words[4];
  philox<ScalarMath, 1>(seed, position, index, use, words);
  const uint64_t bits = static_cast<uint64_t>(words[0]) << 32 | words[1];
  return static_cast<double>(bits >> 11) * (1.0 / 9007199254740992.0);
}

// Returns floor(total * u) < total for the 64-bit fraction u.
PT_HOST_DEVICE uint64_t fraction_of(uint64_t total, uint32_t high, uint32_t low) {
  const uint64_t total_high = total >> 32, total_low = total & 0xffffffffu;
  const uint64_t middle = total_high * low + ((total_low * low) >> 32);
  const uint64_t carry = total_low * high + (middle & 0xffffffffu);
  return total_high * high + (middle >> 32) + (carry >> 32);
}

}  // namespace pagedtree
