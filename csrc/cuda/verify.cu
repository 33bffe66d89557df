#include "core/verify.h"
#include "cuda/kernels.h"
#include "cuda/sampling.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

// ---- sample

template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, 1) sample_kernel(const __grid_constant__ SampleParams p) {
  const int64_t r = blockIdx.x;
  const Draw draw = draw_token<kDType>(logit_row(p.logits, r), law_of(p.sampling, r), static_cast<uint64_t>(p.seeds[r]),
                                       p.positions[r], ptx::shared<SamplingShared>());
  if (threadIdx.x == 0) p.tokens[r] = draw.token;
}

// ---- verify

struct WalkShared {
  SamplingShared sampling;
  int32_t node;
  bool more;
};

template <DType kDType>
__device__ __forceinline__ Draw draw_at(const VerifyParams& p, int64_t b, int64_t row, int32_t depth,
                                        SamplingShared& shared) {
  const uint64_t seed = p.seeds == nullptr ? 0 : static_cast<uint64_t>(p.seeds[b]);
  const uint64_t position = p.positions == nullptr ? 0 : static_cast<uint64_t>(p.positions[b]);
  return draw_token<kDType>(logit_row(p.logits, row), law_of(p.sampling, b), seed,
                            static_cast<int64_t>(position + static_cast<uint64_t>(int64_t{depth})), shared);
}

// Every row's token, before anybody knows which rows the walks visit: a CTA a row.
template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, 1) draw_rows_kernel(const __grid_constant__ VerifyParams p) {
  const int64_t row = blockIdx.x, b = sequence_of_row(p.cu_nodes, p.batch, row);
  const int32_t depth = p.depths[row];
  if (b < 0 || depth < 0) {  // no walk comes here
    if (threadIdx.x == 0) p.drawn_rows[row].sequence = -1;
    return;
  }
  const Draw draw = draw_at<kDType>(p, b, row, depth, ptx::shared<SamplingShared>());
  if (threadIdx.x == 0) {
    p.drawn_rows[row] = {static_cast<int32_t>(draw.token), static_cast<int32_t>(b), depth, draw.bad};
  }
}

// A CTA a tree. Without `drawn`, only the rows on the path are read, one after the other.
template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, 1) walk_kernel(const __grid_constant__ VerifyParams p, bool drawn) {
  auto& shared = ptx::shared<WalkShared>();
  const int64_t b = blockIdx.x;
  TreeWalk walk(p, b);  // the first thread's; the others follow it
  if (threadIdx.x == 0) walk.begin();
  for (bool more = walk.num_nodes > 0; more;) {
    const DrawnRow* known = drawn ? p.drawn_rows + walk.row() : nullptr;
    const bool is_known = drawn && known->sequence == b && known->depth == walk.depth;
    const Draw draw =
        is_known ? Draw{known->token, known->bad} : draw_at<kDType>(p, b, walk.row(), walk.depth, shared.sampling);
    __syncthreads();
    if (threadIdx.x == 0) {
      if (draw.bad) walk.status |= kBadRow;
      walk.emit(draw.token);
      shared.more = walk.descend(walk.child_with(draw.token));
      shared.node = walk.node;
    }
    __syncthreads();
    more = shared.more;
    if (threadIdx.x > 0 && more) {
      walk.node = shared.node;
      ++walk.depth;
    }
  }
  if (threadIdx.x == 0) walk.finish();
}

// Whether all rows at once take no longer than the rows of a path one after the other, half of max_depth accepted.
bool draws_all_rows(const VerifyParams& p) {
  const int64_t at_once = device_limits().num_sms;
  const int64_t path = 1 + p.max_depth / 2;
  return p.max_depth > 0 && ceil_div(p.logits.num_rows, at_once) <= ceil_div(p.batch, at_once) * path;
}

}  // namespace

void sample(const SampleParams& p, const ExecContext& ctx) {
  with_logit_dtype(p.logits.dtype, [&](auto dtype) {
    launch(sample_kernel<dtype>, dim3(static_cast<unsigned>(p.logits.num_rows)), dim3(threads_of_row(p.logits.vocab)),
           sizeof(SamplingShared), ctx.stream, p);
  });
}

void verify_sampled(const VerifyParams& p, const ExecContext& ctx) {
  const dim3 row_threads(threads_of_row(p.logits.vocab));
  const bool all_rows = draws_all_rows(p);
  with_logit_dtype(p.logits.dtype, [&](auto dtype) {
    if (all_rows) {
      launch(draw_rows_kernel<dtype>, dim3(static_cast<unsigned>(p.logits.num_rows)), row_threads,
             sizeof(SamplingShared), ctx.stream, p);
    }
    launch(walk_kernel<dtype>, dim3(static_cast<unsigned>(p.batch)), all_rows ? dim3(32) : row_threads,
           sizeof(WalkShared), ctx.stream, p, all_rows);
  });
}

}  // namespace pagedtree::cuda
