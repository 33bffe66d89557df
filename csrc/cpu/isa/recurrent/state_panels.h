// Copies a state [Dk, Dv] of any strides to and from panels of tile/gemm.h, [values_width / kPanel, Dk, kPanel], zero
// after Dv, in the state's memory order.
#pragma once

#include "cpu/isa/tile/gemm.h"
#include "cpu/isa/tile/transpose.h"
#include "cpu/recurrent_work.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// Contiguous values; `values` is a multiple of kLanes.
template <bool kStore>
static inline void move_value_rows(float* state, int64_t key_stride, int64_t depth, int64_t values, float* panels) {
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t n = 0; n < values; n += kLanes) {
      float *ours = panels + n / kPanel * kPanel * depth + k * kPanel + n % kPanel,
            *theirs = state + k * key_stride + n;
      store(kStore ? theirs : ours, load(kStore ? ours : theirs));
    }
  }
}

// Contiguous keys; `keys` and `values` are multiples of kLanes.
template <bool kStore>
static inline void move_key_rows(float* state, int64_t value_stride, int64_t depth, int64_t keys, int64_t values,
                                 float* panels) {
  for (int64_t n = 0; n < values; n += kLanes) {
    for (int64_t k = 0; k < keys; k += kLanes) {
      float *ours = panels + n / kPanel * kPanel * depth + k * kPanel + n % kPanel,
            *theirs = state + n * value_stride + k;
      vfloat block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = load(kStore ? ours + i * kPanel : theirs + i * value_stride);
      transpose(block);
      for (int i = 0; i < kLanes; ++i) store(kStore ? theirs + i * value_stride : ours + i * kPanel, block[i]);
    }
  }
}

// Loads panels (zeros if `state_index` is -1); kStore: stores them.
template <bool kStore>
static inline void move_state(const DeltaRuleParams& p, int64_t state_index, int64_t head, float* panels,
                              int64_t values_width) {
  const int64_t depth = p.key_dim, key_stride = p.state_strides[2], value_stride = p.state_strides[3];
  if (!kStore && (state_index < 0 || p.value_dim < values_width)) {
    std::memset(panels, 0, static_cast<size_t>(depth * values_width) * sizeof(float));
  }
  if (state_index < 0) return;
  float* state = p.state + state_index * p.state_strides[0] + head * p.state_strides[1];
  int64_t keys = 0, values = 0;  // copied by vectors
  if (value_stride == 1) {
    keys = depth, values = p.value_dim / kLanes * kLanes;
    move_value_rows<kStore>(state, key_stride, depth, values, panels);
  } else if (key_stride == 1) {
    keys = depth / kLanes * kLanes, values = p.value_dim / kLanes * kLanes;
    move_key_rows<kStore>(state, value_stride, depth, keys, values, panels);
  }
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t n = k < keys ? values : 0; n < p.value_dim; ++n) {
      float* ours = panels + n / kPanel * kPanel * depth + k * kPanel + n % kPanel;
      float* theirs = state + k * key_stride + n * value_stride;
      *(kStore ? theirs : ours) = *(kStore ? ours : theirs);
    }
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
