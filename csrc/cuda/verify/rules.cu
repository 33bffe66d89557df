// Rules of core/verify that compare the target's and the draft's distributions.
#include "cuda/backend.h"
#include "cuda/tile/launch.cuh"
#include "cuda/verify/kept_rows.cuh"

namespace pagedtree::cuda {
namespace {

// A cluster per tree or node, on lists of kept tokens. Trees with other rows are left to rules_kernel.
template <DType kDType, Rule kRule>
__global__ void __launch_bounds__(kRulesThreads, kRowCtas) kept_kernel(const __grid_constant__ RatioParams p) {
  walk_kept<kRule, RowInMemory<kDType>>(p);
}

// Walks listed chains, one CTA each: a warp sums 32 blocks of tokens.
constexpr int kChainThreads = 128;
__global__ void __launch_bounds__(kChainThreads) chains_kernel(const __grid_constant__ RatioParams p) {
  ptx::wait_for_kernels_before();
  ListedRows rows(p, ptx::shared<KeptShared>());
  walk_block(p, blockIdx.x, rows);
}

// On whole rows, a cluster per tree: all trees, or those left over.
template <Rule kRule>
__global__ void __launch_bounds__(kRulesThreads, kRowCtas)
    rules_kernel(const __grid_constant__ RatioParams p, int64_t first, bool all) {
  const int64_t b = first + ptx::cluster_index();
  const bool walks = all || p.verify.status[b] == kLeftToOthers;
  ptx::meet_cluster();
  if (walks) walk_by<kRule>(p, b, Rows(p, ptx::shared<RulesShared>()));
}

template <Rule kRule>
void walk_trees(const RatioParams& p, const ExecContext& ctx) {
  const int64_t vocab = p.verify.logits.vocab;
  // A draft's logits share the code of its list.
  const bool by_lists = !p.verify.options.used &&
                        (p.draft_sampling.temperature == nullptr || p.draft.dtype == p.verify.logits.dtype) &&
                        (!kListsNodes<kRule> || p.nodes != nullptr);
  if (by_lists && !rules_on_chip<kRule>(p, ctx)) {
    with_logit_dtype(p.verify.logits.dtype, [&](auto dtype) {
      launch_rows(kept_kernel<dtype, kRule>, count_kept<kRule>(p), vocab, kRulesThreads, sizeof(KeptShared), ctx.stream,
                  p);
    });
  }
  if (by_lists && kListsNodes<kRule>) {
    launch_behind(chains_kernel, dim3(static_cast<unsigned>(p.verify.batch)), dim3(kChainThreads), sizeof(KeptShared),
                  ctx.stream, p);
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
