// A warp's columns of a state in registers.
#pragma once

#include "cuda/recurrent/numbers.cuh"

namespace pagedtree::cuda {

constexpr int kFewChannels = kPassChannels, kFewSteps = kFewChannels / kStep;  // maximum
constexpr int kFewColumns = 16;                                                // per warp; a lane has 4 neighbours

// Direction of 16-byte words in memory.
enum class StateWords { kOfColumns, kOfChannels };

// A lane's elements: channels 4 pair .. 4 pair + 3 of each step, columns 2 quad and 2 quad + 1.
template <StateWords kWords>
struct StateColumns {
  float x[kFewSteps][4][2];
  float* begin;      // null if none
  int32_t channels;  // from the lane's first one

  __device__ __forceinline__ StateColumns(const DeltaRuleParams& p, int64_t b, int32_t head, int32_t first_column) {
    const int32_t lane = threadIdx.x % 32, column = first_column + lane / 4 * 2, channel = lane % 4 * 4;
    const int64_t index = state_index_of(p.tokens, b);
    channels = p.key_dim - channel;
    begin = index < 0 || column >= p.value_dim ? nullptr
                                               : p.state + index * p.state_strides[0] + head * p.state_strides[1] +
                                                     channel * p.state_strides[2] + column * p.state_strides[3];
  }
  template <bool kStores>
  __device__ __forceinline__ void copy(const DeltaRuleParams& p, int step, float (&of)[4][2]) {
    if (begin == nullptr || step * kStep >= channels) return;
    float* const at = begin + step * kStep * p.state_strides[2];
#pragma unroll
    for (int j = 0; j < (kWords == StateWords::kOfColumns ? 4 : 2); ++j) {
      if constexpr (kWords == StateWords::kOfColumns) {
        auto* const word = reinterpret_cast<float2*>(at + j * p.state_strides[2]);
        const float2 numbers = kStores ? make_float2(of[j][0], of[j][1]) : *word;
        if (kStores) *word = numbers;
        of[j][0] = numbers.x, of[j][1] = numbers.y;
      } else {
        auto* const word = reinterpret_cast<float4*>(at + j * p.state_strides[3]);
        const float4 numbers = kStores ? make_float4(of[0][j], of[1][j], of[2][j], of[3][j]) : *word;
        if (kStores) *word = numbers;
        of[0][j] = numbers.x, of[1][j] = numbers.y, of[2][j] = numbers.z, of[3][j] = numbers.w;
      }
    }
  }
  __device__ __forceinline__ void load(const DeltaRuleParams& p) {
#pragma unroll
    for (int e = 0; e < kFewSteps * 8; ++e) x[e / 8][e / 2 % 4][e % 2] = 0.0f;
#pragma unroll
    for (int step = 0; step < kFewSteps; ++step) copy<false>(p, step, x[step]);
  }
};

// Adds k u^T of 8 tokens, with both tf32 parts of u.
template <typename T>
__device__ __forceinline__ void add_keys(float (&added)[2][4], float (&of_low)[2][4], const float (&high)[4],
                                         const float (&low)[4], uint32_t keys, uint32_t others) {
  const Four b = unpack(make_uint2(keys, others), kTypeOf<T>);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    ptx::mma_m16n8k8(added[n], high, b.x[n], b.x[2 + n]);
    ptx::mma_m16n8k8(of_low[n], low, b.x[n], b.x[2 + n]);
  }
}

// Adds a step's products to a lane's elements; channel 2 x + n is column x of product n.
__device__ __forceinline__ void add_to_state(float (&x)[4][2], const float (&added)[2][4], const float (&of_low)[2][4],
                                             float decay) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int n = e / 4, c = e % 4;
    const float sum = joined(added[n][c], of_low[n][c]);
    float& of = x[c % 2 * 2 + n][c / 2];
    of = decay == 0.0f ? sum : __fmaf_rn(decay, of, sum);
  }
}

}  // namespace pagedtree::cuda
