#include "cuda/attention/instances.cuh"

namespace pagedtree::cuda {

AttentionLauncher half_float8_attention(const TileShape& shape) { return find_launcher<__half, Float8E4M3>(shape); }

}  // namespace pagedtree::cuda
