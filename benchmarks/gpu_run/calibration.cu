// Measures figures of a Hopper GPU for kernel design (docs/notes/calibration.md).
//
//   nvcc -O3 -std=c++20 -gencode arch=compute_90a,code=sm_90a -Icsrc -o calibration benchmarks/gpu_run/calibration.cu
//   ./calibration OUT.jsonl
//
// OUT's first line describes the device, each further one a figure, written once measured. `mhz` is the SM's clock.
#include <cudaTypedefs.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <map>
#include <string>

#include "cuda/tile/launch.cuh"
#include "cuda/tile/ptx_sm90.cuh"

namespace {

namespace ptx = pagedtree::ptx;
using pagedtree::cuda::check_cuda, pagedtree::cuda::launch, pagedtree::cuda::launch_clusters;

constexpr size_t kMb = size_t{1} << 20, kBytes = 4096 * kMb;

struct Times {  // of a CTA
  int64_t cycles, begin_ns, end_ns;
  uint32_t sm;
  double ns() const { return double(end_ns - begin_ns); }
  int mhz() const { return int(double(cycles) / ns() * 1e3); }
};

FILE* file = nullptr;
int sms = 0;
uint4* memory = nullptr;  // kBytes
Times* times = nullptr;   // also read by the host

template <typename... Values>
void figure(const char* name, double value, const char* unit, const char* parameters, Values... values) {
  for (FILE* to : {file, stdout}) {
    fprintf(to, "{\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\"", name, value, unit);
    fprintf(to, parameters, values...);
    fputs("}\n", to);
    fflush(to);
  }
}

// Returns the slowest CTA; the first launch loads the code.
template <typename Start>
Times measured(int ctas, Start start) {
  for (int i = 0; i < 2; ++i) {
    start();
    check_cuda(cudaDeviceSynchronize(), "kernel");
  }
  return *std::max_element(times, times + ctas, [](const Times& a, const Times& b) { return a.cycles < b.cycles; });
}

struct Instant {
  int64_t cycles, ns;
};
__device__ Instant now() {
  Instant at;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(at.cycles)::"memory");
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(at.ns)::"memory");
  return at;
}
__device__ void note(const Instant& begin, Times* times) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  const Instant end = now();
  times[blockIdx.x] = {end.cycles - begin.cycles, begin.ns, end.ns};
  asm volatile("mov.u32 %0, %%smid;" : "=r"(times[blockIdx.x].sm));
}

// TMA boxes: each CTA fills slots of 64 keys of 256 bytes from random pages ------------------------------------------

constexpr int kSlot = 16384, kSlots = 8, kTurns = 256;

struct Ring {
  unsigned char slots[kSlots][kSlot];
  uint64_t full[kSlots], empty[kSlots];
};

struct Boxes {  // `keys` of a page, in one or both panels of 64 columns
  int rank, keys, panels, starters;
  __host__ __device__ int bytes() const { return keys * panels * 128; }
};

// `starters` warps start a slot's boxes, one per lane; another warp's thread waits.
template <int kRank>
__global__ void __launch_bounds__(160, 1)
    copy_boxes(const __grid_constant__ ptx::TensorMap map, uint32_t pages, const Boxes boxes, Times* times) {
  auto& ring = ptx::shared<Ring>();
  if (threadIdx.x < kSlots) {
    ptx::mbar_init(&ring.full[threadIdx.x], 1);
    ptx::mbar_init(&ring.empty[threadIdx.x], 1);
    ptx::fence_mbar_init();
  }
  __syncthreads();
  const Instant begin = now();
  const int warp = threadIdx.x / 32, box = threadIdx.x % 32 * boxes.starters + warp;
  const int pages_of_slot = 64 / boxes.keys, panel = box / pages_of_slot;
  const bool starts = warp < boxes.starters && box < kSlot / boxes.bytes();
  const int offset = box * boxes.bytes();
  uint32_t page = blockIdx.x * kTurns * pages_of_slot + box % pages_of_slot;
  for (int turn = 0; turn < kTurns; ++turn, page += pages_of_slot) {
    const int slot = turn % kSlots, phase = turn / kSlots & 1;
    uint64_t* const full = &ring.full[slot];
    if (warp == 4) {
      if (threadIdx.x % 32 != 0) continue;
      ptx::mbar_wait(full, phase);
      ptx::mbar_arrive(&ring.empty[slot]);
      continue;
    }
    ptx::mbar_wait(&ring.empty[slot], phase ^ 1);
    if (threadIdx.x == 0) ptx::mbar_arrive_expect(full, kSlot);
    if (!starts) continue;
    const uint32_t random = __umulhi(page * 0x9e3779b9u, pages);
    if constexpr (kRank == 5) {
      ptx::tma_load_5d(ring.slots[slot] + offset, &map, 0, 0, panel, 0, random, full);
    } else {
      asm volatile(
          "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
          "[%1, {%3, %2, %2, %4}], [%5];" ::"r"(ptx::smem_addr(ring.slots[slot] + offset)),
          "l"(&map), "r"(0), "r"(panel * 64), "r"(random), "r"(ptx::smem_addr(full))
          : "memory");
    }
  }
  note(begin, times);
}

// Dimensions: columns, slots, heads, pages; or columns, 8 slots, panels, groups of 8 slots, pages.
ptx::TensorMap map_of(const Boxes& boxes, uint64_t pages) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found),
             "cuTensorMapEncodeTiled");
  const uint32_t keys = boxes.keys, panels = boxes.panels, of = boxes.rank - 4;
  const cuuint64_t sizes[2][5] = {{128, keys, 1, pages}, {64, 8, 2, keys / 8, pages}};
  const cuuint64_t strides[2][4] = {{256, keys * 256, keys * 256}, {256, 128, 2048, keys * 256}};
  const cuuint32_t box[2][5] = {{64, keys, 1, 1}, {64, 8, panels, keys / 8, 1}}, dense[5] = {1, 1, 1, 1, 1};
  ptx::TensorMap made;
  const CUresult status = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(encode)(
      &made.map, CU_TENSOR_MAP_DATA_TYPE_UINT16, boxes.rank, memory, sizes[of], strides[of], box[of], dense,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw std::runtime_error("the driver makes no tensor map");
  return made;
}

void measure_boxes(const char* from, size_t bytes) {
  for (const auto& [rank, panels] : {std::pair{4, 1}, {5, 1}, {5, 2}}) {
    for (const int keys : {8, 16, 32, 64}) {
      for (const int starters : {1, 2, 4}) {
        const Boxes boxes{rank, keys, panels, starters};
        const uint32_t pages = bytes / (keys * 256);
        const ptx::TensorMap map = map_of(boxes, pages);
        const auto kernel = rank == 4 ? copy_boxes<4> : copy_boxes<5>;
        const Times t =
            measured(sms, [&] { launch(kernel, sms, 160, sizeof(Ring), nullptr, map, pages, boxes, times); });
        figure("TMA box", t.ns() / (kTurns * kSlot / boxes.bytes()), "ns",
               R"(, "bytes": %d, "rank": %d, "panels": %d, "warps": %d, "from": "%s", "mhz": %d)", boxes.bytes(), rank,
               panels, starters, from, t.mhz());
      }
    }
  }
}

// L2: rate with all SMs -------------------------------------------------------------------------------------------

constexpr int kRounds = 64;

__global__ void __launch_bounds__(1024, 2) read_all(const uint4* from, uint32_t count, Times* times) {
  const Instant begin = now();
  uint32_t sum = 0;
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll 4
    for (uint32_t i = (blockIdx.x + round * 17) % gridDim.x * 1024 + threadIdx.x; i < count; i += gridDim.x * 1024) {
      const uint4 word = __ldcg(from + i);
      sum += word.x ^ word.y ^ word.z ^ word.w;
    }
  }
  __syncthreads_or(sum == 12345);
  note(begin, times);
}

void measure_l2() {
  for (const int mb : {8, 32, 48}) {
    const Times t =
        measured(2 * sms, [&] { launch(read_all, 2 * sms, 1024, 0, nullptr, memory, uint32_t(mb * kMb / 16), times); });
    figure("rate of L2", mb * kMb * kRounds / t.ns() / 1e3, "TB/s", R"(, "mb": %d, "mhz": %d)", mb, t.mhz());
  }
}

// Clusters: how many run at once ----------------------------------------------------------------------------------

// Occupies kNumbers registers for 20 us.
template <int kNumbers>
__global__ void __launch_bounds__(512) stay(Times* times) {
  uint32_t numbers[kNumbers], sum = 0;
  for (uint32_t& number : numbers) number = clock();
  const Instant begin = now();
  while (now().ns - begin.ns < 20'000) continue;
  for (const uint32_t number : numbers) sum = sum * 3 + number;
  __syncthreads_or(sum == 12345);
  note(begin, times);
}

// SM -> GPC: SMs with CTAs of one cluster share a GPC.
std::map<uint32_t, uint32_t> gpcs;

void measure_clusters(void (*kernel)(Times*), int threads, int shared_kb) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "clusters of 16");
  for (const int cluster : {1, 2, 4, 8, 16}) {
    const int ctas = 10 * sms / 16 * 16;
    measured(ctas, [&] { launch_clusters(kernel, ctas, threads, cluster, shared_kb * 1024, nullptr, times); });
    int64_t first_end = times[0].end_ns;
    for (int i = 0; i < ctas; ++i) first_end = std::min(first_end, times[i].end_ns);
    int at_once = 0;
    for (int i = 0; i < ctas; ++i) {
      const uint32_t sm = times[i].sm, first_sm = times[i / cluster * cluster].sm;
      const uint32_t gpc = gpcs.try_emplace(sm, sm).first->second;
      const uint32_t same = gpcs.try_emplace(first_sm, first_sm).first->second;
      for (auto& entry : gpcs) entry.second = entry.second == gpc ? same : entry.second;
      at_once += i % cluster == 0 && times[i].begin_ns < first_end;
    }
    figure("clusters at once", at_once, "clusters", R"(, "ctas": %d, "threads": %d, "registers": %d, "shared kb": %d)",
           cluster, threads, pagedtree::cuda::attributes_of(kernel).numRegs, shared_kb);
  }
}

// Exchanges between the CTAs of a cluster -------------------------------------------------------------------------

constexpr int kExchanges = 64;
enum Exchange { kClusterBarrier, kStores, kArrivals };

template <Exchange kExchange>
__global__ void exchange(Times* times) {
  __shared__ uint64_t bars[2], words[2][16];
  const uint32_t rank = ptx::cluster_rank(), size = ptx::cluster_size();
  if (threadIdx.x < 2) {
    ptx::mbar_init(&bars[threadIdx.x], 1);
    ptx::fence_mbar_init();
  }
  ptx::cluster_sync();
  const Instant begin = now();
  uint64_t sum = rank;
  for (int turn = 0; turn < kExchanges; ++turn) {
    uint64_t *const bar = &bars[turn % 2], *const of_turn = words[turn % 2];
    if (kExchange == kClusterBarrier) {
      ptx::cluster_sync();
    } else if (kExchange == kStores) {
      if (threadIdx.x == 0) ptx::mbar_arrive_expect(bar, size * 8);
      if (threadIdx.x < size) {
        asm volatile(
            "{.reg .b32 to, of; mapa.shared::cluster.u32 to, %0, %3; mapa.shared::cluster.u32 of, %1, %3; "
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [to], %2, [of];}" ::"r"(
                ptx::smem_addr(&of_turn[rank])),
            "r"(ptx::smem_addr(bar)), "l"(sum), "r"(threadIdx.x)
            : "memory");
      }
      ptx::mbar_wait(bar, turn / 2 & 1);
      sum += of_turn[threadIdx.x % size];
      __syncthreads();  // no thread is a turn late
    } else if (threadIdx.x == 0 && rank < 2) {
      if (rank == 1) ptx::mbar_wait(bars, turn & 1);
      asm volatile(
          "{.reg .b32 at; mapa.shared::cluster.u32 at, %0, %1; "
          "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [at];}" ::"r"(ptx::smem_addr(bars)),
          "r"(1 - rank)
          : "memory");
      if (rank == 0) ptx::mbar_wait(bars, turn & 1);
    }
  }
  __syncthreads_or(sum == 12345);
  note(begin, times);
  ptx::cluster_sync();  // others may still store into this CTA's memory
}

void measure_exchange(const char* name, void (*kernel)(Times*)) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "clusters of 16");
  for (const int cluster : {2, 4, 8, 16}) {
    for (const int threads : {32, 256, 512}) {
      const Times t = measured(cluster, [&] { launch_clusters(kernel, cluster, threads, cluster, 0, nullptr, times); });
      figure(name, double(t.cycles) / kExchanges, "cycles", R"(, "ctas": %d, "threads": %d)", cluster, threads);
    }
  }
}

void measure_all() {
  cudaDeviceProp device;
  check_cuda(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  sms = device.multiProcessorCount;
  fprintf(file, "{\"device\": \"%s\", \"multiprocessors\": %d}\n", device.name, sms);
  check_cuda(cudaMallocManaged(&times, 4096 * sizeof(Times)), "cudaMallocManaged");
  check_cuda(cudaMalloc(&memory, kBytes), "cudaMalloc");
  check_cuda(cudaMemset(memory, 0, kBytes), "cudaMemset");
  for (const int shared_kb : {200, 100, 70}) measure_clusters(stay<8>, 256, shared_kb);
  measure_clusters(stay<100>, 512, 0);
  std::map<uint32_t, int> sms_of;
  for (const auto& [sm, gpc] : gpcs) ++sms_of[gpc];
  for (const auto& [gpc, count] : sms_of) figure("SMs of a GPC", count, "SMs", "");
  measure_exchange("cluster barrier", exchange<kClusterBarrier>);
  measure_exchange("stores to all by st.async", exchange<kStores>);
  measure_exchange("mbarrier, there and back", exchange<kArrivals>);
  measure_l2();
  measure_boxes("L2", 16 * kMb);
  measure_boxes("memory", kBytes);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    fprintf(stderr, "usage: %s OUT.jsonl\n", arguments[0]);
    return 2;
  }
  file = fopen(arguments[1], "w");
  try {
    if (file == nullptr) throw std::runtime_error(std::string("cannot write ") + arguments[1]);
    measure_all();
  } catch (const std::exception& error) {
    fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
