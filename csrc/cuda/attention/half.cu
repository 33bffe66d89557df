#include "cuda/attention/kernel_wide.cuh"

namespace pagedtree::cuda {

AttentionLauncher half_attention(const TileShape& shape) { return mma_sync_launcher<__half, __half>(shape); }

}  // namespace pagedtree::cuda
