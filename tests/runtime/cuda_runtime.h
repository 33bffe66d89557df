// A CUDA runtime without a GPU, as far as cuda/tile/launch.cuh uses it: two devices that refuse what real ones refuse,
// and count what they are asked.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned of_x = 1, unsigned of_y = 1, unsigned of_z = 1) : x(of_x), y(of_y), z(of_z) {}
};

enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorECCUncorrectable,
  cudaErrorIllegalAddress,
  cudaErrorLaunchTimeout,
  cudaErrorAssert,
  cudaErrorHardwareStackError,
  cudaErrorIllegalInstruction,
  cudaErrorMisalignedAddress,
  cudaErrorInvalidAddressSpace,
  cudaErrorInvalidPc,
  cudaErrorLaunchFailure
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed
};
enum { cudaSharedmemCarveoutMaxShared = 100 };
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension, cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
using cudaStream_t = struct CUstream_st*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
  int maxThreadsPerBlock, ptxVersion;
};

struct Runtime {
  static constexpr int kMaxShared = 227 << 10;

  std::mutex mutex;
  std::map<std::pair<int, const void*>, int> allowed;  // dynamic shared memory of (device, kernel)
  int set_attributes = 0, read_attributes = 0, device_attributes = 0, launches = 0;
};
inline Runtime runtime;
inline thread_local int device_of_thread = 0;

inline const char* cudaGetErrorString(cudaError_t) { return "invalid argument"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaFuncGetName(const char** name, const void*) {
  *name = "kernel";
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const std::lock_guard lock(runtime.mutex);
  ++runtime.device_attributes;
  const int values[] = {132 + device, Runtime::kMaxShared, 9, 0};
  *value = values[attribute];
  return cudaSuccess;
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(int)) {
  const std::lock_guard lock(runtime.mutex);
  ++runtime.read_attributes;
  *attributes = {1024, 256, 90};
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(void (*kernel)(int), cudaFuncAttribute attribute, int value) {
  const std::lock_guard lock(runtime.mutex);
  ++runtime.set_attributes;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value > Runtime::kMaxShared) return cudaErrorInvalidValue;
  runtime.allowed[{device_of_thread, reinterpret_cast<const void*>(kernel)}] = value;
  return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void (*)(int), const cudaLaunchConfig_t*) {
  *clusters = 1;
  return cudaSuccess;
}
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(int), int) {
  const std::lock_guard lock(runtime.mutex);
  const auto found = runtime.allowed.find({device_of_thread, reinterpret_cast<const void*>(kernel)});
  const size_t allowed = found == runtime.allowed.end() ? 48 << 10 : static_cast<size_t>(found->second);
  if (config->dynamicSmemBytes > allowed) return cudaErrorInvalidValue;
  ++runtime.launches;
  return cudaSuccess;
}
