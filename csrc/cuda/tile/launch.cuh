// Launches kernels on a CUDA stream, or on the CPU under simt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

#include "cuda/tile/known.h"
#else
#include "simt/launch.h"
#endif

namespace pagedtree::cuda {

struct DeviceLimits {
  int num_sms;
  int max_shared_bytes;  // per CTA
  int capability;        // 90 for 9.0
};

// Returns the grid in which each of `count` items has a thread.
inline dim3 grid_of(int64_t count, int threads) { return dim3(static_cast<unsigned>((count + threads - 1) / threads)); }

#if defined(__CUDACC__)

// True for errors of an earlier kernel, which leave the device unusable: all later calls of the process return them.
inline bool is_of_earlier_kernel(cudaError_t status) {
  switch (status) {
    case cudaErrorECCUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
      return true;
    default:
      return false;
  }
}

// Throws for a failed call. Clears the error first, so that no other library reports it.
inline void check_cuda(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  const std::string whose = is_of_earlier_kernel(status) ? " (in a kernel before, pagedtree's or not)" : "";
  throw std::runtime_error("CUDA: " + what + ": " + cudaGetErrorString(status) + whose);
}

inline int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

using KernelOnDevice = std::pair<int, const void*>;

template <typename... Params>
KernelOnDevice on_current_device(void (*kernel)(Params...)) {
  return {current_device(), reinterpret_cast<const void*>(kernel)};
}

inline DeviceLimits device_limits() {
  static Known<int, DeviceLimits> known;
  const int device = current_device();
  return known.at(device, [&] {
    DeviceLimits limits{};
    check_cuda(cudaDeviceGetAttribute(&limits.num_sms, cudaDevAttrMultiProcessorCount, device), "number of SMs");
    check_cuda(cudaDeviceGetAttribute(&limits.max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "shared memory of a block");
    int major = 0, minor = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
    check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "compute capability");
    limits.capability = major * 10 + minor;
    return limits;
  });
}

template <typename... Params>
void check_kernel(cudaError_t status, void (*kernel)(Params...)) {
  if (status == cudaSuccess) return;
  const char* name = "?";
  cudaFuncGetName(&name, reinterpret_cast<const void*>(kernel));
  check_cuda(status, "launch of " + std::string(name));
}

template <typename... Params>
const cudaFuncAttributes& attributes_of(void (*kernel)(Params...)) {
  static Known<KernelOnDevice, cudaFuncAttributes> known;
  return known.at(on_current_device(kernel), [&] {
    cudaFuncAttributes attributes{};
    check_kernel(cudaFuncGetAttributes(&attributes, kernel), kernel);
    return attributes;
  });
}

// Returns the architecture of the loaded code, such as 90. It can be older than the device.
template <typename... Params>
int code_version(void (*kernel)(Params...)) {
  return attributes_of(kernel).ptxVersion;
}

// Returns the largest cluster: 16 if granted to CTAs that fill an SM, else the portable 8; 1 if the code has none.
template <typename... Params>
int max_cluster(void (*kernel)(Params...)) {
  if (code_version(kernel) < 90) return 1;
  static Known<KernelOnDevice, int> known;
  return known.at(on_current_device(kernel), [&] {
    const cudaFuncAttributes& attributes = attributes_of(kernel);
    cudaLaunchAttribute in_clusters{};
    in_clusters.id = cudaLaunchAttributeClusterDimension;
    in_clusters.val.clusterDim = {16, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(16);
    config.blockDim = dim3(static_cast<unsigned>(attributes.maxThreadsPerBlock));
    const int shared_bytes = device_limits().max_shared_bytes - static_cast<int>(attributes.sharedSizeBytes);
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.attrs = &in_clusters;
    config.numAttrs = 1;
    int clusters = 0;
    const bool granted =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) == cudaSuccess &&
        cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess && clusters > 0;
    if (!granted) cudaGetLastError();  // a refusal is not an error
    return granted ? 16 : 8;
  });
}

// Raises the kernel's limit of shared memory on the current device. Smaller requests skip the driver call.
template <typename... Params>
void allow_shared(void (*kernel)(Params...), size_t bytes) {
  constexpr size_t kWithoutAsking = 48 << 10;
  if (bytes <= kWithoutAsking) return;
  static Known<KernelOnDevice, std::atomic<size_t>> known;
  std::atomic<size_t>& allowed = known.at(on_current_device(kernel), [] { return std::atomic<size_t>(0); });
  if (bytes <= allowed.load(std::memory_order_acquire)) return;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (bytes <= allowed.load(std::memory_order_acquire)) return;
  check_kernel(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
               kernel);
  // Minimizes L1: with the driver's default carveout fewer CTAs may fit on an SM.
  check_kernel(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
      kernel);
  allowed.store(bytes, std::memory_order_release);
}

// Launches with an optional attribute. An empty grid is no launch.
template <typename... Params, typename... Arguments>
void launch_with(const cudaLaunchAttribute* attribute, void (*kernel)(Params...), dim3 grid, dim3 block,
                 size_t shared_bytes, void* stream, Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  allow_shared(kernel, shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[1];
  if (attribute != nullptr) attributes[0] = *attribute;
  config.attrs = attributes;
  config.numAttrs = attribute != nullptr ? 1 : 0;
  check_kernel(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), kernel);
}

template <typename... Params, typename... Arguments>
void launch_clusters(void (*kernel)(Params...), dim3 grid, dim3 block, unsigned cluster, size_t shared_bytes,
                     void* stream, Arguments&&... arguments) {
  cudaLaunchAttribute in_clusters{};
  in_clusters.id = cudaLaunchAttributeClusterDimension;
  in_clusters.val.clusterDim = {cluster, 1, 1};
  launch_with(cluster > 1 ? &in_clusters : nullptr, kernel, grid, block, shared_bytes, stream,
              std::forward<Arguments>(arguments)...);
}

// Overlaps the kernel with the end of the previous one if the code can (programmatic dependent launch). It must not
// access memory or let another start before ptx::wait_for_kernels_before().
template <typename... Params, typename... Arguments>
void launch_behind(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
                   Arguments&&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  launch_with(code_version(kernel) >= 90 ? &early : nullptr, kernel, grid, block, shared_bytes, stream,
              std::forward<Arguments>(arguments)...);
}

#else

inline int current_device() { return 0; }

inline DeviceLimits device_limits() {
  const simt::Device device = simt::device_from_environment();
  return {device.num_sms, device.max_shared_bytes, 90};
}

template <typename... Params>
int max_cluster(void (* /*kernel*/)(Params...)) {
  return simt::device_from_environment().max_cluster;
}

template <typename... Params, typename... Arguments>
void launch_clusters(void (*kernel)(Params...), dim3 grid, dim3 block, unsigned cluster, size_t shared_bytes,
                     void* /*stream*/, Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  simt::launch(kernel, grid, block, cluster, shared_bytes, std::forward<Arguments>(arguments)...);
}

template <typename... Params, typename... Arguments>
void launch_behind(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
                   Arguments&&... arguments) {
  launch_clusters(kernel, grid, block, 1, shared_bytes, stream, std::forward<Arguments>(arguments)...);
}

#endif

template <typename... Params, typename... Arguments>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
            Arguments&&... arguments) {
  launch_clusters(kernel, grid, block, 1, shared_bytes, stream, std::forward<Arguments>(arguments)...);
}

}  // namespace pagedtree::cuda
