#include <new>

#include "core/tree_walk.h"
#include "cuda/backend.h"
#include "cuda/logits/on_chip.h"
#include "cuda/logits/options.cuh"
#include "cuda/logits/sampling.cuh"
#include "cuda/tile/launch.cuh"
#include "cuda/verify/near_tree.cuh"

namespace pagedtree::cuda {
namespace {

struct WalkShared {
  SamplingShared sampling;
  NearTree tree;
  TreeWalk walk;  // in memory to save registers
  bool more;
};
static_assert(sizeof(WalkShared) <= 99 << 10);  // all GPUs from sm_80

__device__ __forceinline__ uint64_t seed_of(const VerifyParams& p, int64_t b) {
  return p.seeds == nullptr ? 0 : static_cast<uint64_t>(p.seeds[b]);
}

template <DType kDType>
__device__ __forceinline__ Draw draw_next(const VerifyParams& p, const TreeWalk& walk, SamplingShared& shared) {
  const LogitRow row = row_under<kDType>(p.options, p.logits, walk.b, walk.row(), shared.radix.block);
  const int64_t position = position_at(root_position_of(p, walk.b), walk.depth);
  return draw_token<kDType>(row, sampling_of(p.sampling, walk.b), seed_of(p, walk.b), position, shared);
}

template <DType kDType>
__device__ __forceinline__ void walk_tree(const VerifyParams& p, int64_t b, WalkShared& shared) {
  TreeWalk& walk = shared.walk;  // the first thread of each CTA updates it
  if (threadIdx.x == 0) new (&walk) TreeWalk(p, b);
  __syncthreads();
  copy_tree(walk, shared.tree);
  if (threadIdx.x == 0) {
    walk.near = &shared.tree;
    shared.more = walk.num_nodes > 0;
  }
  ptx::meet_cluster();
  while (shared.more) {
    const Draw draw = draw_next<kDType>(p, walk, shared.sampling);
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

// One cluster per tree: all trees, or those left over.
template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, kRowCtas)
    walk_kernel(const __grid_constant__ VerifyParams p, bool all, int64_t first) {
  const int64_t b = first + ptx::cluster_index();
  if (all || p.status[b] == kLeftToOthers) walk_tree<kDType>(p, b, ptx::shared<WalkShared>());
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

}  // namespace

void CudaBackend::verify_sampled(const VerifyParams& p, const ExecContext& ctx) const {
  const bool all = !walk_on_chip(p, ctx);
  if (!all && p.sampling.temperature == nullptr) return;
  with_logit_dtype(dtype_under(p.options, p.logits.dtype), [&](auto dtype) {
    in_turns(p.options, p.batch, [&](int64_t first, int64_t count) {
      launch_rows(walk_kernel<dtype>, count, p.logits.vocab, kRowThreads, sizeof(WalkShared), ctx.stream, p, all,
                  first);
    });
  });
}

void CudaBackend::verify_tokens(const VerifyTokensParams& p, const ExecContext& ctx) const {
  launch(tokens_kernel, dim3(static_cast<unsigned>(p.verify.batch)), dim3(32), sizeof(KnownTokens), ctx.stream, p);
}

}  // namespace pagedtree::cuda
