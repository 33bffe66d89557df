#include "cuda/attention/instances.cuh"

namespace pagedtree::cuda {

AttentionLauncher half_attention(const TileShape& shape) { return find_launcher<__half, __half>(shape); }

}  // namespace pagedtree::cuda
