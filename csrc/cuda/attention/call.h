// What the host passes to the attention kernels besides the op's parameters, and how a call's scratch is used.
#pragma once

#include <vector_types.h>

#include "cuda/attention/config.h"

namespace pagedtree::cuda {

// The partial results of a piece: row states (maximum in base 2, sum) and unnormalised output [piece_rows, Dv].
struct Piece {
  float2* states;
  float* out;
};

// The pieces in scratch. A row tile that is cut has one piece for each range that it lies in. A range has up to two
// pieces: one of the row tile inside which it begins, and one of a row tile that it leaves unfinished.
struct Pieces {
  float* memory;  // [2, capacity, rows * (head_dim_v + 2)]: first pieces of row tiles, others
  int32_t capacity;
  int32_t rows;
  int32_t head_dim_v;

  PT_HOST_DEVICE int64_t floats() const { return int64_t{rows} * (head_dim_v + 2); }
  PT_HOST_DEVICE int64_t bytes() const { return 2 * capacity * floats() * int64_t{sizeof(float)}; }
  PT_HOST_DEVICE Piece of(int32_t range, bool is_first) const {
    float* piece = memory + ((is_first ? 0 : capacity) + range) * floats();
    return {reinterpret_cast<float2*>(piece), piece + 2 * rows};
  }
};

// One launch of the kernel, for one list of sequences.
struct CallShape {
  WorkShape work;
  Pieces pieces;
  int stages;
  bool q_aligned;  // rows are read 16 bytes at a time
  bool out_aligned;
};

struct CallShapes {
  CallShape lists[2];
};

}  // namespace pagedtree::cuda
