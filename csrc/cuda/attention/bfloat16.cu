#include "cuda/attention/kernel_wide.cuh"

namespace pagedtree::cuda {
template AttentionLauncher mma_sync_launcher<__nv_bfloat16, __nv_bfloat16>(const TileShape&);
}
