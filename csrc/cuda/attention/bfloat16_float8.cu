#include "cuda/attention/kernel_wide.cuh"

namespace pagedtree::cuda {

AttentionLauncher bfloat16_float8_attention(const TileShape& shape) {
  return mma_sync_launcher<__nv_bfloat16, Float8E4M3>(shape);
}

}  // namespace pagedtree::cuda
