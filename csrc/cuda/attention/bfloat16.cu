#include "cuda/attention/kernel_wide.cuh"

namespace pagedtree::cuda {

AttentionLauncher bfloat16_attention(const TileShape& shape) {
  return mma_sync_launcher<__nv_bfloat16, __nv_bfloat16>(shape);
}

}  // namespace pagedtree::cuda
