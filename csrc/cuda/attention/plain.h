// Attention without matrix instructions: fp32, and heads narrower than all tiles.
#pragma once

#include "cuda/attention/row_tile.cuh"

namespace pagedtree::cuda {

constexpr bool is_plain(const TreeAttentionParams& p) {
  return p.q_dtype == DType::kFloat32 || p.head_dim < kLeastTileColumns;
}

// Computes whole rows; needs no plan and no scratch.
void plain_attention(const AttentionParams& p, void* stream);

}  // namespace pagedtree::cuda
