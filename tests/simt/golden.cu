// Prints what each function of pagedtree::ptx gives for fixed random inputs: compiled by nvcc it says what the GPU
// does, compiled for simt what simt takes it to do. compare_golden.py tells the two apart.
//
// A line is "NAME: hex words", one line for each function and input, "NAME: absent" where the GPU lacks it.
#include <cstdio>
#include <random>
#include <vector>

#include "cuda/tile/launch.cuh"
#include "cuda/tile/ptx.cuh"

namespace golden {

namespace ptx = pagedtree::ptx;

constexpr int kLanes = 32, kIn = 12, kOut = 4;  // words of a lane

struct Call {
  const uint32_t* in;  // [kLanes, kIn]
  uint32_t* out;       // [kLanes, kOut]
};

struct Shared {
  alignas(128) uint32_t words[32 * 4];  // four 8x8 matrices of 16-bit elements
};

__device__ inline float as_float(uint32_t word) {
  float value;
  memcpy(&value, &word, sizeof(value));
  return value;
}
__device__ inline uint32_t as_word(float value) {
  uint32_t word;
  memcpy(&word, &value, sizeof(word));
  return word;
}

struct LdMatrix {
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    for (int i = 0; i < 4; ++i) s.words[threadIdx.x * 4 + i] = in[i];
    __syncthreads();
    uint32_t d[4];
    ptx::ldmatrix_x4(d, ptx::smem_addr(s.words + threadIdx.x * 4));
    for (int i = 0; i < 4; ++i) out[i] = d[i];
  }
};

struct LdMatrixTrans {
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    for (int i = 0; i < 4; ++i) s.words[threadIdx.x * 4 + i] = in[i];
    __syncthreads();
    uint32_t d[4];
    ptx::ldmatrix_x4_trans(d, ptx::smem_addr(s.words + threadIdx.x * 4));
    for (int i = 0; i < 4; ++i) out[i] = d[i];
  }
};

// Inputs become numbers near 1: random words would be NaN now and then.
template <typename T>
__device__ inline uint32_t two_numbers(uint32_t word) {
  T pair[2];
  for (int i = 0; i < 2; ++i) {
    const float value = (static_cast<float>(word >> 16 * i & 0xffff) - 32768.0f) / 16384.0f;
    if constexpr (std::is_same_v<T, __half>) {
      pair[i] = __float2half(value);
    } else {
      pair[i] = __float2bfloat16(value);
    }
  }
  memcpy(&word, pair, sizeof(word));
  return word;
}

template <typename T>
struct Mma {
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    uint32_t a[4];
    float d[4];
    for (int i = 0; i < 4; ++i) a[i] = two_numbers<T>(in[i]);
    for (int i = 0; i < 4; ++i) d[i] = (static_cast<float>(in[6 + i] & 0xffffff) - 8388608.0f) / 4194304.0f;
    ptx::mma_m16n8k16<T>(d, a, two_numbers<T>(in[4]), two_numbers<T>(in[5]));
    for (int i = 0; i < 4; ++i) out[i] = as_word(d[i]);
  }
};

struct CpAsync {  // even lanes copy, odd ones get zeros
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    ptx::cp_async_16(ptx::smem_addr(s.words + threadIdx.x * 4), in, threadIdx.x % 2 == 0);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    for (int i = 0; i < 4; ++i) out[i] = s.words[threadIdx.x * 4 + i];
  }
};

struct Ex2 {  // of numbers in [-128, 128)
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    for (int i = 0; i < 4; ++i) {
      out[i] = as_word(ptx::ex2((static_cast<float>(in[i] & 0xffffff) - 8388608.0f) / 65536.0f));
    }
  }
};

struct OfCta {  // in a cluster: what the next CTA has in shared memory, and who one is
  static constexpr unsigned kCtas = 4;
  static __device__ void run(const uint32_t* in, uint32_t* out) {
    auto& s = ptx::shared<Shared>();
    for (uint32_t i = 0; i < 4; ++i) s.words[threadIdx.x * 4 + i] = in[i] + ptx::cluster_rank();
    ptx::cluster_sync();
    const uint32_t next = (ptx::cluster_rank() + 1) % ptx::cluster_size();
    for (int i = 0; i < 3; ++i) out[i] = *ptx::of_cta(&s.words[threadIdx.x * 4 + i], next);
    out[3] = ptx::cluster_index() << 16 | ptx::cluster_size() << 8 | ptx::cluster_rank();
    ptx::cluster_sync();
  }
};

template <typename Function>
constexpr unsigned kCtasOf = 1;
template <>
constexpr unsigned kCtasOf<OfCta> = OfCta::kCtas;

template <typename Function>
__global__ void __launch_bounds__(kLanes) call_kernel(const __grid_constant__ Call call) {
  Function::run(call.in + threadIdx.x * kIn, call.out + (blockIdx.x * kLanes + threadIdx.x) * kOut);
}

template <typename Function>
void launch(const Call& call) {
  constexpr unsigned kCtas = kCtasOf<Function>;
  pagedtree::cuda::launch_clusters(call_kernel<Function>, dim3(2 * kCtas), dim3(kLanes), kCtas, sizeof(Shared), nullptr,
                                   call);
}

// Copies of `in` and `out` where kernels reach them.
template <typename Function>
void run_where_it_is(const std::vector<uint32_t>& in, std::vector<uint32_t>& out) {
#if defined(__CUDACC__)
  using pagedtree::cuda::check_cuda;
  uint32_t *device_in = nullptr, *device_out = nullptr;
  check_cuda(cudaMalloc(&device_in, in.size() * 4), "cudaMalloc");
  check_cuda(cudaMalloc(&device_out, out.size() * 4), "cudaMalloc");
  check_cuda(cudaMemcpy(device_in, in.data(), in.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  launch<Function>({device_in, device_out});
  check_cuda(cudaMemcpy(out.data(), device_out, out.size() * 4, cudaMemcpyDeviceToHost), "cudaMemcpy");
  check_cuda(cudaFree(device_in), "cudaFree");
  check_cuda(cudaFree(device_out), "cudaFree");
#else
  std::vector<uint4> aligned(in.size() / 4);
  std::memcpy(aligned.data(), in.data(), in.size() * 4);
  launch<Function>({reinterpret_cast<const uint32_t*>(aligned.data()), out.data()});
#endif
}

template <typename Function>
void print(const char* name) {
  constexpr unsigned kCtas = kCtasOf<Function>;
  if (static_cast<int>(kCtas) > pagedtree::cuda::max_cluster(call_kernel<Function>)) {
    std::printf("%s: absent\n", name);
    return;
  }
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 8; ++repeat) {
    std::vector<uint32_t> in(kLanes * kIn), out(2 * kCtas * kLanes * kOut, 0);
    for (uint32_t& word : in) word = random();
    run_where_it_is<Function>(in, out);
    std::printf("%s:", name);
    for (const uint32_t word : out) std::printf(" %08x", word);
    std::printf("\n");
  }
}

}  // namespace golden

int main() {
  golden::print<golden::LdMatrix>("ldmatrix_x4");
  golden::print<golden::LdMatrixTrans>("ldmatrix_x4_trans");
  golden::print<golden::Mma<__nv_bfloat16>>("mma_m16n8k16<bf16>");
  golden::print<golden::Mma<__half>>("mma_m16n8k16<fp16>");
  golden::print<golden::CpAsync>("cp_async_16");
  golden::print<golden::Ex2>("ex2");
  golden::print<golden::OfCta>("of_cta");
}
