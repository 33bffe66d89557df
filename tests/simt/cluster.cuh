// Sums integers by a cluster's CTAs, which read each other's shared memory.
#pragma once

#include "bugs.h"
#include "cuda/tile/ptx.cuh"

namespace probe {

constexpr int kClusterThreads = 64;

struct ClusterParams {
  const int32_t* values;  // [count]
  int count;
  unsigned* sums;  // [CTAs]
  Bug bug;
};

struct ClusterShared {
  unsigned threads[kClusterThreads];
  unsigned sum;
};

__global__ void __launch_bounds__(kClusterThreads) sum_in_cluster(const __grid_constant__ ClusterParams p) {
  namespace ptx = pagedtree::ptx;
  auto& s = ptx::shared<ClusterShared>();
  if (p.bug != Bug::kNoClusterStart) ptx::cluster_sync();
  unsigned sum = 0;
  const int first = static_cast<int>(ptx::cluster_rank() * blockDim.x + threadIdx.x);
  for (int i = first; i < p.count; i += static_cast<int>(ptx::cluster_size() * blockDim.x)) {
    sum += static_cast<unsigned>(p.values[i]);
  }
  s.threads[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (unsigned i = 1; i < blockDim.x; ++i) sum += s.threads[i];
    s.sum = sum;
  }
  if (p.bug != Bug::kNoClusterBarrier && p.bug != Bug::kNoClusterStart) ptx::cluster_sync();
  if (threadIdx.x == 0) {
    unsigned total = 0;
    for (uint32_t rank = 0; rank < ptx::cluster_size(); ++rank) total += *ptx::of_cta(&s.sum, rank);
    p.sums[blockIdx.x] = total;
  }
  if (p.bug != Bug::kNoClusterEnd) ptx::cluster_sync();
}

}  // namespace probe
