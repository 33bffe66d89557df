#include "cuda/attention/instances.cuh"
#include "cuda/attention/kernel.cuh"

namespace pagedtree::cuda {

AttentionLauncher bfloat16_attention(const TileShape& shape) {
  return find_launcher<MatrixEngine::kMmaSync>(shape, [&]<int kHeadDim, int kMTile, int kHeadDimV>() {
    return launch_attention<Instance<__nv_bfloat16, __nv_bfloat16, kHeadDim, kMTile, kHeadDimV>>;
  });
}

}  // namespace pagedtree::cuda
