#include "cuda/attention/kernel_sm90.cuh"

namespace pagedtree::cuda {

AttentionLauncher bfloat16_attention_sm90(const TileShape& shape) {
  return wgmma_launcher<__nv_bfloat16, __nv_bfloat16>(shape);
}

}  // namespace pagedtree::cuda
