#include "cuda/attention/kernel_sm90.cuh"

namespace pagedtree::cuda {

AttentionLauncher half_attention_sm90(const TileShape& shape) { return wgmma_launcher<__half, __half>(shape); }

}  // namespace pagedtree::cuda
