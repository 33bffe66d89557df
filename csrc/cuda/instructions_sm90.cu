// Runs each function of pagedtree::ptx for Hopper on given words, like instructions.cu.
#include <cstring>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "core/common.h"
#include "core/math.h"
#include "cuda/instructions.cuh"
#include "cuda/tile/tensor_map.cuh"

// Outside an anonymous namespace: tests find a GPU's PTX by simt's kernel names.
namespace pagedtree::cuda::hopper {

constexpr int kThreads = 128, kOut = 128;     // a warpgroup; result words per thread
constexpr int kSteps = 4, kStepWords = 4;     // mma in sequence; words of a register operand
constexpr int kImageChunks = 80 * 1024 / 16;  // of shared memory, 16 bytes each

struct Words {
  uint32_t numbers[kThreads];  // further operands
  uint32_t own[kThreads][kSteps][kStepWords];
  uint4 image[kImageChunks];  // contents of shared memory
};

struct Call {
  const Words* in;
  uint32_t* out;  // [kThreads, kOut], zeros
  ptx::TensorMap map;
};

struct Shared {
  alignas(1024) uint4 image[kImageChunks];
  uint64_t barriers[2];
};

__device__ inline void store(uint32_t* out, const uint4& words) {
  out[0] = words.x;
  out[1] = words.y;
  out[2] = words.z;
  out[3] = words.w;
}

// Fills shared memory from chunk `first` of the image for wgmma.
__device__ inline void load_image(Shared& s, const Words& in, uint32_t first = 0) {
  for (uint32_t i = threadIdx.x; i + first < kImageChunks; i += blockDim.x) s.image[i] = in.image[i + first];
  ptx::fence_proxy_async();
  __syncthreads();
}

__device__ inline uint64_t descriptor(const Shared& s, uint32_t offset, uint32_t leading, uint32_t stride) {
  return ptx::matrix_descriptor(reinterpret_cast<const unsigned char*>(s.image) + offset, leading, stride);
}

// Initializes d with distinct numbers, offset by `first`.
template <int N>
__device__ inline void begin_sums(float (&d)[N][4], uint32_t first = 0) {
#pragma unroll
  for (uint32_t n = 0; n < N; ++n) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) d[n][i] = static_cast<float>(threadIdx.x * 128 + n * 4 + i + first);
  }
}

template <int N>
__device__ inline void store_sums(const float (&d)[N][4], uint32_t* out) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[n * 4 + i] = ScalarMath::bits<uint32_t>(d[n][i]);
  }
}

// Words::numbers of multiplications.
struct Layout {
  uint32_t accumulates;  // flag: the first step adds to d
  uint32_t a_leading, a_stride, b_leading, b_stride;
  struct {
    uint32_t a, b;  // byte offsets of the operands
  } steps[kSteps];

  __device__ static Layout of(const Words& in) {
    Layout layout;
    memcpy(&layout, in.numbers, sizeof(layout));
    return layout;
  }
  __device__ uint64_t a(const Shared& s, int step) const { return descriptor(s, steps[step].a, a_leading, a_stride); }
  __device__ uint64_t b(const Shared& s, int step) const { return descriptor(s, steps[step].b, b_leading, b_stride); }
};

enum Operands { kBothShared, kKMajor, kNMajor };  // the last two: a in registers

struct Usual {
  static constexpr int kThreads = 128, kCtas = 1;  // of the launch, a cluster
};

template <typename T, int N, Operands kOperands, bool kTradesRegisters = false>
struct Multiply {
  // Two warpgroups release registers to the first. Threads start with 168, too few for N = 256.
  static constexpr int kThreads = kTradesRegisters ? 384 : 128, kCtas = 1;

  static __device__ void run(const Call& call, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    load_image(s, *call.in);
    if constexpr (kTradesRegisters) {
      if (threadIdx.x >= 128) return ptx::setmaxnreg_dec<40>();
      ptx::setmaxnreg_inc<240>();
    }
    const Layout layout = Layout::of(*call.in);
    uint32_t a[kSteps][kStepWords];
    memcpy(a, call.in->own[threadIdx.x], sizeof(a));
    float d[N / 8][4];
    begin_sums(d);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool accumulate = step > 0 || layout.accumulates != 0;
      if constexpr (kOperands == kBothShared) {
        ptx::wgmma_ss<T, N>(d, layout.a(s, step), layout.b(s, step), accumulate);
      } else {
        ptx::wgmma_rs<T, N, kOperands == kNMajor>(d, a[step], layout.b(s, step), accumulate);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(d);
    store_sums(d, out);
  }
};

// Stores the older of two groups while the newer is in flight, then the newer.
struct Groups : Usual {
  static __device__ void run(const Call& call, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    const Layout layout = Layout::of(*call.in);
    load_image(s, *call.in);
    float older[8][4], newer[8][4];
    begin_sums(older);
    begin_sums(newer, 32);
    ptx::wgmma_fence();
    ptx::wgmma_ss<__half, 64>(older, layout.a(s, 0), layout.b(s, 0), true);
    ptx::wgmma_ss<__half, 64>(older, layout.a(s, 1), layout.b(s, 1), true);
    ptx::wgmma_commit();
    ptx::wgmma_ss<__half, 64>(newer, layout.a(s, 2), layout.b(s, 2), true);
    ptx::wgmma_ss<__half, 64>(newer, layout.a(s, 3), layout.b(s, 3), true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::wgmma_results(older);
    store_sums(older, out);
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(newer);
    store_sums(newer, out + 32);
  }
};

// Threads overwrite operands that wgmma has read; the second ones are 32 KB after the first.
struct ProxyFence : Usual {
  static __device__ void run(const Call& call, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    const Layout layout = Layout::of(*call.in);
    for (uint32_t i = 0; i < 2; ++i) {
      load_image(s, *call.in, i * 2048);
      float d[8][4];
      begin_sums(d, i * 32);
      ptx::wgmma_fence();
      ptx::wgmma_ss<__nv_bfloat16, 64>(d, layout.a(s, 0), layout.b(s, 0), true);
      ptx::wgmma_ss<__nv_bfloat16, 64>(d, layout.a(s, 1), layout.b(s, 1), true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_results(d);
      store_sums(d, out + i * 32);
      __syncthreads();
    }
  }
};

// The descriptor relative to the start of shared memory.
struct Descriptor : Usual {
  static __device__ void run(const Call& call, uint32_t* out) {
    const auto& s = ptx::shared<Shared>();
    const uint32_t* own = call.in->own[threadIdx.x][0];
    const uint64_t found = descriptor(s, own[0], own[1], own[2]) - (ptx::smem_addr(s.image) >> 4);
    out[0] = static_cast<uint32_t>(found);
    out[1] = static_cast<uint32_t>(found >> 32);
  }
};

__device__ inline void init_barriers(Shared& s, uint32_t count) {
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : s.barriers) ptx::mbar_init(&barrier, count);
    ptx::fence_mbar_init();
  }
  __syncthreads();
}

// In each phase half of the threads write words for the other half.
struct Phases : Usual {
  static __device__ void run(const Call& call, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    init_barriers(s, kThreads / 2);
    uint64_t *const full = &s.barriers[0], *const empty = &s.barriers[1];
    for (uint32_t phase = 0; phase < 4; ++phase) {
      if (threadIdx.x < kThreads / 2) {
        ptx::mbar_wait(empty, (phase & 1) ^ 1);  // initially the preceding phase, which is complete
        memcpy(&s.image[threadIdx.x], call.in->own[threadIdx.x][phase], sizeof(uint4));
        ptx::mbar_arrive(full);
      } else {
        ptx::mbar_wait(full, phase & 1);
        store(out + phase * 4, s.image[(threadIdx.x ^ 32) % (kThreads / 2)]);
        ptx::mbar_arrive(empty);
      }
    }
  }
};

// Two copies per thread and phase; the second of odd threads is zeros.
struct CopiesArrive : Usual {
  static __device__ void run(const Call& call, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    init_barriers(s, kThreads);
    for (uint32_t phase = 0; phase < 2; ++phase) {
      const uint32_t first = phase * 2 * kThreads, second = first + kThreads;
      const auto copy = [&](uint32_t chunk, bool valid) {
        ptx::cp_async_16(ptx::smem_addr(&s.image[chunk]), &call.in->image[chunk], valid);
      };
      copy(first + threadIdx.x, true);
      copy(second + threadIdx.x, threadIdx.x % 2 == 0);
      ptx::cp_async_mbar_arrive(&s.barriers[0]);
      ptx::mbar_wait(&s.barriers[0], phase);
      store(out + phase * 8, s.image[first + (threadIdx.x ^ 32)]);
      store(out + phase * 8 + 4, s.image[second + (threadIdx.x ^ 64)]);
    }
  }
};

// [2, 2, 3, 5, 128] by boxes of [2, 2, 2, 2, 64]; a box has a chunk per thread.
inline MappedTensor tensor_at(const void* data) {
  return {data, {128, 5, 3, 2, 2}, {256, 5 * 256, 15 * 256, 30 * 256}, {64, 2, 2, 2, 2}};
}

// Two boxes per phase, at coordinates from Words::numbers.
struct Load : Usual {
  static __device__ void run(const Call& call, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    init_barriers(s, 1);
    const auto load = [&](uint32_t which) {
      int at[5];
      memcpy(at, call.in->numbers + which * 5, sizeof(at));
      ptx::tma_load_5d(&s.image[which * kThreads], &call.map, at[0], at[1], at[2], at[3], at[4], &s.barriers[0]);
    };
    for (uint32_t phase = 0; phase < 2; ++phase) {
      if (threadIdx.x == 0) {
        ptx::mbar_arrive_expect(&s.barriers[0], 2 * kThreads * sizeof(uint4));
        load(phase * 2);
        load(phase * 2 + 1);
      }
      ptx::mbar_wait(&s.barriers[0], phase);
      for (uint32_t which = phase * 2; which < phase * 2 + 2; ++which) {
        store(out + which * 4, s.image[which * kThreads + threadIdx.x]);
      }
    }
  }
};

struct BulkLoad : Usual {
  static __device__ void run(const Call& call, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    init_barriers(s, 1);
    for (uint32_t phase = 0; phase < 2; ++phase) {
      const uint32_t first = phase * kThreads, middle = first + 1 + phase * 100;
      if (threadIdx.x == 0) {
        const auto load = [&](uint32_t begin, uint32_t end) {
          ptx::bulk_load(&s.image[begin], &call.in->image[begin + 1], (end - begin) * sizeof(uint4), &s.barriers[0]);
        };
        ptx::mbar_arrive_expect(&s.barriers[0], kThreads * sizeof(uint4));
        load(first, middle);
        load(middle, first + kThreads);
      }
      ptx::mbar_wait(&s.barriers[0], phase);
      store(out + phase * 4, s.image[first + threadIdx.x]);
    }
  }
};

// In each phase each thread sends value + own rank * 4 + target rank to all CTAs.
struct Tell : Usual {
  static constexpr int kCtas = 4;
  static __device__ void run(const Call& call, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    auto* const places = reinterpret_cast<uint64_t*>(s.image);  // [kCtas, kThreads]
    init_barriers(s, 1);
    ptx::cluster_sync();
    const uint32_t rank = ptx::cluster_rank();
    for (uint32_t phase = 0; phase < 2; ++phase) {
      if (threadIdx.x == 0) ptx::mbar_arrive_expect(&s.barriers[0], kCtas * kThreads * sizeof(uint64_t));
      uint64_t value;
      memcpy(&value, call.in->own[threadIdx.x][phase], sizeof(value));
      for (uint32_t to = 0; to < kCtas; ++to) {
        ptx::tell(&places[rank * kThreads + threadIdx.x], value + rank * 4 + to, &s.barriers[0], to);
      }
      ptx::mbar_wait(&s.barriers[0], phase);
      for (uint32_t from = 0; from < kCtas; ++from) {
        memcpy(out + rank * 16 + phase * 8 + from * 2, &places[from * kThreads + (threadIdx.x ^ 32)], sizeof(value));
      }
      ptx::cluster_sync();  // after all reads; no CTA may exit earlier
    }
  }
};

template <typename Function>
__global__ void __launch_bounds__(Function::kThreads, 1) instruction_sm90_kernel(const __grid_constant__ Call call) {
  Function::run(call, call.out + threadIdx.x * kOut);
}

template <typename Function>
const char* run(const uint32_t* in, uint32_t* out, void* stream, int32_t* cluster) {
  return error_of([=] {
    *cluster = 1;
    Call call{reinterpret_cast<const Words*>(in), out, {}};
    if constexpr (std::is_same_v<Function, Load>) {
      const std::optional<ptx::TensorMap> map = tensor_map(tensor_at(call.in->image));
      if (!map) throw std::runtime_error("the driver refuses the tensor map");
      call.map = *map;
    }
    launch_clusters(instruction_sm90_kernel<Function>, dim3(Function::kCtas), dim3(Function::kThreads), Function::kCtas,
                    sizeof(Shared), stream, call);
  });
}

#define PT_MULTIPLICATIONS(name, type, operands)                                                            \
  {name "/N 64", run<Multiply<type, 64, operands>>}, {name "/N 128", run<Multiply<type, 128, operands>>}, { \
    name "/N 256", run<Multiply<type, 256, operands>>                                                       \
  }
constexpr Instruction kInstructions[] = {
    {"mbar_arrive", run<Phases>},
    {"cp_async_mbar_arrive", run<CopiesArrive>},
    {"tma_load_5d", run<Load>},
    {"bulk_load", run<BulkLoad>},
    {"tell", run<Tell>},
    {"fence_proxy_async", run<ProxyFence>},
    {"matrix_descriptor", run<Descriptor>},
    {"wgmma_wait", run<Groups>},
    {"setmaxnreg", run<Multiply<__half, 256, kKMajor, true>>},
    PT_MULTIPLICATIONS("wgmma_ss/bf16", __nv_bfloat16, kBothShared),
    PT_MULTIPLICATIONS("wgmma_ss/fp16", __half, kBothShared),
    PT_MULTIPLICATIONS("wgmma_rs/K-major/bf16", __nv_bfloat16, kKMajor),
    PT_MULTIPLICATIONS("wgmma_rs/K-major/fp16", __half, kKMajor),
    PT_MULTIPLICATIONS("wgmma_rs/N-major/bf16", __nv_bfloat16, kNMajor),
    PT_MULTIPLICATIONS("wgmma_rs/N-major/fp16", __half, kNMajor),
};
#undef PT_MULTIPLICATIONS

constexpr Instructions kTable{1,
                              kThreads,
                              static_cast<int32_t>(sizeof(Words) / sizeof(uint32_t) / kThreads),
                              kOut,
                              static_cast<int32_t>(std::size(kInstructions)),
                              kInstructions};

// Only in builds with code for compute capability 9.0.
extern "C" PT_EXPORT const void* pagedtree_instructions_sm90() { return &kTable; }

}  // namespace pagedtree::cuda::hopper
