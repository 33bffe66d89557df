#include "cuda/attention/kernel_sm90.cuh"

namespace pagedtree::cuda {

#if defined(PAGEDTREE_TRACE)
extern "C" __attribute__((visibility("default"))) int pagedtree_copy_trace(Trace* to) { return copy_trace(to); }
#endif

AttentionLauncher bfloat16_attention_sm90(const TileShape& shape) {
  return wgmma_launcher<__nv_bfloat16, __nv_bfloat16>(shape);
}

}  // namespace pagedtree::cuda
