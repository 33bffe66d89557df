// The instances of the attention kernel, each compiled in the file of its types: <q>_<kv>.cu.
#pragma once

#include "cuda/attention/call.h"

namespace pagedtree::cuda {

using AttentionLauncher = void (*)(const TreeAttentionParams& params, const CallShape& call, unsigned grid,
                                   int shared_bytes, void* stream);

// The launcher of a tile shape.
AttentionLauncher half_attention(const TileShape& shape);
AttentionLauncher half_float8_attention(const TileShape& shape);
AttentionLauncher bfloat16_attention(const TileShape& shape);
AttentionLauncher bfloat16_float8_attention(const TileShape& shape);

}  // namespace pagedtree::cuda
