#include "cuda/attention/kernel_wide.cuh"

namespace pagedtree::cuda {
template AttentionLauncher mma_sync_launcher<__half, __half>(const TileShape&);
}
