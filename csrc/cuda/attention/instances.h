// Instances of the attention kernels: <q>_<kv>.cu, and <q>_<kv>_sm90.cu for wgmma in builds for 9.0a.
#pragma once

#include "cuda/attention/call.h"

namespace pagedtree::cuda {

using AttentionLauncher = void (*)(const AttentionParams& params, const CallShape& call, unsigned grid,
                                   int shared_bytes, void* stream);

AttentionLauncher half_attention(const TileShape& shape);
AttentionLauncher half_float8_attention(const TileShape& shape);
AttentionLauncher bfloat16_attention(const TileShape& shape);
AttentionLauncher bfloat16_float8_attention(const TileShape& shape);

AttentionLauncher half_attention_sm90(const TileShape& shape);
AttentionLauncher half_float8_attention_sm90(const TileShape& shape);
AttentionLauncher bfloat16_attention_sm90(const TileShape& shape);
AttentionLauncher bfloat16_float8_attention_sm90(const TileShape& shape);

}  // namespace pagedtree::cuda
