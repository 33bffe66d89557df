#include "cuda/attention/instances.cuh"

namespace pagedtree::cuda {

AttentionLauncher bfloat16_attention(const TileShape& shape) {
  return find_launcher<__nv_bfloat16, __nv_bfloat16>(shape);
}

}  // namespace pagedtree::cuda
