#include "cuda/attention/kernel_sm90.cuh"

namespace pagedtree::cuda {
template AttentionLauncher wgmma_launcher<__half, __half>(const TileShape&);
}
