// Attention without matrix instructions: for fp32, and for heads too narrow for the tiles in config.h.
#pragma once

#include "cuda/attention/row_tile.cuh"

namespace pagedtree::cuda {

constexpr bool is_plain(const TreeAttentionParams& p) {
  return p.q_dtype == DType::kFloat32 || p.head_dim < kLeastTileColumns;
}

// Computes each row whole, so that it needs neither plan nor scratch.
void plain_attention(const AttentionParams& p, void* stream);

}  // namespace pagedtree::cuda
