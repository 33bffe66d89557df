// Replaces CUDA's runtime under nvcc's objects of csrc/cuda, without a GPU: records every call, refuses it if such a
// device would, executes no kernel. support/recorded.py loads it as simt, so that Torch's ops on CPU tensors reach it.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cuda/backend.h"

namespace {

// Identifies the caller's stream; a launch on another is a fault.
char caller_s_stream;

struct DeviceKind {
  int capability, num_sms, max_shared_bytes, largest_cluster;
};

struct Recorder {
  std::mutex mutex;
  std::ostringstream calls;  // one per line
  std::vector<DeviceKind> devices;
  int device = 0;
  std::map<const void*, std::string> kernels;                // symbols
  std::map<std::pair<int, const void*>, int> shared_bytes;   // a kernel's limit on a device
  std::map<std::pair<int, const void*>, int> large_cluster;  // more than 8 CTAs allowed
  int failing = -1;                                          // the next failing call; -1: none
  cudaError_t failure = cudaErrorUnknown;                    // its error
  cudaError_t last_error = cudaSuccess;
};

Recorder& recorder() {
  static Recorder instance;
  return instance;
}

const DeviceKind& device() { return recorder().devices.at(static_cast<size_t>(recorder().device)); }

// Records the call; returns an error if it fails or is wrong.
template <typename... Parts>
cudaError_t called(bool is_right, const Parts&... parts) {
  Recorder& r = recorder();
  const bool fails = r.failing >= 0 && r.failing-- == 0;
  ((r.calls << parts << ' '), ...);
  r.calls << (fails ? "fails" : is_right ? "ok" : "refused") << '\n';
  if (fails || !is_right) r.last_error = fails ? r.failure : cudaErrorInvalidValue;
  return fails ? r.failure : is_right ? cudaSuccess : cudaErrorInvalidValue;
}

const std::string& symbol_of(const void* kernel) { return recorder().kernels.at(kernel); }

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                      const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const std::lock_guard lock(recorder().mutex);
  *map = {};
  std::ostringstream numbers;
  bool is_right = swizzle == CU_TENSOR_MAP_SWIZZLE_128B && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
                  reinterpret_cast<uintptr_t>(map) % 64 == 0 && box[0] * 2 == 128;
  for (cuuint32_t i = 0; i < rank; ++i) {
    numbers << sizes[i] << ':' << box[i] << ':' << (i > 0 ? strides[i - 1] : 2) << (i + 1 < rank ? "," : "");
    is_right = is_right && sizes[i] >= 1 && sizes[i] <= uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256;
    if (i > 0) is_right = is_right && strides[i - 1] % 16 == 0 && strides[i - 1] < uint64_t{1} << 40;
  }
  return called(is_right, "cuTensorMapEncodeTiled", numbers.str()) == cudaSuccess ? CUDA_SUCCESS
                                                                                  : CUDA_ERROR_INVALID_VALUE;
}

cudaError_t launched(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                     unsigned cluster, int early) {
  Recorder& r = recorder();
  const auto known = r.shared_bytes.find({r.device, kernel});
  const size_t allowed = known == r.shared_bytes.end() ? 48 << 10 : static_cast<size_t>(known->second);
  const auto most = static_cast<unsigned>(r.large_cluster.count({r.device, kernel}) > 0 ? 16 : 8);
  const bool has_clusters = cluster == 1 || (device().capability >= 90 && cluster <= most && grid.x % cluster == 0);
  const bool is_right = shared_bytes <= allowed && has_clusters && (early == 0 || device().capability >= 90);
  std::ostringstream sizes;
  sizes << grid.x << ',' << grid.y << ',' << grid.z << ' ' << block.x << ',' << block.y << ',' << block.z << ' '
        << shared_bytes << ' ' << cluster << ' ' << early << ' '
        << (reinterpret_cast<char*>(stream) == &caller_s_stream ? "caller" : "other");
  return called(is_right, "launch", symbol_of(kernel), sizes.str());
}

// Runs every op of the CUDA backend on the caller's stream, after a line with its name.
class Recorded final : public pagedtree::Backend {
 public:
  constexpr Recorded() : Backend("simt", cuda_.support, cuda_.max_option_rows) {}

#define PT_RECORDED(op, Params, ...)                                                           \
  void op(const pagedtree::Params& params, const pagedtree::ExecContext& ctx) const override { \
    begin(#op);                                                                                \
    cuda_.op(params, on_stream(ctx));                                                          \
  }
  PT_EACH_OP(PT_RECORDED, PT_RECORDED)
#undef PT_RECORDED
  int64_t tree_attention_scratch(const pagedtree::TreeAttentionParams& params,
                                 const pagedtree::ExecContext& ctx) const override {
    begin("tree_attention_scratch");
    return cuda_.tree_attention_scratch(params, on_stream(ctx));
  }

 private:
  static void begin(const char* op) {
    const std::lock_guard lock(recorder().mutex);
    recorder().calls << "op " << op << '\n';
  }
  static pagedtree::ExecContext on_stream(pagedtree::ExecContext ctx) {
    ctx.stream = &caller_s_stream;
    return ctx;
  }
  static constexpr pagedtree::cuda::CudaBackend cuda_{"simt"};
};

}  // namespace

// ---- for support/recorded.py

#define RECORDED_EXPORT extern "C" __attribute__((visibility("default")))

RECORDED_EXPORT const pagedtree::Backend* pagedtree_backend() {
  static constexpr Recorded only;
  return &only;
}
RECORDED_EXPORT const char* pagedtree_backend_error() { return ""; }
// Adds an unused device and returns its number; capability is 90 for 9.0.
RECORDED_EXPORT int recorded_add_device(int capability, int num_sms, int max_shared_bytes, int largest_cluster) {
  recorder().devices.push_back({capability, num_sms, max_shared_bytes, largest_cluster});
  return static_cast<int>(recorder().devices.size()) - 1;
}
RECORDED_EXPORT void recorded_use_device(int number) { recorder().device = number; }
// Makes the call of this number from now fail with `error`; -1: none.
RECORDED_EXPORT void recorded_fail(int call, int error) {
  recorder().failing = call;
  recorder().failure = static_cast<cudaError_t>(error);
}
// Returns new lines, valid until the next call.
RECORDED_EXPORT const char* recorded_calls() {
  static std::string taken;
  taken = recorder().calls.str();
  recorder().calls.str("");
  return taken.c_str();
}
RECORDED_EXPORT int recorded_last_error() { return recorder().last_error; }

// ---- the runtime

extern "C" {

void** __cudaRegisterFatBinary(void* binary) {
  static void* handle;
  handle = binary;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  recorder().kernels[host] = name;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
unsigned __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return 1; }  // <<< >>> is unused
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorUnknown; }

const char* cudaGetErrorString(cudaError_t error) { return error == cudaErrorInvalidValue ? "refused" : "planted"; }
cudaError_t cudaGetLastError() {
  const std::lock_guard lock(recorder().mutex);
  return std::exchange(recorder().last_error, cudaSuccess);
}
cudaError_t cudaFuncGetName(const char** name, const void* kernel) {
  *name = symbol_of(kernel).c_str();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* number) {
  const std::lock_guard lock(recorder().mutex);
  *number = recorder().device;
  return called(true, "cudaGetDevice");
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int number) {
  const std::lock_guard lock(recorder().mutex);
  const DeviceKind& kind = recorder().devices.at(static_cast<size_t>(number));
  bool is_known = true;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = kind.num_sms;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kind.max_shared_bytes;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = kind.capability / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = kind.capability % 10;
      break;
    default:
      is_known = false;
  }
  return called(is_known, "cudaDeviceGetAttribute", static_cast<int>(attribute));
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  const std::lock_guard lock(recorder().mutex);
  std::snprintf(properties->name, sizeof(properties->name), "recorded");
  return called(true, "cudaGetDeviceProperties");
}
cudaError_t cudaDriverGetVersion(int* version) {
  const std::lock_guard lock(recorder().mutex);
  *version = CUDART_VERSION;
  return called(true, "cudaDriverGetVersion");
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  const std::lock_guard lock(recorder().mutex);
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->ptxVersion = attributes->binaryVersion = device().capability;  // as if built for all architectures
  return called(true, "cudaFuncGetAttributes", symbol_of(kernel));
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  const std::lock_guard lock(recorder().mutex);
  Recorder& r = recorder();
  bool is_right = true;
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) is_right = value <= device().max_shared_bytes;
  const cudaError_t status =
      called(is_right, "cudaFuncSetAttribute", symbol_of(kernel), static_cast<int>(attribute), value);
  if (status != cudaSuccess) return status;
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) r.shared_bytes[{r.device, kernel}] = value;
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) r.large_cluster[{r.device, kernel}] = value;
  return status;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel, const cudaLaunchConfig_t* config) {
  const std::lock_guard lock(recorder().mutex);
  const auto cluster = static_cast<int>(config->attrs[0].val.clusterDim.x);
  *clusters = cluster <= device().largest_cluster ? 1 : 0;
  return called(true, "cudaOccupancyMaxActiveClusters", symbol_of(kernel), cluster);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const std::lock_guard lock(recorder().mutex);
  *function = reinterpret_cast<void*>(&encode_tiled);
  *found = cudaDriverEntryPointSuccess;
  return called(std::string(name) == "cuTensorMapEncodeTiled", "cudaGetDriverEntryPointByVersion", name);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  const std::lock_guard lock(recorder().mutex);
  unsigned cluster = 1;
  int early = 0;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) cluster = attribute.val.clusterDim.x;
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      early = attribute.val.programmaticStreamSerializationAllowed;
    }
  }
  return launched(kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream, cluster, early);
}

}  // extern "C"
