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
__global__ void __launch_bounds__(kRulesThreads, 1) walk_kernel(const __grid_constant__ RatioParams p, int64_t first) {
  ptx::cluster_sync();
  Rows rows(p, ptx::shared<RulesShared>());
  kWalk(p, first + ptx::cluster_index(), rows);
}

template <Walk kWalk>
void walk_trees(const RatioParams& p, const ExecContext& ctx) {
  in_turns(p.verify.options, p.verify.batch, [&](int64_t first, int64_t count) {
    launch_rows(walk_kernel<kWalk>, count, p.verify.logits.vocab, kRulesThreads, sizeof(RulesShared), ctx.stream, p,
                first);
  });
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
