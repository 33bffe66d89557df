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

enum class Rule : int32_t { kRejection, kBlock, kTypical };

// One kernel for these, because most of its code is that of Rows, which they share.
__global__ void __launch_bounds__(kRulesThreads, 1)
    walk_kernel(const __grid_constant__ RatioParams p, int64_t first, Rule rule) {
  ptx::cluster_sync();
  Rows rows(p, ptx::shared<RulesShared>());
  const int64_t b = first + ptx::cluster_index();
  switch (rule) {
    case Rule::kRejection:
      return walk_rejection(p, b, rows);
    case Rule::kBlock:
      return walk_block(p, b, rows);
    case Rule::kTypical:
      return walk_typical(p, b, rows);
  }
}

// The traversal's own state leaves no registers for the other rules.
__global__ void __launch_bounds__(kRulesThreads, 1)
    traversal_kernel(const __grid_constant__ RatioParams p, int64_t first) {
  ptx::cluster_sync();
  Rows rows(p, ptx::shared<RulesShared>());
  walk_traversal(p, first + ptx::cluster_index(), rows);
}

template <typename Kernel, typename... Arguments>
void walk_trees(Kernel kernel, const RatioParams& p, const ExecContext& ctx, Arguments... arguments) {
  in_turns(p.verify.options, p.verify.batch, [&](int64_t first, int64_t count) {
    launch_rows(kernel, count, p.verify.logits.vocab, kRulesThreads, sizeof(RulesShared), ctx.stream, p, first,
                arguments...);
  });
}

}  // namespace

void CudaBackend::verify_rejection(const RatioParams& p, const ExecContext& ctx) const {
  walk_trees(walk_kernel, p, ctx, Rule::kRejection);
}
void CudaBackend::verify_block(const RatioParams& p, const ExecContext& ctx) const {
  walk_trees(walk_kernel, p, ctx, Rule::kBlock);
}
void CudaBackend::verify_typical(const RatioParams& p, const ExecContext& ctx) const {
  walk_trees(walk_kernel, p, ctx, Rule::kTypical);
}
void CudaBackend::verify_traversal(const RatioParams& p, const ExecContext& ctx) const {
  walk_trees(traversal_kernel, p, ctx);
}

}  // namespace pagedtree::cuda
