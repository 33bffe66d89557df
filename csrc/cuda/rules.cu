// Ops with independent items (core/ops.h): one thread per item.
#include "core/kv_cache.h"
#include "core/step.h"
#include "core/tree.h"
#include "core/verify/shard_distributions.h"
#include "cuda/backend.h"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

// Expensive items get smaller CTAs, to use more SMs.
constexpr int threads_for(int64_t grain) { return static_cast<int>(clamp_to<int64_t>(grain, 32, 128)); }

#define PT_KERNEL(op, Params, rule, grain)                                                                 \
  __global__ void __launch_bounds__(threads_for(grain), 1) op##_kernel(const __grid_constant__ Params p) { \
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;                                      \
    if (i < num_items(p)) rule(p, i);                                                                      \
  }
PT_EACH_RULE(PT_KERNEL)

}  // namespace

#define PT_HOST(op, Params, rule, grain)                                                                        \
  void CudaBackend::op(const Params& p, const ExecContext& ctx) const {                                         \
    launch(op##_kernel, grid_of(num_items(p), threads_for(grain)), dim3(threads_for(grain)), 0, ctx.stream, p); \
  }
PT_EACH_RULE(PT_HOST)

}  // namespace pagedtree::cuda
