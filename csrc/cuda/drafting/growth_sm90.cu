// expand_tree, law "topk", with rows on chip.
#include "cuda/drafting/expand_top.cuh"
#include "cuda/logits/draws_sm90.cuh"
#include "cuda/logits/on_chip.h"

namespace pagedtree::cuda {
namespace {

struct ExpandOnChip {
  SliceShared slice;
  ExpandShared expand;
  alignas(kWordBytes) uint4 words[1];  // of the row
};

template <DType kDType>
__global__ void __launch_bounds__(kTopThreads, kTopCtas)
    expand_sm90_kernel(const __grid_constant__ ExpandTreeParams p, int buffers) {
  auto& shared = ptx::shared<ExpandOnChip>();
  LogitsSlice<kDType> slice(shared.slice, shared.words, p.logits.vocab);
  slice.begin(buffers);
  slice.copy(logit_row(p.logits, ptx::cluster_index()), 0);
  expand_top(p, slice, shared.expand);
}

}  // namespace

bool expand_on_chip(const ExpandTreeParams& p, const ExecContext& ctx) {
  if (p.law != GrowthLaw::kTopK || !may_be_on_chip(p.logits, {})) return false;
  return with_logit_dtype(p.logits.dtype, [&](auto dtype) {
    return launch_on_chip<dtype, ExpandOnChip>(expand_sm90_kernel<dtype>, p.batch * p.num_expanded, p.logits, 1, p,
                                               ctx);
  });
}

}  // namespace pagedtree::cuda
