// Runs each function of pagedtree::ptx on given words, for `python -m pagedtree check` to compare with its definition.
#include <iterator>
#include <type_traits>

#include "core/common.h"
#include "core/math.h"
#include "core/numeric.h"
#include "cuda/instructions.cuh"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/mma.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kThreads = 64, kIn = 12, kOut = 4;  // per CTA; words per thread
constexpr int kCtas = 8, kMostOfCluster = 4;

struct Call {
  const uint32_t* in;  // [kThreads, kIn], the same for every CTA
  uint32_t* out;       // [kCtas, kThreads, kOut]
};

struct Shared {
  alignas(128) uint32_t words[kThreads * 4];  // per warp: four 8x8 matrices of 16-bit elements
};

__device__ inline uint32_t* own_words(Shared& s) { return s.words + threadIdx.x * 4; }

// Returns shared memory with each thread's first four words plus `more`.
__device__ inline Shared& filled(const uint32_t* in, uint32_t more = 0) {
  auto& s = ptx::shared<Shared>();
  for (int i = 0; i < 4; ++i) own_words(s)[i] = in[i] + more;
  return s;
}

template <bool kTransposed>
struct LdMatrix {
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    Shared& s = filled(in);
    __syncthreads();
    uint32_t d[4];
    if constexpr (kTransposed) {
      ptx::ldmatrix_x4_trans(d, ptx::smem_addr(own_words(s)));
    } else {
      ptx::ldmatrix_x4(d, ptx::smem_addr(own_words(s)));
    }
    for (int i = 0; i < 4; ++i) out[i] = d[i];
  }
};

template <typename T>
struct Mma {  // words: a[4], b[2], unused[2], d[4]
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    uint32_t a[4];
    float d[4];
    for (int i = 0; i < 4; ++i) a[i] = in[i];
    for (int i = 0; i < 4; ++i) d[i] = ScalarMath::bits<float>(in[8 + i]);
    ptx::mma_m16n8k16<T>(d, a, in[4], in[5]);
    for (int i = 0; i < 4; ++i) out[i] = ScalarMath::bits<uint32_t>(d[i]);
  }
};

struct MmaTf32 {  // words: a[4], b[2], unused[2], d[4]
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    float a[4], d[4];
    for (int i = 0; i < 4; ++i) a[i] = ScalarMath::bits<float>(in[i]);
    for (int i = 0; i < 4; ++i) d[i] = ScalarMath::bits<float>(in[8 + i]);
    ptx::mma_m16n8k8(d, a, ScalarMath::bits<float>(in[4]), ScalarMath::bits<float>(in[5]));
    for (int i = 0; i < 4; ++i) out[i] = ScalarMath::bits<uint32_t>(d[i]);
  }
};

struct CpAsync {  // odd threads get zeros
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    for (int i = 0; i < 4; ++i) own_words(s)[i] = ~0u;
    ptx::cp_async_16(ptx::smem_addr(own_words(s)), in, threadIdx.x % 2 == 0);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    for (int i = 0; i < 4; ++i) out[i] = own_words(s)[i];
  }
};

struct CpAsyncGroups {  // the older of two groups is complete
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    ptx::cp_async_16(ptx::smem_addr(own_words(s)), in);
    ptx::cp_async_commit();
    ptx::cp_async_commit();  // an empty group counts
    ptx::cp_async_wait<1>();
    for (int i = 0; i < 2; ++i) out[i] = own_words(s)[i];
    ptx::cp_async_16(ptx::smem_addr(own_words(s)), in + 4);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    for (int i = 2; i < 4; ++i) out[i] = own_words(s)[i];
  }
};

#define PT_EACH_WORD(Name, word)                                    \
  struct Name {                                                     \
    static __device__ void run(const uint32_t* in, uint32_t* out) { \
      for (int i = 0; i < 4; ++i) out[i] = word;                    \
    }                                                               \
  };
PT_EACH_WORD(Ex2, ScalarMath::bits<uint32_t>(ptx::ex2(ScalarMath::bits<float>(in[i]))))
PT_EACH_WORD(MoveFloat8, move_e4m3(in[i]))
template <typename T>
PT_EACH_WORD(MaxNan, ptx::max_nan<T>(in[i], in[4 + i]))
#undef PT_EACH_WORD

struct Float8 {  // two codes per word
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    for (int i = 0; i < 4; ++i) {
      if constexpr (kConvertsFloat8) {
        out[i] = ptx::half2_from_e4m3(in[i]);
      } else {  // the kernels' path on such GPUs
        const auto pair = bits_as<__half2>(decode_neighbours(in[i]).x);
        out[i] = bits_as<uint32_t>(__hmul2(pair, __float2half2_rn(kDecodedScale<Float8E4M3>)));
      }
    }
  }
};

struct ToFloat8 {  // two numbers per word
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    for (int i = 0; i < 4; ++i) {
      const float low = ScalarMath::bits<float>(in[2 * i]), high = ScalarMath::bits<float>(in[2 * i + 1]);
      if constexpr (kConvertsFloat8) {
        out[i] = ptx::e4m3_from_floats(low, high);
      } else {  // the kernels' path on such GPUs
        out[i] = e4m3_from_float(low) | uint32_t{e4m3_from_float(high)} << 8;
      }
    }
  }
};

struct FetchAdd {  // a word before and after; twice
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    for (int i = 0; i < 2; ++i) {
      own_words(s)[i] = in[i];
      out[2 * i] = ptx::fetch_add(own_words(s) + i, in[4 + i]);
      out[2 * i + 1] = ptx::load_acquire(own_words(s) + i);
    }
  }
};

struct Barrier {  // each warp reads the other's words
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    const Shared& s = filled(in);
    ptx::barrier_sync(1, kThreads);
    for (int i = 0; i < 4; ++i) out[i] = s.words[(threadIdx.x ^ 32) * 4 + i];
  }
};

struct BarrierArrive {  // the second warp waits for the first's words
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    const Shared& s = filled(in);
    if (threadIdx.x < 32) {
      ptx::barrier_arrive(1, kThreads);
    } else {
      ptx::barrier_sync(1, kThreads);
    }
    for (int i = 0; i < 4; ++i) out[i] = s.words[threadIdx.x % 32 * 4 + i];
  }
};

struct Address {  // thread index and byte address of its words
  static __device__ void run(const uint32_t* /*in*/, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    out[0] = ptx::thread_index();
    out[1] = ptx::smem_addr(own_words(s)) - ptx::smem_addr(&s);
    out[2] = ptx::smem_addr(&s) % alignof(Shared);
    out[3] = blockIdx.x;
  }
};

struct Cluster {  // the next CTA's words, and the thread's cluster coordinates
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    Shared& s = filled(in, ptx::cluster_rank());
    ptx::cluster_sync();
    const uint32_t next = (ptx::cluster_rank() + 1) % ptx::cluster_size();
    for (int i = 0; i < 3; ++i) out[i] = *ptx::of_cta(own_words(s) + i, next);
    out[3] = ptx::cluster_index() << 16 | ptx::cluster_size() << 8 | ptx::cluster_rank();
    ptx::cluster_sync();
  }
};

template <typename Function>
__global__ void __launch_bounds__(kThreads) instruction_kernel(const __grid_constant__ Call call) {
  ptx::let_next_kernel_start();
  ptx::wait_for_kernels_before();  // no effect outside such launches
  uint32_t out[kOut];
  Function::run(call.in + threadIdx.x * kIn, out);
  for (int i = 0; i < kOut; ++i) call.out[(blockIdx.x * kThreads + threadIdx.x) * kOut + i] = out[i];
}

template <typename Function>
const char* run(const uint32_t* in, uint32_t* out, void* stream, int32_t* cluster) {
  return error_of([=] {
    const int most = std::is_same_v<Function, Cluster> ? max_cluster(instruction_kernel<Function>) : 1;
    *cluster = most < kMostOfCluster ? 1 : kMostOfCluster;
    launch_clusters(instruction_kernel<Function>, dim3(kCtas), dim3(kThreads), static_cast<unsigned>(*cluster),
                    sizeof(Shared), stream, Call{in, out});
  });
}

constexpr Instruction kInstructions[] = {
    {"ldmatrix_x4", run<LdMatrix<false>>},
    {"ldmatrix_x4_trans", run<LdMatrix<true>>},
    {"mma_m16n8k16/bf16", run<Mma<__nv_bfloat16>>},
    {"mma_m16n8k16/fp16", run<Mma<__half>>},
    {"mma_m16n8k8/tf32", run<MmaTf32>},
    {"cp_async_16", run<CpAsync>},
    {"cp_async_wait", run<CpAsyncGroups>},
    {"ex2", run<Ex2>},
    {"max_nan/fp32", run<MaxNan<float>>},
    {"max_nan/bf16", run<MaxNan<__nv_bfloat16>>},
    {"max_nan/fp16", run<MaxNan<__half>>},
    {"half2_from_e4m3", run<Float8>},
    {"e4m3_from_floats", run<ToFloat8>},
    {"move_e4m3", run<MoveFloat8>},
    {"fetch_add", run<FetchAdd>},
    {"barrier_sync", run<Barrier>},
    {"barrier_arrive", run<BarrierArrive>},
    {"smem_addr", run<Address>},
    {"of_cta", run<Cluster>},
};

constexpr Instructions kTable{kCtas,        kThreads, kIn, kOut, static_cast<int32_t>(std::size(kInstructions)),
                              kInstructions};

}  // namespace

extern "C" PT_EXPORT const void* pagedtree_instructions() { return &kTable; }

}  // namespace pagedtree::cuda
