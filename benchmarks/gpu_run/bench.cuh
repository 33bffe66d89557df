// What calibration.cu measures with: the device, its memory, its clocks, and the file of figures.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

namespace calibration {

// Host ------------------------------------------------------------------------------------------------------------

constexpr int kKb = 1024, kMb = 1024 * 1024;
constexpr int kMaxCycles = 4096;
constexpr char kCycles[] = "cycles", kUs[] = "us";

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  exit(1);
}

struct Parameter {
  Parameter(const char* name, std::integral auto number) : name(name), value(std::to_string(number)) {}
  Parameter(const char* name, const char* text) : name(name), value('"' + std::string(text) + '"') {}
  std::string name, value;
};
using Parameters = std::initializer_list<Parameter>;

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Launch {
  int ctas = 1, threads = 32;
  int shared = 0;
  int cluster = 1;
  bool overlaps = false;  // programmatic dependent launch
};

// The device's memory, and the file of figures.
class Bench {
 public:
  explicit Bench(const char* path) : file_(fopen(path, "w")) {
    if (!file_) {
      perror(path);
      exit(1);
    }
    check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    check(cudaStreamCreate(&stream), "cudaStreamCreate");
    check(cudaMalloc(&data, kDataBytes), "cudaMalloc");
    check(cudaMalloc(&other_, kOtherBytes), "cudaMalloc");
    check(cudaMalloc(&cycles, kMaxCycles * sizeof(long long)), "cudaMalloc");
    check(cudaMalloc(&sink, kSinkBytes), "cudaMalloc");
    check(cudaMemset(data, 0, kDataBytes), "cudaMemset");
    check(cudaMemset(other_, 0, kOtherBytes), "cudaMemset");
  }

  void describe();
  void figure(const char* name, double value, const char* unit, Parameters parameters);
  void forget_data();  // leaves nothing but zeros of another buffer in L2
  std::vector<double> counted(int count);

  template <typename... Expected, typename... Given>
  void launch(const Launch& how, void (*kernel)(Expected...), Given... arguments) {
    Attributes attributes;
    const cudaLaunchConfig_t config = configured(how, attributes);
    check(cudaLaunchKernelEx(&config, kernel, Expected(arguments)...), "launch");
  }
  template <typename... Expected>
  int clusters_at_once(const Launch& how, void (*kernel)(Expected...)) {
    Attributes attributes;
    const cudaLaunchConfig_t config = configured(how, attributes);
    int count = 0;
    return cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess ? count : -1;
  }
  template <typename... Expected>
  void allow(int shared, void (*kernel)(Expected...)) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "shared memory");
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cluster of 16");
  }
  void clear(size_t bytes) { check(cudaMemsetAsync(data, 0, bytes, stream), "cudaMemsetAsync"); }
  int multiprocessors() const { return device.multiProcessorCount; }
  double graph_us(int calls, const std::function<void()>& record);  // a call's time in a graph of `calls` of them

  static constexpr size_t kDataBytes = size_t{1} << 30, kOtherBytes = 256 * kMb, kSinkBytes = 4 * kMb;
  cudaDeviceProp device;
  cudaStream_t stream;
  char* data;         // kDataBytes
  long long* cycles;  // kMaxCycles
  uint32_t* sink;     // where results go, so that they are computed; kSinkBytes

 private:
  using Attributes = std::array<cudaLaunchAttribute, 2>;

  cudaLaunchConfig_t configured(const Launch& how, Attributes& attributes);

  FILE* file_;
  char* other_;
};

// The configuration points at `attributes`.
inline cudaLaunchConfig_t Bench::configured(const Launch& how, Attributes& attributes) {
  attributes = {};
  unsigned count = 0;
  if (how.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {unsigned(how.cluster), 1, 1};
  }
  if (how.overlaps) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  return {dim3(how.ctas), dim3(how.threads), size_t(how.shared), stream, attributes.data(), count};
}

inline int attribute(cudaDeviceAttr which) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, 0), "cudaDeviceGetAttribute");
  return value;
}

inline void Bench::describe() {
  int driver = 0, runtime = 0;
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  const time_t now = time(nullptr);
  char date[32];
  strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&now));
  fprintf(file_,
          "{\"device\": \"%s\", \"driver\": %d, \"runtime\": %d, \"multiprocessors\": %d, \"sm_mhz\": %d, "
          "\"memory_mhz\": %d, \"l2_bytes\": %d, \"date\": \"%s\"}\n",
          device.name, driver, runtime, device.multiProcessorCount, attribute(cudaDevAttrClockRate) / 1000,
          attribute(cudaDevAttrMemoryClockRate) / 1000, device.l2CacheSize, date);
  printf("%s, %d multiprocessors, driver %d\n", device.name, device.multiProcessorCount, driver);
}

inline void Bench::figure(const char* name, double value, const char* unit, Parameters parameters) {
  fprintf(file_, "{\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\"", name, value, unit);
  printf("%s", name);
  for (const Parameter& parameter : parameters) {
    fprintf(file_, ", \"%s\": %s", parameter.name.c_str(), parameter.value.c_str());
    printf(", %s %s", parameter.name.c_str(), parameter.value.c_str());
  }
  fputs("}\n", file_);
  printf(": %.4g %s\n", value, unit);
  fflush(file_);
  fflush(stdout);
}

inline std::vector<double> Bench::counted(int count) {
  std::vector<long long> found(count);
  check(cudaStreamSynchronize(stream), "kernel");
  check(cudaMemcpy(found.data(), cycles, count * sizeof(long long), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return {found.begin(), found.end()};
}

inline double Bench::graph_us(int calls, const std::function<void()>& record) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  for (int i = 0; i < calls; ++i) record();
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  check(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
  std::vector<double> found;
  for (int i = 0; i < 21; ++i) {
    float ms = 0;
    check(cudaEventRecord(begin, stream), "cudaEventRecord");
    check(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    check(cudaEventSynchronize(end), "graph");
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    found.push_back(ms * 1e3 / calls);
  }
  check(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check(cudaEventDestroy(begin), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
  return median(found);
}

// Device ----------------------------------------------------------------------------------------------------------

__device__ long long now() {
  long long cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}

__device__ long long nanoseconds() {
  long long ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

template <int kTimes, typename Step>
__device__ long long cycles_of(Step step) {
  const long long begin = now();
#pragma unroll 8
  for (int i = 0; i < kTimes; ++i) step(i);
  return now() - begin;
}

// Each thread's 16-byte words of `words`, four in flight; CTAs take turns.
__device__ uint32_t sum_of(const uint4* words, int64_t count) {
  uint32_t sum = 0;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += 4 * stride) {
    uint4 four[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) four[j] = i + j * stride < count ? __ldcg(words + i + j * stride) : uint4{};
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += four[j].x ^ four[j].y ^ four[j].z ^ four[j].w;
  }
  return sum;
}

static __global__ void __launch_bounds__(512)
    read_all(const uint4* words, int64_t count, uint32_t* sink, long long* cycles) {
  const long long begin = now();
  const uint32_t sum = sum_of(words, count);
  __syncthreads_or(sum == 1);  // all of the CTA's words are there
  if (threadIdx.x == 0) cycles[blockIdx.x] = now() - begin;
  sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

inline void Bench::forget_data() {
  launch({.ctas = 2 * device.multiProcessorCount, .threads = 512}, read_all, reinterpret_cast<const uint4*>(other_),
         int64_t(kOtherBytes / 16), sink, cycles);
}

}  // namespace calibration
