// Sums in the order of MassTable (core/verify/rules.h).
#pragma once

#include "cpu/isa/logits/masses.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

struct Sums {
  static constexpr int kParts = kMassSums / kLanes;
  static_assert(kMassSums % kLanes == 0);
  vfloat parts[kParts]{};

  float whole() {
    for (int half = kParts / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
    }
    return reduce_add(parts[0]);
  }
};

// Returns false if the block has no kept token with a mass. `peaks`: null for a uniform row.
static inline bool may_have_mass(const float* peaks, int64_t begin, const RowDistribution& distribution) {
  if (peaks == nullptr) return true;
  const vfloat x = distribution.scale(peaks_at(peaks, begin));
  return reaches(peaks, begin, distribution.filter.min_logit) &&
         lane_bits((x >= splat(distribution.filter.min_x)) & has_mass(x)) != 0;
}

template <typename Values>
static inline float sum_of(int count, const Values& values) {
  Sums sums;
  for (int begin = 0; begin < count; begin += kMassSums) {
    for (int i = 0; i < Sums::kParts; ++i) sums.parts[i] += values(begin + i * kLanes);
  }
  return sums.whole();
}

static inline double sum_groups(int64_t vocab, MassTable& table) {
  for (int64_t group = 0; group < MassTable::num_groups(vocab); ++group) table.add_group(vocab, group);
  return table.total(vocab);
}

// Calls sum_block(first token, index) for each block's sum.
template <typename SumBlock>
static inline double sum_blocks(int64_t vocab, MassTable& table, const SumBlock& sum_block) {
  for (int64_t block = 0; block < MassTable::num_blocks(vocab); ++block) {
    table.blocks[block] = sum_block(block * kMassBlock, block);
  }
  return sum_groups(vocab, table);
}

// Returns the sum of a distribution's masses and fills the table. `block`: room for kMassBlock masses.
static inline double sum_distribution(const RowDistribution& distribution, const float* peaks, MassTable& table,
                                      float* block) {
  return sum_blocks(distribution.row.vocab, table, [&](int64_t begin, int64_t) {
    if (!may_have_mass(peaks, begin, distribution)) return 0.0f;
    return sum_of(load_masses(distribution, begin, block), [&](int i) { return load(block + i); });
  });
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
