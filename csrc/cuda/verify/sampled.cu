#include <new>

#include "core/verify/tree_walk.h"
#include "cuda/backend.h"
#include "cuda/options.cuh"
#include "cuda/sampling.cuh"
#include "cuda/tile/launch.cuh"
#include "cuda/verify/kept_tokens.cuh"
#include "cuda/verify/near_tree.cuh"

namespace pagedtree::cuda {
namespace {

struct WalkShared {
  union {  // what a row is drawn with: of most rows that are filtered the list
    KeptList list;
    SamplingShared sampling;
  };
  NearTree tree;
  TreeWalk walk;  // no registers are left to keep it in
  bool more;
};
static_assert(sizeof(WalkShared) <= 99 << 10);  // what every GPU from sm_80 on gives

__device__ __forceinline__ uint64_t seed_of(const VerifyParams& p, int64_t b) {
  return p.seeds == nullptr ? 0 : static_cast<uint64_t>(p.seeds[b]);
}

template <DType kDType, bool kFilters>
__device__ __forceinline__ Draw draw_at(const VerifyParams& p, int64_t b, const LogitRow& row, int32_t depth,
                                        SamplingShared& shared) {
  const int64_t position = position_at(root_position_of(p, b), depth);
  return draw_token<kDType, kFilters>(row, sampling_of(p.sampling, b), seed_of(p, b), position, shared);
}

// The race among the tokens of a list.
__device__ __forceinline__ Draw draw_kept(const VerifyParams& p, int64_t b, int32_t depth, KeptList& list) {
  const int64_t position = position_at(root_position_of(p, b), depth);
  uint64_t best = 0;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < list.size; i += blockDim.x) {
    const uint32_t token = static_cast<uint32_t>(list.token(i));
    const NoiseGroup group(seed_of(p, b), position, RandomUse::kGumbel, token / kNoiseGroup);
    const float x = list.distributions.target.scale(list.logit(i));
    best = max_of(best, ranked(x + group.noise(token % kNoiseGroup), token));
  }
  return {ranked_id(block_max(list.block, best)), false};
}

// Draws every row's token before it is known which rows the walks visit: one cluster per row.
template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, kRowCtas) draw_rows_kernel(const __grid_constant__ VerifyParams p) {
  const int64_t row = ptx::cluster_index(), b = sequence_of_row(p.cu_nodes, p.batch, row);
  const int32_t depth = p.depths[row];
  ptx::meet_cluster();
  const bool visited = b >= 0 && depth >= 0;  // by a walk
  if (leads_cluster()) p.drawn_rows[row].sequence = visited ? static_cast<int32_t>(b) : -1;
  if (!visited) return;
  const Draw draw = draw_at<kDType, true>(p, b, logit_row(p.logits, row), depth, ptx::shared<SamplingShared>());
  if (!leads_cluster()) return;
  const int64_t at = ptx::cluster_index();  // row and depth again, so that no registers hold them meanwhile
  DrawnRow& drawn = p.drawn_rows[at];
  drawn.token = static_cast<int32_t>(draw.token);
  drawn.depth = p.depths[at];
  drawn.bad = draw.bad;
}

// The token of the row at which a walk stands. Under filters it is drawn from a list, if that is possible.
template <DType kDType>
__device__ __forceinline__ Draw draw_next(const VerifyParams& p, const TreeWalk& walk, bool drawn, WalkShared& shared) {
  if (drawn) {
    const DrawnRow& known = p.drawn_rows[walk.row()];
    if (known.sequence == walk.b && known.depth == walk.depth) return {known.token, known.bad};
  }
  prepare_row<kDType>(p.options, p.logits, walk.b, walk.row(), shared.list.block);
  const LogitRow row = row_of<kDType>(p.options, p.logits, walk.row());
  __syncthreads();
  if (threadIdx.x == 0) shared.list.distributions.target.row = row;
  if (p.sampling.temperature != nullptr && find_kept<kDType>(p.sampling, walk.b, false)) {
    return draw_kept(p, walk.b, walk.depth, shared.list);
  }
  return draw_at<kDType, false>(p, walk.b, row, walk.depth, shared.sampling);
}

template <DType kDType>
__device__ __forceinline__ void walk_tree(const VerifyParams& p, int64_t b, bool drawn, WalkShared& shared) {
  TreeWalk& walk = shared.walk;  // the first thread of each CTA leads
  if (threadIdx.x == 0) new (&walk) TreeWalk(p, b);
  __syncthreads();
  copy_tree(walk, shared.tree);
  if (threadIdx.x == 0) {
    walk.near = &shared.tree;
    shared.more = walk.num_nodes > 0;
  }
  ptx::meet_cluster();
  while (shared.more) {
    const Draw draw = draw_next<kDType>(p, walk, drawn, shared);
    __syncthreads();
    if (threadIdx.x == 0) {
      if (draw.bad) walk.status |= kBadRow;
      if (leads_cluster()) walk.emit(draw.token);
      shared.more = walk.descend(walk.child_with(draw.token));
    }
    __syncthreads();
  }
  if (leads_cluster()) walk.finish();
}

// One cluster per tree. Without `drawn`, only the rows on the path are read, one after the other.
template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, kRowCtas)
    walk_kernel(const __grid_constant__ VerifyParams p, bool drawn, int64_t first) {
  walk_tree<kDType>(p, first + ptx::cluster_index(), drawn, ptx::shared<WalkShared>());
}

struct KnownTokens {
  NearTree tree;
  int64_t tokens[kMaxTreeNodes], drafts[kMaxTreeNodes];
};

// One warp per tree.
__global__ void __launch_bounds__(32) tokens_kernel(const __grid_constant__ VerifyTokensParams p) {
  const VerifyParams& v = p.verify;
  auto& shared = ptx::shared<KnownTokens>();
  TreeWalk walk(v, blockIdx.x);
  copy_tree(walk, shared.tree);
  walk.near = &shared.tree;
#pragma unroll 1
  for (int32_t node = static_cast<int32_t>(threadIdx.x); node < walk.num_nodes; node += 32) {
    const int64_t row = walk.rows.begin + node;
    shared.tokens[node] = integer_at(p.target_tokens, row);
    shared.drafts[node] = draft_id_at(v.draft_tokens, v.draft_to_target, v.draft_vocab, row);
  }
  __syncwarp();
  if (threadIdx.x != 0) return;
  walk_tokens(
      walk, [&](int32_t node) { return shared.tokens[node]; }, [&](int32_t node) { return shared.drafts[node]; });
}

// A row of a walk, besides its reading, in the time in which one SM reads a row: measured, greedy and without filters.
// With filters a list takes less.
constexpr double kGreedyRow = 0.9, kSampledRow = 0.4;

// Whether all rows at once take no longer than a path's rows one after the other, if half of max_depth is accepted.
template <typename Kernel>
bool draws_all_rows(const VerifyParams& p, Kernel kernel) {
  const double of_row = p.sampling.temperature == nullptr ? kGreedyRow : kSampledRow;
  const auto rounds = [&](int64_t rows) {  // in which each SM reads a part of a row
    const int64_t ctas = ctas_of_row(kernel, rows, p.logits.vocab), sms = device_limits().num_sms;
    return static_cast<double>(ceil_div(rows * ctas, sms)) / static_cast<double>(ctas) + of_row;
  };
  const int64_t path = 1 + p.max_depth / 2;
  return !p.options.used && p.max_depth > 0 && rounds(p.logits.num_rows) <= rounds(p.batch) * static_cast<double>(path);
}

}  // namespace

void CudaBackend::verify_sampled(const VerifyParams& p, const ExecContext& ctx) const {
  const int64_t vocab = p.logits.vocab;
  with_logit_dtype(dtype_under(p.options, p.logits.dtype), [&](auto dtype) {
    const auto walk = walk_kernel<dtype>;
    if (draws_all_rows(p, walk)) {
      launch_rows(draw_rows_kernel<dtype>, p.logits.num_rows, vocab, kRowThreads, sizeof(SamplingShared), ctx.stream,
                  p);
      launch(walk, dim3(static_cast<unsigned>(p.batch)), dim3(32), sizeof(WalkShared), ctx.stream, p, true, int64_t{0});
    } else {
      in_turns(p.options, p.batch, [&](int64_t first, int64_t count) {
        launch_rows(walk, count, vocab, kRowThreads, sizeof(WalkShared), ctx.stream, p, false, first);
      });
    }
  });
}

void CudaBackend::verify_tokens(const VerifyTokensParams& p, const ExecContext& ctx) const {
  launch(tokens_kernel, dim3(static_cast<unsigned>(p.verify.batch)), dim3(32), sizeof(KnownTokens), ctx.stream, p);
}

}  // namespace pagedtree::cuda
