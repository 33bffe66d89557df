// Walks over rows on chip, one cluster per tree. The first child's row is prefetched while its parent's is processed.
#include "core/verify/rules.h"
#include "cuda/logits/draws_sm90.cuh"
#include "cuda/logits/on_chip.h"
#include "cuda/verify/near_tree.cuh"

namespace pagedtree::cuda {
namespace {

struct WalkOnChip {
  DrawShared draw;
  NearTree tree;
  alignas(kWordBytes) uint4 words[1];  // row buffers; then ChipDraw's
};

// A node's children, listed by the lanes of each warp while its row is in flight.
struct Children {
  const int32_t first;
  int32_t rest, own = -1, own_token = -1;  // `rest`: first child past the lanes
  int32_t status;                          // the walk's, if it follows the list to there

  __device__ __forceinline__ explicit Children(TreeWalk& walk) : first(walk.first_child()), rest(first) {
    const int32_t before = walk.status;
#pragma unroll 1
    for (uint32_t i = 0; rest >= 0 && i < 32; ++i) {
      if (threadIdx.x % 32 == i) {
        own = rest;
        own_token = walk.token_of(rest);
      }
      rest = walk.next_sibling(rest);
    }
    status = walk.status;
    walk.status = before;
  }
  // TreeWalk::child_with() on the list.
  __device__ __forceinline__ int32_t with(int32_t token, TreeWalk& walk) {
    const uint32_t hits = __ballot_sync(~0u, own >= 0 && own_token == token);
    if (hits != 0) return __shfl_sync(~0u, own, __ffs(static_cast<int>(hits)) - 1);
    walk.status |= status;
    while (rest >= 0 && walk.token_of(rest) != token) rest = walk.next_sibling(rest);
    return rest;
  }
};

template <DType kDType, bool kSampled>
__global__ void __launch_bounds__(kRowThreads, kChipCtas)
    walk_sm90_kernel(const __grid_constant__ VerifyParams p, int buffers) {
  auto& shared = ptx::shared<WalkOnChip>();
  TreeWalk walk(p, static_cast<int64_t>(ptx::cluster_index()));
  LogitsSlice<kDType> slice(shared.draw.slice, shared.words, p.logits.vocab);
  slice.begin(buffers);
  ChipDraw<kDType, kSampled> draw(slice, shared.draw, slice.words(buffers), sampling_of(p.sampling, walk.b),
                                  kSampled ? static_cast<uint64_t>(p.seeds[walk.b]) : 0,
                                  static_cast<int32_t>(p.logits.vocab));
  int at = 0;
  bool more = walk.num_nodes > 0;
  if (more) slice.copy(logit_row(p.logits, walk.row()), at);
  begin_near(walk, shared.tree);
#pragma unroll 1
  while (more) {
    Children children(walk);
    const bool sends_ahead = buffers > 1 && children.first >= 0;
    if (sends_ahead) slice.copy(logit_row(p.logits, walk.rows.begin + children.first), 1 - at);
    bool bad = false;
    const int32_t token = draw.token(p.logits, walk.row(), at,
                                     draw.greedy() ? 0 : position_at(root_position_of(p, walk.b), walk.depth), bad);
    if (token == draw.kTooMany) {
      walk.status = kLeftToOthers;
      break;
    }
    if (bad) walk.status |= kBadRow;
    if (leads_cluster()) walk.emit(token);
    const int32_t child = children.with(token, walk);
    more = walk.descend(child);
    if (sends_ahead && child == children.first) {
      at = 1 - at;
    } else if (more) {
      slice.copy(logit_row(p.logits, walk.row()), at);
    }
  }
  for (int i = 0; i < 2; ++i) slice.wait(i);  // no copies or stores may arrive after a CTA's exit
  if (leads_cluster()) walk.finish();
  ptx::meet_cluster();
}

}  // namespace

bool walk_on_chip(const VerifyParams& p, const ExecContext& ctx) {
  if (!may_be_on_chip(p.logits, p.options)) return false;
  return with_logit_dtype(p.logits.dtype, [&](auto dtype) {
    const bool sampled = p.sampling.temperature != nullptr;
    return launch_on_chip<dtype, WalkOnChip>(sampled ? walk_sm90_kernel<dtype, true> : walk_sm90_kernel<dtype, false>,
                                             p.batch, p.logits, 2, p, ctx,
                                             sampled ? ChipDraw<dtype, true>::bytes : ChipDraw<dtype, false>::bytes);
  });
}

}  // namespace pagedtree::cuda
