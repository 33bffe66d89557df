// Short convolution along the paths of trees (core/recurrent.h). One thread per row and channel.
#include "cuda/backend.h"
#include "cuda/recurrent/elements.cuh"
#include "cuda/recurrent/paths.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kConvThreads = 128;

__device__ __forceinline__ bool is_reachable(const RecurrentBatch& p, int64_t begin, int64_t node) {
  if (p.parents == nullptr) return true;
  while (node >= 0) node = linked_parent(p, begin, node);
  return node == -1;
}

__global__ void __launch_bounds__(kConvThreads, 1) conv1d_kernel(const __grid_constant__ ConvParams p) {
  const RecurrentBatch& tokens = p.tokens;
  const int64_t row = blockIdx.x, channel = int64_t{blockIdx.y} * kConvThreads + threadIdx.x;
  if (channel >= p.channels) return;
  const int64_t b = sequence_of_row(tokens.cu_nodes, tokens.batch, row);
  const int64_t begin = b < 0 ? 0 : node_range(tokens.cu_nodes, tokens.batch, b, tokens.num_rows).begin;
  const int64_t at = row * p.channels + channel;
  if (b < 0 || !is_reachable(tokens, begin, row - begin)) return store_element(p.out, p.dtype, at, 0.0f);
  const int64_t state_index = state_index_of(tokens, b);
  const int64_t state = state_index * p.state_strides[0] + channel * p.state_strides[1];
  float sum = p.bias == nullptr ? 0.0f : load_element(p.bias, p.weight_dtype, channel * p.bias_stride);
  int64_t node = row - begin;
  int32_t column = p.width - 2;  // of the state, newest first
  for (int32_t w = 0; w < p.width; ++w) {
    float value = 0.0f;
    if (node >= 0) {
      value = load_element(p.x, p.dtype, (begin + node) * p.x_stride + channel);
      node = tokens.parents == nullptr ? node - 1 : linked_parent(tokens, begin, node);
    } else {
      if (state_index >= 0) value = load_element(p.conv_state, p.dtype, state + column * p.state_strides[2]);
      --column;
    }
    const int64_t tap = channel * p.weight_strides[0] + (p.width - 1 - w) * p.weight_strides[1];
    sum = __fmaf_rn(load_element(p.weight, p.weight_dtype, tap), value, sum);
  }
  if (p.silu) sum = sum / (exp_exact<ScalarMath>(min_of(-sum, 88.0f)) + 1.0f);
  store_element(p.out, p.dtype, at, sum);
}

// Shifts the path's inputs into the channel's last W - 1. In place: targets precede their sources.
template <typename T>
__global__ void __launch_bounds__(kConvThreads, 1) advance_conv_kernel(const __grid_constant__ ConvParams p) {
  const int64_t b = blockIdx.x, channel = int64_t{blockIdx.y} * kConvThreads + threadIdx.x;
  const int64_t replayed = replayed_tokens(p.tokens, b), kept = p.width - 1, step = p.state_strides[2];
  if (replayed == 0 || channel >= p.channels) return;
  T* state =
      static_cast<T*>(p.conv_state) + state_index_of(p.tokens, b) * p.state_strides[0] + channel * p.state_strides[1];
  for (int64_t i = 0; i < kept; ++i) {
    const int64_t from = i + replayed - kept;
    state[i * step] = from < 0 ? state[(i + replayed) * step]
                               : static_cast<const T*>(p.x)[replayed_row(p.tokens, b, from) * p.x_stride + channel];
  }
}

}  // namespace

void CudaBackend::tree_conv1d(const ConvParams& p, const ExecContext& ctx) const {
  const dim3 grid(static_cast<unsigned>(p.tokens.num_rows), grid_of(p.channels, kConvThreads).x);
  launch(conv1d_kernel, grid, dim3(kConvThreads), 0, ctx.stream, p);
}

void CudaBackend::advance_conv(const ConvParams& p, const ExecContext& ctx) const {
  const dim3 grid(static_cast<unsigned>(p.tokens.batch), grid_of(p.channels, kConvThreads).x);
  launch(advance_conv_kernel<uint16_t>, grid, dim3(kConvThreads), 0, ctx.stream, p);
}

}  // namespace pagedtree::cuda
