// expand_tree, law "topk": a node's children are its row's best tokens.
#pragma once

#include "core/drafting.h"
#include "cuda/logits/top_tokens.cuh"

namespace pagedtree::cuda {

struct ExpandShared {
  TopShared top;
  SumShared sum;
};
static_assert(sizeof(ExpandShared) <= 99 << 10);  // all GPUs from sm_80

__device__ __forceinline__ void clear_children(const ExpandTreeParams& p, int64_t row, int64_t children) {
  const int64_t thread = ptx::cluster_rank() * blockDim.x + threadIdx.x, threads = ptx::cluster_size() * blockDim.x;
#pragma unroll 1
  for (int64_t k = thread; k < p.num_children; k += threads) {
    p.out_tokens[children + k] = -1;
    p.out_scores[children + k] = -kInfinity;
  }
  if (p.law == GrowthLaw::kTopK) return;
#pragma unroll 1
  for (int64_t x = thread; x < p.logits.vocab; x += threads) p.draft_probs[row * p.logits.vocab + x] = 0.0f;
}

// `row` is row cluster_index() of the logits.
template <typename Row>
__device__ __forceinline__ void expand_top(const ExpandTreeParams& p, Row& row, ExpandShared& shared) {
  auto& [top, sum] = shared;
  const uint32_t index = ptx::cluster_index(), width = static_cast<uint32_t>(p.num_expanded);
  const int64_t b = index / width, f = index % width, children = first_child_of(p, b, f);
  const float parent = frontier_score(p, b, f);
  const bool is_first = ptx::cluster_rank() == 0;
  const uint32_t bound = find_peak(row, p.num_children, top);
  if (!is_present(parent)) {  // late, so that the row's loads need not wait
    ptx::meet_cluster();      // no CTA may exit while others write to it
    return clear_children(p, index, children);
  }
  const float peak = ranked_value(top.best[0]);
  if (peak > -kInfinity) sum_exp_of_blocks(row, peak, static_cast<int>(p.logits.vocab), sum);
  const int32_t size = list_best(RowItems<Row>{row}, bound, p.num_children, top);
  if (!is_first) return;
  if (threadIdx.x == 0) sum.log_sum = size > 0 ? log(sum_of_blocks(sum, p.logits.vocab)) : 0.0;
  __syncthreads();
  for (int32_t k = threadIdx.x; k < p.num_children; k += blockDim.x) {
    const uint64_t rank = top.best[k];
    const float score = k < size ? child_score(parent, ranked_value(rank), peak, sum.log_sum) : -kInfinity;
    p.out_scores[children + k] = score;
    p.out_tokens[children + k] = is_present(score) ? ranked_id(rank) : -1;
  }
}

}  // namespace pagedtree::cuda
