// Instances of the attention kernels: <q>_<kv>.cu, and <q>_<kv>_sm90.cu for wgmma in builds for 9.0a.
#pragma once

#include "cuda/attention/call.h"

namespace pagedtree::cuda {

using AttentionLauncher = void (*)(const AttentionParams& params, const CallShape& call, unsigned grid,
                                   int shared_bytes, void* stream);

template <typename T, typename Kv>
AttentionLauncher mma_sync_launcher(const TileShape& shape);
template <typename T, typename Kv>
AttentionLauncher wgmma_launcher(const TileShape& shape);

}  // namespace pagedtree::cuda
