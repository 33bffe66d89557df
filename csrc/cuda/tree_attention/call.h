// What the host tells the attention kernel beside the op's parameters, and where a call's scratch lies.
#pragma once

#include <vector_types.h>

#include <type_traits>

#include "cuda/tree_attention/config.h"

namespace pagedtree::cuda {

// The rows' partial results: row states (maximum, in base 2, and sum) and unnormalised output [piece_rows, head_dim].
struct Piece {
  float2* states;
  float* out;
};

// Arrays in scratch, one entry a range. A row tile that is cut has its first piece in the range `owner` that began it,
// piece k in range owner + k.
struct Ranges {
  int32_t* count;        // [1]
  WorkPosition* starts;  // [capacity + 1]
  int32_t* owners;       // [capacity] of the row tile that the range begins in, if it begins inside one
  int32_t* lasts;        // [capacity] the range that ends the row tile of which this one is the owner
  unsigned* arrivals;    // [capacity] 0; see join_pieces()
  float* pieces;         // [2, capacity, piece_rows * (head_dim + 2)]: of a row tile's first piece, of others
  int32_t capacity;
  int32_t piece_rows;
  int32_t head_dim;

  static constexpr int64_t kAlignment = 256;
  PT_HOST_DEVICE int64_t piece_floats() const { return int64_t{piece_rows} * (head_dim + 2); }

  // Places the arrays in `memory` (or nowhere) and returns their bytes.
  int64_t place(void* memory) {
    int64_t bytes = 0;
    const auto array = [&](auto*& pointer, int64_t size) {
      pointer =
          reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(reinterpret_cast<intptr_t>(memory) + bytes);
      bytes += ceil_div<int64_t>(size * static_cast<int64_t>(sizeof(*pointer)), kAlignment) * kAlignment;
    };
    array(count, 1);
    array(starts, capacity + 1);
    array(owners, capacity);
    array(lasts, capacity);
    array(arrivals, capacity);
    array(pieces, 2 * capacity * piece_floats());
    return bytes;
  }

  PT_HOST_DEVICE Piece piece(int32_t range, bool first) const {
    float* memory = pieces + ((first ? 0 : capacity) + range) * piece_floats();
    return {reinterpret_cast<float2*>(memory), memory + 2 * piece_rows};
  }
};

// One launch: of a list of sequences.
struct CallShape {
  WorkShape work;
  Ranges ranges;
  int stages;
  bool q_aligned;  // rows are read 16 bytes at a time
  bool out_aligned;
};

struct CallShapes {
  CallShape lists[2];
};

}  // namespace pagedtree::cuda
