#include "core/drafting.h"
#include "cuda/backend.h"
#include "cuda/drafting/draw_children.cuh"
#include "cuda/drafting/expand_top.cuh"
#include "cuda/drafting/packing.cuh"
#include "cuda/logits/on_chip.h"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kTreeThreads = 256;

// ---- expand_tree

// Law "topk": one cluster per frontier node.
template <DType kDType>
__global__ void __launch_bounds__(kTopThreads, kTopCtas) expand_top_kernel(const __grid_constant__ ExpandTreeParams p) {
  LogitReader<kDType> row(logit_row(p.logits, ptx::cluster_index()));
  expand_top(p, row, ptx::shared<ExpandShared>());
}

// Laws "iid", "swor", and "coupled".
template <DType kDType, bool kIndependent>
__global__ void __launch_bounds__(kTopThreads, 2) expand_drawn_kernel(const __grid_constant__ ExpandTreeParams p) {
  const uint32_t row = ptx::cluster_index(), width = static_cast<uint32_t>(p.num_expanded);
  const int64_t b = row / width, f = row % width, children = first_child_of(p, b, f);
  const float parent = frontier_score(p, b, f);
  if (!is_present(parent)) return clear_children(p, row, children);
  const ChildrenDraw draw{.law = p.law,
                          .count = p.num_children,
                          .seed = static_cast<uint64_t>(p.seeds[b]),
                          .position = static_cast<int64_t>(static_cast<uint64_t>(integer_at(p.positions, b)) + p.level),
                          .use = use_of_children(p.law, f),
                          .tokens = p.out_tokens + children,
                          .scores = p.out_scores + children,
                          .probs = p.draft_probs + int64_t{row} * p.logits.vocab};
  draw_children<kDType, kIndependent>(logit_row(p.logits, row), sampling_of(p.sampling, b), draw, parent,
                                      ptx::shared<ChildrenShared>());
}

struct GrowShared {
  BlockShared block;
  uint64_t best[kMaxTreeNodes];
  uint64_t children[kTreeThreads];
};

// Records the frontier nodes' places. Starts at the last thread, as the first ones rank children.
__device__ __forceinline__ void enter_frontiers(const ExpandTreeParams& p, int64_t b) {
  const int32_t* const frontier = p.frontier + b * p.num_expanded;
  for (int32_t f = kTreeThreads - 1 - static_cast<int32_t>(threadIdx.x); f < p.num_expanded; f += kTreeThreads) {
    bool is_last = true;  // a bad frontier may name a candidate twice: the last counts
    for (int32_t later = f + 1; later < p.num_expanded; ++later) is_last &= frontier[later] != frontier[f];
    if (is_last) enter_frontier(p, b, f);
  }
}

// Writes the next state from the children's tokens and scores: one CTA per sequence.
__global__ void __launch_bounds__(kTreeThreads, 1) grow_kernel(const __grid_constant__ ExpandTreeParams p) {
  auto& shared = ptx::shared<GrowShared>();
  ptx::wait_for_kernels_before();
  const int64_t b = blockIdx.x;
  const int32_t first = static_cast<int32_t>(p.num_candidates), count = p.num_expanded * p.num_children;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  const float* const scores = p.out_scores + first_child_of(p, b, 0);
  const bool ranks = p.law == GrowthLaw::kTopK && p.num_frontier > 0;
  const auto rank_of = [&](int32_t i) { return ranked(is_present(scores[i]) ? scores[i] : -kInfinity, i); };
  shared.children[thread] = ranks && thread < count ? rank_of(thread) : 0;
  for (int64_t c = thread; c < p.num_candidates; c += kTreeThreads) copy_candidate(p, b, c);
  for (int32_t i = thread; i < count; i += kTreeThreads) link_child(p, b, i);
  __syncthreads();
  if (ranks && count <= kTreeThreads) {
    sort_few(shared.children, count, p.num_frontier, shared.best);
  } else if (ranks) {
    list_by_rounds(p.num_frontier, shared.block, shared.best, [&](uint64_t end, uint64_t best) {
      for (int32_t i = thread; i < count; i += kTreeThreads) best = max_of(best, rank_of(i) < end ? rank_of(i) : 0);
      return best;
    });
  }
  enter_frontiers(p, b);
  __syncthreads();
  for (int32_t g = thread; g < p.num_frontier; g += kTreeThreads) {
    p.out_frontier[b * p.num_frontier + g] =
        p.law == GrowthLaw::kTopK ? first + static_cast<int32_t>(ranked_id(shared.best[g])) : drawn_frontier(p, g);
    mask_frontier(p, b, g);
  }
}

// ---- rerank_tree

__global__ void __launch_bounds__(kTreeThreads, 1) count_kernel(const __grid_constant__ RerankTreeParams p) {
  const int64_t b = blockIdx.x, end = eligible_end(p, b);
  uint64_t count = 0;
  for (int64_t c = threadIdx.x; c < end; c += blockDim.x) count += is_present(p.scores[b * p.num_candidates + c]);
  count = block_sum(ptx::shared<BlockShared>(), count);
  if (threadIdx.x == 0)
    p.cu_nodes[b + 1] = static_cast<int32_t>(min_of<int64_t>(static_cast<int64_t>(count), p.num_nodes));
}

struct ScoreItems {
  const float* scores;
  int64_t count;

  __device__ int64_t size() const { return count; }
  __device__ uint32_t key(int64_t i) const {  // -0 ties with +0
    return is_present(scores[i]) ? order_key<ScalarMath>(scores[i] + 0.0f) : 0;
  }
  template <typename F>
  __device__ __forceinline__ void each(uint32_t /*least*/, F f) const {
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
      const uint32_t of_item = key(i);
      if (of_item != 0) f(of_item, i);
    }
  }
};

// Numbers selected candidates in order, so that parents precede children.
__global__ void __launch_bounds__(kTreeThreads, 1) rerank_kernel(const __grid_constant__ RerankTreeParams p) {
  auto& shared = ptx::shared<RadixShared>();
  ptx::wait_for_kernels_before();
  const int64_t b = blockIdx.x;
  const int32_t count = p.cu_nodes[b + 1] - p.cu_nodes[b];
  if (count == 0) return;
  const ScoreItems items{p.scores + b * p.num_candidates, eligible_end(p, b)};
  const Selection chosen =
      p.by_score ? select_best(shared, items, kKeyDigits, static_cast<uint64_t>(count)) : Selection{0, 0};
  int32_t* node_of = p.node_of + b * p.num_candidates;
  int32_t nodes = 0;
  for (int64_t first = 0; first < p.num_candidates; first += blockDim.x) {
    const int64_t c = first + threadIdx.x;
    const uint32_t key = c < items.count ? items.key(c) : 0;
    const bool has = key != 0 && chosen.has(key, c);
    int32_t total;
    const int32_t node = nodes + rank_in_block(shared.block, has, total);
    if (c < p.num_candidates) node_of[c] = has && node < count ? node : -1;
    nodes += total;
  }
  __syncthreads();
  for (int64_t c = threadIdx.x; c < p.num_candidates; c += blockDim.x) {
    if (node_of[c] >= 0) write_reranked(p, b, static_cast<int32_t>(c), node_of[c]);
  }
}

}  // namespace

void CudaBackend::expand_tree(const ExpandTreeParams& p, const ExecContext& ctx) const {
  const int64_t rows = p.batch * p.num_expanded, vocab = p.logits.vocab;
  const bool expanded = expand_on_chip(p, ctx);
  with_logit_dtype(p.logits.dtype, [&](auto dtype) {
    if (expanded) return;
    if (p.law == GrowthLaw::kTopK) {
      launch_top(expand_top_kernel<dtype>, rows, vocab, sizeof(ExpandShared), ctx.stream, p);
    } else {
      const auto kernel =
          p.law == GrowthLaw::kIid ? expand_drawn_kernel<dtype, true> : expand_drawn_kernel<dtype, false>;
      launch_top(kernel, rows, vocab, sizeof(ChildrenShared), ctx.stream, p);
    }
  });
  launch_behind(grow_kernel, dim3(static_cast<unsigned>(p.batch)), dim3(kTreeThreads), sizeof(GrowShared), ctx.stream,
                p);
}

void CudaBackend::rerank_tree(const RerankTreeParams& p, const ExecContext& ctx) const {
  const dim3 sequences(static_cast<unsigned>(p.batch)), threads(kTreeThreads);
  launch(count_kernel, sequences, threads, sizeof(BlockShared), ctx.stream, p);
  pack_trees({p.cu_nodes, p.draft_tokens, p.out_parents, p.node_map, p.batch, p.batch * p.num_nodes}, ctx);
  launch_behind(rerank_kernel, sequences, threads, sizeof(RadixShared), ctx.stream, p);
}

}  // namespace pagedtree::cuda
