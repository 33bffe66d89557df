// A row's distribution and sums of its masses, in the order of MassTable (core/verify/rules.h).
#pragma once

#include "core/verify/rules.h"
#include "cuda/logits/filters.cuh"

namespace pagedtree::cuda {

template <DType kDType>
struct MassesOfDType {
  // Rows read, groups of four per load of a row, sums per pass.
  static constexpr int kRows = 1, kBatch = 4, kSums = 1;

  LogitReader<kDType> row;
  Scale scale;
  Filter filter;

  __device__ explicit MassesOfDType(const RowDistribution& distribution)
      : row(distribution.row), scale(distribution.scale), filter(distribution.filter) {
    row.apply(distribution);
  }

  __device__ float at(int32_t token) const {
    const float logit = row.logit(token), x = scale(logit);
    return filter.keeps(token, logit, x) ? mass_of<ScalarMath>(x) : 0.0f;
  }

  __device__ int32_t vocab() const { return row.vocab(); }
  // Loads groups of four, kMassSums tokens apart.
  template <int kCount>
  __device__ __forceinline__ void load(int token, Four* fours) const {
    if (row.template load_whole_fours<kCount>(token, kMassSums, fours)) return;
#pragma unroll 1
    for (int i = 0; i < kCount; ++i, token += kMassSums) {
#pragma unroll
      for (int j = 0; j + 1 < kCount; ++j) fours[j] = fours[j + 1];
      fours[kCount - 1] = row.load_four(row, token);
    }
  }
  // Zeros past the vocabulary.
  __device__ __forceinline__ void values(int32_t token, const Four& loaded, float (&four)[4]) const {
    uint32_t kept = 0;
    if (token < row.vocab()) {
      if (row.stands() && token + 4 <= row.vocab()) {
        row.convert(loaded, four);
      } else {
        row.clean_four(token, loaded, four);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = scale(four[i]);
        if (filter.keeps(token + i, four[i], x) && has_mass(x)) kept |= 1u << i;
        four[i] = x;
      }
    }
    if (kept == 0) {
      four[0] = four[1] = four[2] = four[3] = 0.0f;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float mass = exp_exact<ScalarMath>(four[i]);
      four[i] = kept >> i & 1u ? mass : 0.0f;
    }
  }
  __device__ __forceinline__ void values(int token, const Four* loaded, float (&sums)[1][4]) const {
    values(token, loaded[0], sums[0]);
  }
};
using RowMasses = MassesOfDType<kAnyDType>;

// Returns a block's sum in MassTable's order. Partial sum i is entry i % 4 of lane i / 4; lanes swap halves of sums.
__device__ __forceinline__ float sum_of_block(const float (&sums)[4]) {
  const bool high = threadIdx.x & 16, odd = threadIdx.x & 8;
  float first = high ? sums[2] : sums[0], second = high ? sums[3] : sums[1];
  first += __shfl_xor_sync(~0u, high ? sums[0] : sums[2], 16);
  second += __shfl_xor_sync(~0u, high ? sums[1] : sums[3], 16);
  float sum = odd ? second : first;
  sum += __shfl_xor_sync(~0u, odd ? first : second, 8);
  for (int lanes = 4; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  sum += __shfl_xor_sync(~0u, sum, 16);
  return sum + __shfl_xor_sync(~0u, sum, 8);
}

// Sums blocks, one warp each; every CTA gets all sums. With only_block >= 0, each CTA sums that block alone.
template <typename Masses>
__device__ __forceinline__ void sum_blocks(const Masses& masses, MassTable& first, MassTable& last) {
  static_assert(Masses::kSums <= 2);
  const int32_t vocab = masses.vocab();
  ptx::meet_cluster();
  constexpr int kBatch = Masses::kBatch, kGroups = kMassBlock / kMassSums;
  static_assert(kGroups % kBatch == 0);
  const int lane = static_cast<int>(threadIdx.x % 32), warps_of_cta = static_cast<int>(blockDim.x / 32);
  const int warp = static_cast<int>(ptx::cluster_rank()) * warps_of_cta + static_cast<int>(threadIdx.x / 32);
  const int warps = static_cast<int>(ptx::cluster_size()) * warps_of_cta,
            num_blocks = static_cast<int>(MassTable::num_blocks(vocab));
  float sums[Masses::kSums][4]{};
  int block = warp, step = warps, group = 0;
  bool writes = lane < static_cast<int>(ptx::cluster_size());  // to the CTA of this rank
  if constexpr (requires { masses.only_block; }) {
    if (masses.only_block >= 0) {
      block = threadIdx.x < 32 ? masses.only_block : num_blocks;
      step = num_blocks;
      writes = lane == static_cast<int>(ptx::cluster_rank());
    }
  }
#pragma unroll 1
  while (block < num_blocks) {
    int token = block * kMassBlock + group * kMassSums + 4 * lane;
    Four loaded[Masses::kRows * kBatch];
    masses.template load<kBatch>(token, loaded);
#pragma unroll 1
    for (int i = 0; i < kBatch; ++i, token += kMassSums) {
      float values[Masses::kSums][4];
      masses.values(token, loaded, values);
#pragma unroll
      for (int j = 0; j + 1 < Masses::kRows * kBatch; ++j) loaded[j] = loaded[j + 1];
#pragma unroll
      for (int j = 0; j < 4 * Masses::kSums; ++j) sums[j / 4][j % 4] += values[j / 4][j % 4];
    }
    group += kBatch;
    if (group < kGroups) continue;
#pragma unroll 1
    for (int k = 0; k < Masses::kSums; ++k) {
      const float sum = sum_of_block(sums[0]);
      float& into = (k == 0 ? first : last).blocks[block];
      if (writes) *ptx::of_cta(&into, static_cast<uint32_t>(lane)) = sum;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[0][i] = sums[Masses::kSums - 1][i];
        sums[Masses::kSums - 1][i] = 0.0f;
      }
    }
    block += step;
    group = 0;
  }
  ptx::meet_cluster();
  const unsigned num_groups = static_cast<unsigned>(MassTable::num_groups(vocab));
  if (threadIdx.x < Masses::kSums * num_groups) {
    const bool of_first = threadIdx.x < num_groups;
    (of_first ? first : last).add_group(vocab, threadIdx.x - (of_first ? 0 : num_groups));
  }
  __syncthreads();
}

}  // namespace pagedtree::cuda
