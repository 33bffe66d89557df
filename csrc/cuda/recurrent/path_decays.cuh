// Decays per channel: products of decays along paths, by a separate kernel. P[n] is the product from the chunk's first
// token to n. On a path D(n, m) = P[n] / P[m], so rows are k[n] P[n] and q[n] P[n], and keys are k[m] / P[m]. Products
// fall along a path, so this is in range if P[n] >= kLeastProduct in all channels. Other tokens store some products
// with a minus sign and traverse their path (walks.cuh).
#pragma once

#include "cuda/recurrent/paths.cuh"

namespace pagedtree::cuda {

constexpr float kLeastProduct = 0x1p-60f;
constexpr int kSignChannels = 32;  // neighbours that share a sign

struct PathDecaysShared {
  int32_t rows[kMaxRecurrentNodes];
  int16_t parents[kMaxRecurrentNodes];
  // float products[capacity][32] follow.
};

// Limited by the shared memory of a CTA's products.
__host__ __device__ constexpr int32_t decay_warps(int32_t capacity) { return clamp_to(256 / capacity, 1, 4); }
__host__ __device__ constexpr int32_t decay_bytes(int32_t capacity) {
  return static_cast<int32_t>(sizeof(PathDecaysShared)) + capacity * kSignChannels * 4;
}

// One warp per sequence, value head, and 32 channels; `jobs` in all.
inline __global__ void __launch_bounds__(128, 1)
    path_decays_kernel(const __grid_constant__ DeltaRuleParams p, int32_t capacity, int32_t blocks, int32_t jobs) {
  constexpr int kAhead = 8;  // tokens whose decays are prefetched
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t job = static_cast<int32_t>(blockIdx.x * (blockDim.x / 32)) + warp;
  if (job >= jobs) return;
  const int32_t item = job / blocks, head = item % p.num_heads, channel = job % blocks * kSignChannels + lane;
  auto& shared =
      *reinterpret_cast<PathDecaysShared*>(&ptx::shared<char>() + warp * static_cast<size_t>(decay_bytes(capacity)));
  float* const products = reinterpret_cast<float*>(&shared + 1) + lane;
  const Sequence sequence(p, item / p.num_heads);
  const float* const g = p.g + head * p.g_head_stride + min_of(channel, p.key_dim - 1);  // token 0
  float* const decays = p.decays + head * int64_t{p.key_dim} + channel;
  const int32_t stride = p.num_heads * p.key_dim;  // between tokens
  for (int32_t begin = 0; begin < sequence.total; begin += capacity) {
    const int32_t count = min_of(capacity, sequence.total - begin);
    __syncwarp();
#pragma unroll 1
    for (int32_t i = lane; i < count; i += 32) {
      shared.rows[i] = sequence.row(begin + i);
      shared.parents[i] = sequence.parent(i);
    }
    __syncwarp();
    float next[kAhead];
    const auto load_next = [&](int32_t first) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) next[j] = g[shared.rows[min_of(first + j, count - 1)] * p.g_token_stride];
    };
    load_next(0);
    for (int32_t first = 0; first < count; first += kAhead) {
      float logarithms[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) logarithms[j] = next[j];
      load_next(first + kAhead);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int32_t i = first + j;
        if (i >= count) break;
        const int32_t parent = shared.parents[i];
        const float decay = decay_of<ScalarMath>(logarithms[j]);
        const float product = parent < 0 ? decay : decay * products[parent * kSignChannels];
        products[i * kSignChannels] = product;
        const float sign = __any_sync(~0u, product < kLeastProduct) ? -1.0f : 1.0f;
        if (channel < p.key_dim) decays[int64_t{shared.rows[i]} * stride] = sign * product;
      }
    }
  }
}

struct PathDecays {
  const float* products;
  int32_t channels;

  // Returns four neighbouring channels, clamped to the last. Callers drop the sign, so that the load stays in flight.
  __device__ __forceinline__ Four four(int32_t channel) const {
    const float4 x = *reinterpret_cast<const float4*>(products + min_of(channel, channels - 4));
    return {{x.x, x.y, x.z, x.w}};
  }
  __device__ __forceinline__ bool walks() const {
    uint32_t signs = 0;
#pragma unroll
    for (int channel = 0; channel < kMaxRecurrentDim; channel += kSignChannels) {
      if (channel < channels) signs |= __builtin_bit_cast(uint32_t, products[channel]);
    }
    return signs >> 31 != 0;
  }
};

__device__ __forceinline__ PathDecays path_decays_of(const DeltaRuleParams& p, int64_t row, int32_t head) {
  return {p.decays + (row * p.num_heads + head) * p.key_dim, p.key_dim};
}

// Returns 1 / x to 2^-24 for normal x: initial guess from the exponent, then Newton steps. A division would branch.
__device__ __forceinline__ float reciprocal(float x) {
  float y = __builtin_bit_cast(float, 0x7ef311c7u - __builtin_bit_cast(uint32_t, x));
#pragma unroll
  for (int step = 0; step < 3; ++step) y *= __fmaf_rn(-x, y, 2.0f);
  return y;
}

// Multiplies the rows of two tokens (or one) by P[n].
__device__ __forceinline__ StepRows decayed_rows(StepRows rows, const Four& of_first, const Four& of_second) {
#pragma unroll
  for (int j = 0; j < 8; ++j) rows.a[j / 4][j % 4] *= fabsf((j % 2 == 0 ? of_first : of_second).x[j / 2]);
  return rows;
}

// Divides four channels of a key by P[m].
__device__ __forceinline__ Four undecayed(Four key, const Four& decays) {
#pragma unroll
  for (int j = 0; j < 4; ++j) key.x[j] *= reciprocal(fabsf(decays.x[j]));
  return key;
}

// add_split_product() with rows that also need two tf32 parts.
__device__ __forceinline__ void add_exact_product(float (&high)[4], float (&low)[4], const float (&a)[4], float b0,
                                                  float b1, uint32_t high_bits = kHighBits) {
  float rest[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) rest[j] = a[j] - high_part(a[j]);
  add_split_product(high, low, a, b0, b1, high_bits);
  ptx::mma_m16n8k8(low, rest, high_part(b0, high_bits), high_part(b1, high_bits));
}

}  // namespace pagedtree::cuda
