#include "cuda/attention/kernel_wide.cuh"

namespace pagedtree::cuda {
template AttentionLauncher mma_sync_launcher<__nv_bfloat16, Float8E4M3>(const TileShape&);
}
