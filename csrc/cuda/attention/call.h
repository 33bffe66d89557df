// What the host passes to the attention kernels besides the op's parameters, and how a call's scratch is used.
#pragma once

#include <vector_types.h>

#include "cuda/attention/row_tile.cuh"

namespace pagedtree::cuda {

// The partial results of a piece: row states (maximum in base 2, sum) and unnormalised output [piece_rows, Dv].
struct Piece {
  float2* states;
  float* out;
};

// What a CTA tells the kernel that joins the pieces.
struct alignas(16) CtaRecord {
  WorkPosition begin;  // of its range
  int32_t sharers;     // CTAs of the range
  WorkPosition end;
  RowTile cut;  // the CTA's rows of the row tile that it has begun and leaves unfinished; none if there is none
};
static_assert(sizeof(CtaRecord) == 64);

// The pieces in scratch. A row tile that is cut has one piece for each range that it lies in. A range has up to two
// pieces: one of the row tile inside which it begins, and one of a row tile that it leaves unfinished.
struct Pieces {
  float* memory;  // [2, capacity, rows * (head_dim_v + 2)]: first pieces of row tiles, others; then the records
  int32_t capacity;
  int32_t rows;
  int32_t head_dim_v;

  PT_HOST_DEVICE int64_t floats() const { return int64_t{rows} * (head_dim_v + 2); }
  PT_HOST_DEVICE int64_t bytes() const {
    return capacity * (2 * floats() * int64_t{sizeof(float)} + int64_t{sizeof(CtaRecord)});
  }
  PT_HOST_DEVICE CtaRecord* records() const { return reinterpret_cast<CtaRecord*>(memory + 2 * capacity * floats()); }
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
  bool q_copied;   // with a 16-bit cache also unchanged
  bool out_aligned;
};

struct CallShapes {
  CallShape lists[2];
};

}  // namespace pagedtree::cuda
