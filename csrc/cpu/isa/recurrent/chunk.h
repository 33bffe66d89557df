// Products of keys in a chunk of tokens.
#pragma once

#include "cpu/isa/tile/gemm.h"
#include "cpu/isa/tile/rows.h"
#include "cpu/isa/tile/transpose.h"
#include "cpu/recurrent_work.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

static_assert(kDeltaPadding % kPanel == 0);

struct Head {
  const DeltaRuleParams& p;
  DeltaScratch& s;
  int64_t first_row;  // first row of the sequence or chunk
  int64_t head;
};

// Transposes keys; key(i, d) returns channels d .. d + kLanes - 1 of token i.
template <typename Key>
static inline void pack_keys(const DeltaScratch& s, const Key& key) {
  for (int32_t i = 0; i < s.pairs_width; i += kLanes) {
    float* panel = s.key_panels + i / kPanel * kPanel * s.keys_width + i % kPanel;
    for (int64_t d = 0; d < s.keys_width; d += kLanes) {
      vfloat block[kLanes];
      for (int j = 0; j < kLanes; ++j) block[j] = i + j < s.count ? key(i + j, d) : splat(0.0f);
      transpose(block);
      for (int j = 0; j < kLanes; ++j) store(panel + (d + j) * kPanel, block[j]);
    }
  }
}

// Multiplies rows [count, keys_width], from `first` on, with the packed keys of earlier tokens.
static inline void multiply_rows(const DeltaScratch& s, const float* rows, int64_t first, float* products) {
  for (int64_t i = 0; i < s.count; i += kPanel) {
    const int64_t row = max_of(first, i);
    gemm<false>(rows + row * s.keys_width, s.keys_width, s.key_panels + i * s.keys_width, s.keys_width, nullptr,
                products + row * s.pairs_width + i, s.pairs_width, s.count - row, kPanel);
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
