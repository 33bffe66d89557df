#include "cuda/attention/instances.cuh"
#include "cuda/attention/kernel.cuh"

namespace pagedtree::cuda {

AttentionLauncher half_attention(const TileShape& shape) {
  return find_launcher<MatrixEngine::kMmaSync>(shape, [&]<int kHeadDim, int kMTile, int kHeadDimV>() {
    return launch_attention<Instance<__half, __half, kHeadDim, kMTile, kHeadDimV>>;
  });
}

}  // namespace pagedtree::cuda
