// Calibration's copies from memory into shared memory: cp.async, bulk copies, boxes by TMA.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "bench.cuh"

namespace calibration {
namespace {

enum class Copy { kAsync16, kBulk, kBox, kPrefetchedBox };
constexpr int kBoxColumns = 64, kBoxRows = 64, kBoxBytes = kBoxColumns * kBoxRows * 2;
constexpr int kCopyTurns = 4;

__device__ void wait_for(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  }
}

template <Copy kCopy>
__device__ void start_copy(uint32_t to, const char* from, const CUtensorMap* map, int64_t at, int bytes,
                           uint32_t barrier) {
  if constexpr (kCopy == Copy::kAsync16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\ncp.async.wait_all;" ::"r"(to), "l"(from + at) : "memory");
    return;
  }
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  if constexpr (kCopy == Copy::kBulk) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from + at), "r"(bytes), "r"(barrier)
                 : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(to),
        "l"(map), "r"(0), "r"(int(at / (kBoxColumns * 2))), "r"(barrier)
        : "memory");
  }
}

extern __shared__ __align__(1024) char dynamic_shared[];

// Each CTA's thread copies new `bytes` in each turn and waits for them.
template <Copy kCopy>
__global__ void copies(const __grid_constant__ CUtensorMap map, const char* from, int bytes, long long* cycles) {
  __shared__ alignas(8) uint64_t arrived;
  const auto barrier = uint32_t(__cvta_generic_to_shared(&arrived));
  const auto to = uint32_t(__cvta_generic_to_shared(dynamic_shared));
  asm volatile("mbarrier.init.shared.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
  if constexpr (kCopy == Copy::kPrefetchedBox) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
    const long long begin = now();
    while (now() - begin < 5000) continue;
  }
#pragma unroll 1
  for (int turn = 0; turn < kCopyTurns; ++turn) {
    const long long begin = now();
    start_copy<kCopy>(to, from, &map, int64_t{turn * int(gridDim.x) + int(blockIdx.x)} * bytes, bytes, barrier);
    if (kCopy != Copy::kAsync16) wait_for(barrier, turn & 1);
    if (blockIdx.x == 0) cycles[turn] = now() - begin;
  }
}

// Rows of 64 columns of 16 bits over all data.
CUtensorMap map_of(const Bench& bench) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
  const cuuint64_t sizes[] = {kBoxColumns, bench.kDataBytes / (kBoxColumns * 2)}, strides[] = {kBoxColumns * 2};
  const cuuint32_t box[] = {kBoxColumns, kBoxRows}, dense[] = {1, 1};
  CUtensorMap map{};
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  if (!encode || encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, bench.data, sizes, strides, box, dense,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) {
    fprintf(stderr, "the driver makes no tensor map\n");
    exit(1);
  }
  return map;
}

template <Copy kCopy>
void measure_copy(Bench& bench, const char* name, const CUtensorMap& map, int bytes) {
  bench.allow(128 * kKb, copies<kCopy>);
  for (const int ctas : {1, bench.multiprocessors()}) {
    bench.forget_data();
    bench.launch({ctas, 1, std::max(bytes, 1024)}, copies<kCopy>, map, bench.data, bytes, bench.cycles);
    const std::vector<double> found = bench.counted(kCopyTurns);
    for (const int turn : {0, kCopyTurns - 1}) {
      bench.figure(name, found[turn], kCycles, {{"bytes", bytes}, {"ctas", ctas}, {"turn", turn}});
    }
  }
}

void measure_copies(Bench& bench) {
  const CUtensorMap map = map_of(bench);
  measure_copy<Copy::kAsync16>(bench, "cp.async", map, 16);
  for (const int kb : {1, 16, 64}) measure_copy<Copy::kBulk>(bench, "bulk copy", map, kb * kKb);
  measure_copy<Copy::kBox>(bench, "TMA box", map, kBoxBytes);
  measure_copy<Copy::kPrefetchedBox>(bench, "TMA box, map prefetched", map, kBoxBytes);
}

}  // namespace
}  // namespace calibration
