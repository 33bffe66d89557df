// The rules of core/verify that weigh the target's distribution against the draft's: one cluster per tree.
#define PT_WITH_WALKS
#include "core/verify/table.h"
#include "cuda/backend.h"
#include "cuda/tile/launch.cuh"
#include "cuda/verify/kept_rows.cuh"

namespace pagedtree::cuda {
namespace {

#define PT_RULE(op, Params, Name, ...) k##Name,
enum class Rule : int32_t { PT_EACH_WALK(PT_RULE, PT_RULE) };

template <Rule kRule, typename Rows>
__device__ __forceinline__ void walk_by(const RatioParams& p, int64_t b, Rows rows) {
#define PT_WALK(op, Params, Name, walk, ...) \
  if constexpr (kRule == Rule::k##Name) walk(p, b, rows);
  PT_EACH_WALK(PT_WALK, PT_WALK)
}

// Over lists of kept tokens. A tree that has another row is left to the kernels below.
template <DType kDType, Rule kRule>
__global__ void __launch_bounds__(kRowThreads, kRowCtas) kept_kernel(const __grid_constant__ RatioParams p) {
  walk_by<kRule>(p, ptx::cluster_index(), KeptRows<kDType, kRule != Rule::kBlock>(p, ptx::shared<KeptShared>()));
}

// Over whole rows: all trees, or those that are left.
template <Rule kRule>
__global__ void __launch_bounds__(kRulesThreads, kRowCtas)
    rules_kernel(const __grid_constant__ RatioParams p, int64_t first, bool all) {
  const int64_t b = first + ptx::cluster_index();
  const bool walks = all || p.verify.status[b] == kLeftToOthers;
  ptx::meet_cluster();
  if (walks) walk_by<kRule>(p, b, Rows(p, ptx::shared<RulesShared>()));
}

// Whether rules may work on lists. One of drafts' logits is found by the same code.
bool lists_suffice(const RatioParams& p) {
  return sizeof(KeptShared) <= static_cast<size_t>(device_limits().max_shared_bytes) && !p.verify.options.used &&
         (p.draft_sampling.temperature == nullptr || p.draft.dtype == p.verify.logits.dtype);
}

template <Rule kRule>
void walk_trees(const RatioParams& p, const ExecContext& ctx) {
  const int64_t vocab = p.verify.logits.vocab;
  const bool by_lists = lists_suffice(p);
  if (by_lists) {
    with_logit_dtype(p.verify.logits.dtype, [&](auto dtype) {
      launch_rows(kept_kernel<dtype, kRule>, p.verify.batch, vocab, kRowThreads, sizeof(KeptShared), ctx.stream, p);
    });
  }
  in_turns(p.verify.options, p.verify.batch, [&](int64_t first, int64_t count) {
    launch_rows(rules_kernel<kRule>, count, vocab, kRulesThreads, sizeof(RulesShared), ctx.stream, p, first, !by_lists);
  });
}

}  // namespace

#define PT_HOST(op, Params, Name, ...) \
  void CudaBackend::op(const Params& p, const ExecContext& ctx) const { walk_trees<Rule::k##Name>(p, ctx); }
PT_EACH_WALK(PT_HOST, PT_HOST)

}  // namespace pagedtree::cuda
