#include "cuda/attention/kernel_sm90.cuh"

namespace pagedtree::cuda {

AttentionLauncher half_float8_attention_sm90(const TileShape& shape) {
  return wgmma_launcher<__half, Float8E4M3>(shape);
}

}  // namespace pagedtree::cuda
