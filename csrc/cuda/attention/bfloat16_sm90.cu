#include "cuda/attention/kernel_sm90.cuh"

#if defined(PAGEDTREE_TRACE)
extern "C" __attribute__((visibility("default"))) int pagedtree_copy_trace(pagedtree::cuda::Trace* to) {
  return copy_trace(to);
}
#endif

namespace pagedtree::cuda {
template AttentionLauncher wgmma_launcher<__nv_bfloat16, __nv_bfloat16>(const TileShape&);
}
