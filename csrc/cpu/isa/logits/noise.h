// Vectorised noise (core/noise.h) for kLanes groups at once.
#pragma once

#include "core/noise.h"
#include "cpu/isa/tile/math.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

constexpr int kGroupsTokens = kNoiseGroup * kLanes;

static inline vfloat largest_of_pairs(vfloat a, vfloat b) {
  vint even;
  for (int i = 0; i < kLanes; ++i) even[i] = 2 * i;
  return max(__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, even + 1));
}

// Returns the maximum of token group i in lane i.
static inline vfloat largest_of_groups(const vfloat x[kNoiseGroup]) {
  const vfloat low = largest_of_pairs(largest_of_pairs(x[0], x[1]), largest_of_pairs(x[2], x[3]));
  const vfloat high = largest_of_pairs(largest_of_pairs(x[4], x[5]), largest_of_pairs(x[6], x[7]));
  return largest_of_pairs(low, high);
}

// `first_id`, the id of token 0, need not begin a group.
class Noise {
 public:
  Noise(uint64_t seed, int64_t position, RandomUse use, int64_t first_id = 0)
      : seed_(seed), position_(position), use_(use), first_id_(first_id) {}

  // Bounds tokens `begin` + 8 i .. + 7 in lane i; `begin` is a multiple of kGroupsTokens.
  vfloat bounds(int64_t begin) {
    const uint32_t group = group_of(begin), at = group % kNoiseRun;
    if (group / kNoiseRun != run_) {
      run_ = group / kNoiseRun;
      draw(run_, words_);
      if (first_id_ % (kNoiseRun * kNoiseGroup) != 0) draw(run_ + 1, words_ + kNoiseRun);
    }
    vuint words = load_as<vuint>(words_ + at);
    if (first_id_ % kNoiseGroup != 0) words = min(words, load_as<vuint>(words_ + at + 1));
    return noise_bound<VectorMath>(words);
  }

  float of_token(int64_t token) {
    const uint32_t group = group_of(token);
    if (group != group_) noises_ = NoiseGroup(seed_, position_, use_, group_ = group);
    return noises_.noise(static_cast<uint32_t>((first_id_ + token) % kNoiseGroup));
  }

 private:
  uint32_t group_of(int64_t token) const { return static_cast<uint32_t>((first_id_ + token) / kNoiseGroup); }

  void draw(uint32_t run, uint32_t* words) const {
    for (int i = 0; i < 32; i += kLanes) {
      vuint of_blocks[4];
      philox_lanes(seed_, position_, bits<vuint>(lane_index() + i) + run * 32, use_, of_blocks);
      for (int w = 0; w < 4; ++w) std::memcpy(words + 32 * w + i, of_blocks + w, sizeof(vuint));
    }
  }

  uint64_t seed_;
  int64_t position_;
  RandomUse use_;
  int64_t first_id_;
  uint32_t run_ = ~0u, group_ = ~0u;  // of words_ and noises_
  uint32_t words_[2 * kNoiseRun + kLanes];
  NoiseGroup noises_;
};

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
