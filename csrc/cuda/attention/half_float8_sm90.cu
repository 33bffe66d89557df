#include "cuda/attention/kernel_sm90.cuh"

namespace pagedtree::cuda {
template AttentionLauncher wgmma_launcher<__half, Float8E4M3>(const TileShape&);
}
