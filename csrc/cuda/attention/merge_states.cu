#include "core/attention.h"
#include "cuda/backend.h"
#include "cuda/tile/element.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = kThreads / 32;  // per CTA, one warp each

// out = sum of exp(lse_i - lse) out_i, lse = log of sum of exp(lse_i). A side with weight 0 is not read: it may be NaN.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeStatesParams p) {
  struct alignas(kCount * sizeof(T)) Vector {
    T values[kCount];
  };
  const int64_t row = int64_t{blockIdx.x} * kRows + threadIdx.x / 32;
  if (row >= p.num_tokens * p.num_heads) return;
  const int64_t token = row / p.num_heads, head = row % p.num_heads, lane = threadIdx.x % 32;
  const float lse_a = p.lse_a[token * p.lse_a_token_stride + head * p.lse_a_head_stride];
  const float lse_b = p.lse_b[token * p.lse_b_token_stride + head * p.lse_b_head_stride];
  const float top = fmaxf(lse_a, lse_b), none = -__builtin_inff();
  const float weight_a = lse_a == none ? 0.0f : expf(lse_a - top), weight_b = lse_b == none ? 0.0f : expf(lse_b - top);
  const float sum = weight_a + weight_b;
  if (lane == 0) p.lse[row] = sum == 0.0f ? none : top + logf(sum);
  const float factors[2] = {sum == 0.0f ? 0.0f : weight_a / sum, sum == 0.0f ? 0.0f : weight_b / sum};
  const T* sides[2] = {static_cast<const T*>(p.out_a) + token * p.a_token_stride + head * p.a_head_stride,
                       static_cast<const T*>(p.out_b) + token * p.b_token_stride + head * p.b_head_stride};
  T* out = static_cast<T*>(p.out) + row * p.head_dim;
  for (int64_t d = lane * kCount; d < p.head_dim; d += 32 * kCount) {
    float merged[kCount] = {};
    for (int side = 0; side < 2; ++side) {
      if (factors[side] == 0.0f) continue;
      const Vector vector = *reinterpret_cast<const Vector*>(sides[side] + d);
#pragma unroll
      for (int i = 0; i < kCount; ++i) merged[i] += to_float(vector.values[i]) * factors[side];
    }
    Vector vector;
#pragma unroll
    for (int i = 0; i < kCount; ++i) vector.values[i] = from_float<T>(merged[i]);
    *reinterpret_cast<Vector*>(out + d) = vector;
  }
}

template <typename T>
void launch_merge(const MergeStatesParams& p, const ExecContext& ctx) {
  constexpr int64_t kCount = 16 / sizeof(T);
  bool aligned = p.head_dim % kCount == 0;
  for (const void* rows : {p.out_a, p.out_b, static_cast<const void*>(p.out)}) {
    aligned = aligned && reinterpret_cast<uintptr_t>(rows) % 16 == 0;
  }
  for (const int64_t stride : {p.a_token_stride, p.a_head_stride, p.b_token_stride, p.b_head_stride}) {
    aligned = aligned && stride % kCount == 0;
  }
  const auto grid = static_cast<unsigned>(ceil_div<int64_t>(p.num_tokens * p.num_heads, kRows));
  launch(aligned ? merge_kernel<T, kCount> : merge_kernel<T, 1>, dim3(grid), dim3(kThreads), 0, ctx.stream, p);
}

}  // namespace

void CudaBackend::merge_states(const MergeStatesParams& p, const ExecContext& ctx) const {
  switch (p.dtype) {
    case DType::kFloat32:
      return launch_merge<float>(p, ctx);
    case DType::kFloat16:
      return launch_merge<__half>(p, ctx);
    case DType::kBFloat16:
      return launch_merge<__nv_bfloat16>(p, ctx);
    case DType::kFloat8E4M3:
      return;  // refused by the host
  }
}

}  // namespace pagedtree::cuda
