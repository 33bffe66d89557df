#include "cuda/attention/instances.cuh"
#include "cuda/attention/kernel_sm90.cuh"

namespace pagedtree::cuda {

AttentionLauncher half_float8_attention_sm90(const TileShape& shape) {
  return find_launcher<MatrixEngine::kWgmma>(shape, [&]<int kHeadDim, int kMTile, int kHeadDimV>() {
    return launch_attention_sm90<Sm90Instance<__half, Float8E4M3, kHeadDim, kMTile, kHeadDimV>>;
  });
}

}  // namespace pagedtree::cuda
