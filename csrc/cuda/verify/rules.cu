// The rules of core/verify that weigh the target's distribution against the draft's: one cluster per tree.
#include "core/verify/block.h"
#include "core/verify/rejection.h"
#include "core/verify/traversal.h"
#include "core/verify/typical.h"
#include "cuda/backend.h"
#include "cuda/tile/launch.cuh"
#include "cuda/verify/rules.cuh"

namespace pagedtree::cuda {
namespace {

using Walk = void (*)(const RatioParams&, int64_t b, Rows&);

template <Walk kWalk>
__global__ void __launch_bounds__(kRulesThreads, 1) walk_kernel(const __grid_constant__ RatioParams p) {
  ptx::cluster_sync();
  for (int64_t b = ptx::cluster_index(); b < p.verify.batch; b += num_clusters()) {
    Rows rows(p, ptx::shared<RulesShared>());
    kWalk(p, b, rows);
  }
}

template <Walk kWalk>
void walk_trees(const RatioParams& p, const ExecContext& ctx) {
  launch_rows(walk_kernel<kWalk>, clusters_for(p.verify.options, p.verify.batch), p.verify.logits.vocab, kRulesThreads,
              sizeof(RulesShared), ctx.stream, p);
}

}  // namespace

void CudaBackend::verify_rejection(const RatioParams& p, const ExecContext& ctx) const {
  walk_trees<walk_rejection<Rows>>(p, ctx);
}
void CudaBackend::verify_block(const RatioParams& p, const ExecContext& ctx) const {
  walk_trees<walk_block<Rows>>(p, ctx);
}
void CudaBackend::verify_typical(const RatioParams& p, const ExecContext& ctx) const {
  walk_trees<walk_typical<Rows>>(p, ctx);
}
void CudaBackend::verify_traversal(const RatioParams& p, const ExecContext& ctx) const {
  walk_trees<walk_traversal<Rows>>(p, ctx);
}

}  // namespace pagedtree::cuda
