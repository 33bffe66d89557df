#include "cuda/attention/kernel_wide.cuh"

namespace pagedtree::cuda {

AttentionLauncher half_float8_attention(const TileShape& shape) { return mma_sync_launcher<__half, Float8E4M3>(shape); }

}  // namespace pagedtree::cuda
