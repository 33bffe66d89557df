#include "core/drafting.h"
#include "cuda/backend.h"
#include "cuda/drafting/draw_children.cuh"
#include "cuda/drafting/packing.cuh"
#include "cuda/drafting/top_tokens.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kTreeThreads = 256;
constexpr int kDrawThreads = 384;  // to draw from a row, which needs more registers

// ---- expand_tree

struct TopShared {
  BestShared best;
  SumShared sum;
};

__device__ __forceinline__ void clear_children(const ExpandTreeParams& p, int64_t row, int64_t children) {
  for (int32_t k = threadIdx.x; k < p.num_children; k += blockDim.x) {
    p.out_tokens[children + k] = -1;
    p.out_scores[children + k] = -kInfinity;
  }
  if (p.law == GrowthLaw::kTopK) return;
  for (int64_t x = threadIdx.x; x < p.logits.vocab; x += blockDim.x) p.draft_probs[row * p.logits.vocab + x] = 0.0f;
}

// For law "topk": one CTA per frontier node.
template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, 1) expand_top_kernel(const __grid_constant__ ExpandTreeParams p) {
  auto& shared = ptx::shared<TopShared>();
  const int64_t row = blockIdx.x, b = row / p.num_expanded, f = row % p.num_expanded;
  const int64_t children = first_child_of(p, b, f);
  const float parent = frontier_score(p, b, f);
  if (!is_present(parent)) return clear_children(p, row, children);
  const LogitReader<kDType> reader(logit_row(p.logits, row));
  const int32_t size = top_tokens(reader, p.num_children, shared.best);
  const float best = size > 0 ? ranked_value(shared.best.best[0]) : 0.0f;
  const double log_sum = size > 0 ? log(sum_exp(reader, best, shared.sum)) : 0.0;
  for (int32_t k = threadIdx.x; k < p.num_children; k += blockDim.x) {
    const uint64_t rank = shared.best.best[k];
    const float score = k < size ? child_score(parent, ranked_value(rank), best, log_sum) : -kInfinity;
    p.out_scores[children + k] = score;
    p.out_tokens[children + k] = is_present(score) ? ranked_id(rank) : -1;
  }
}

// For laws "iid", "swor" and "coupled".
template <DType kDType>
__global__ void __launch_bounds__(kDrawThreads, 1) expand_drawn_kernel(const __grid_constant__ ExpandTreeParams p) {
  const int64_t row = blockIdx.x, b = row / p.num_expanded, f = row % p.num_expanded;
  const int64_t children = first_child_of(p, b, f);
  const float parent = frontier_score(p, b, f);
  if (!is_present(parent)) return clear_children(p, row, children);
  const ChildrenDraw draw{.law = p.law,
                          .count = p.num_children,
                          .seed = static_cast<uint64_t>(p.seeds[b]),
                          .position = static_cast<int64_t>(static_cast<uint64_t>(p.positions[b]) + p.level),
                          .use = use_of_children(p.law, f),
                          .tokens = p.out_tokens + children,
                          .scores = p.out_scores + children,
                          .probs = p.draft_probs + row * p.logits.vocab};
  draw_children<kDType>(logit_row(p.logits, row), sampling_of(p.sampling, b), draw, ptx::shared<ChildrenShared>());
  for (int32_t k = threadIdx.x; k < p.num_children; k += blockDim.x) {  // each thread's own scores
    if (!is_present(draw.scores[k])) continue;
    draw.scores[k] = child_score(parent, draw.scores[k], 0.0, 0.0);
    if (!is_present(draw.scores[k])) draw.tokens[k] = -1;
  }
}

// Writes the next state after the children's tokens and scores are known: one CTA per sequence.
__global__ void __launch_bounds__(kTreeThreads, 1) grow_kernel(const __grid_constant__ ExpandTreeParams p) {
  auto& shared = ptx::shared<BestShared>();
  const int64_t b = blockIdx.x;
  const int32_t first = static_cast<int32_t>(p.num_candidates), count = p.num_expanded * p.num_children;
  for (int64_t c = threadIdx.x; c < p.num_candidates; c += blockDim.x) copy_candidate(p, b, c);
  for (int32_t i = threadIdx.x; i < count; i += blockDim.x) link_child(p, b, i);
  if (p.law == GrowthLaw::kTopK && p.num_frontier > 0) {
    const ScoreItems items{p.out_scores + first_child_of(p, b, 0), count, true};
    list_best(shared, items, items.kDigits, p.num_frontier);
  }
  __syncthreads();
  if (threadIdx.x == 0) {  // in order: a bad frontier may name a candidate twice
    for (int32_t f = 0; f < p.num_expanded; ++f) enter_frontier(p, b, f);
  }
  for (int32_t g = threadIdx.x; g < p.num_frontier; g += blockDim.x) {
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

// The chosen candidates are numbered in their order, so that parents come first.
__global__ void __launch_bounds__(kTreeThreads, 1) rerank_kernel(const __grid_constant__ RerankTreeParams p) {
  auto& shared = ptx::shared<RadixShared>();
  const int64_t b = blockIdx.x;
  const int32_t count = p.cu_nodes[b + 1] - p.cu_nodes[b];
  if (count == 0) return;
  const ScoreItems items{p.scores + b * p.num_candidates, eligible_end(p, b), false};
  const Selection chosen =
      p.by_score ? select_best(shared, items, items.kDigits, static_cast<uint64_t>(count)) : Selection{0, 0};
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
  const dim3 rows(static_cast<unsigned>(p.batch * p.num_expanded));
  with_logit_dtype(p.logits.dtype, [&](auto dtype) {
    if (p.law == GrowthLaw::kTopK) {
      launch(expand_top_kernel<dtype>, rows, dim3(threads_of_row(p.logits.vocab)), sizeof(TopShared), ctx.stream, p);
    } else {
      launch(expand_drawn_kernel<dtype>, rows, dim3(threads_of_row(p.logits.vocab, kDrawThreads)),
             sizeof(ChildrenShared), ctx.stream, p);
    }
  });
  launch(grow_kernel, dim3(static_cast<unsigned>(p.batch)), dim3(kTreeThreads), sizeof(BestShared), ctx.stream, p);
}

void CudaBackend::rerank_tree(const RerankTreeParams& p, const ExecContext& ctx) const {
  const dim3 sequences(static_cast<unsigned>(p.batch)), threads(kTreeThreads);
  launch(count_kernel, sequences, threads, sizeof(BlockShared), ctx.stream, p);
  pack_trees({p.cu_nodes, p.draft_tokens, p.out_parents, p.node_map, p.batch, p.batch * p.num_nodes}, ctx);
  launch(rerank_kernel, sequences, threads, sizeof(RadixShared), ctx.stream, p);
}

}  // namespace pagedtree::cuda
