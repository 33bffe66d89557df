#include "cuda/attention/kernel_sm90.cuh"

namespace pagedtree::cuda {

AttentionLauncher bfloat16_float8_attention_sm90(const TileShape& shape) {
  return wgmma_launcher<__nv_bfloat16, Float8E4M3>(shape);
}

}  // namespace pagedtree::cuda
