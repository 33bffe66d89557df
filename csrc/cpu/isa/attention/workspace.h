// A worker's memory while it computes one row tile.
#pragma once

#include "cpu/isa/attention/row_tile.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// Row state: the maximum so far (base 2) and the sum of 2^(score - maximum).
struct RowState {
  float maximum;
  float sum;
};

// Operands in the layouts of the engine that uses them: q, k, v and weights may hold a narrower type than fp32.
struct Workspace {
  float *q, *k, *v;  // [kMTile, D], [kKvTile, D], [kKvTile, Dv]
  float* scores;     // [kMTile, kKvTile], overwritten by the softmax weights
  float* out;        // [kMTile, Dv], unnormalised
  float* factors;    // [kMTile], the factors of what `out` held before the tile
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

  // The workspace of the rows from r on.
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
