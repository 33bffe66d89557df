// Memory for one row tile.
#pragma once

#include "cpu/isa/attention/row_tile.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// Base-2 maximum, and the sum of 2^(score - maximum).
struct RowState {
  float maximum;
  float sum;
};

// Layouts are the engine's; q, k, v and the weights may be narrower than fp32.
struct Workspace {
  float *q, *k, *v;  // [kMTile, D], [kKvTile, D], [kKvTile, Dv]
  float* scores;     // [kMTile, kKvTile], overwritten by softmax weights
  float* out;        // [kMTile, Dv], unnormalised
  float* factors;    // [kMTile], rescale factors of `out`
  RowState* states;  // [kMTile]

  Workspace(void* memory, int64_t head_dim, int64_t head_dim_v) {
    q = static_cast<float*>(memory);
    out = q + kMTile * head_dim;
    k = out + kMTile * head_dim_v;
    v = k + kKvTile * head_dim;
    scores = v + kKvTile * head_dim_v;
    factors = scores + kMTile * kKvTile;
    states = reinterpret_cast<RowState*>(factors + kMTile);
  }

  Workspace from_row(int64_t r, int64_t head_dim, int64_t head_dim_v) const {
    Workspace rest = *this;
    rest.q += r * head_dim;
    rest.out += r * head_dim_v;
    rest.scores += r * kKvTile;
    rest.factors += r;
    rest.states += r;
    return rest;
  }
};

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
