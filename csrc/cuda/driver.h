#pragma once

#include <string>

namespace pagedtree::cuda {

// Returns why a driver for CUDA `driver` cannot run a build with CUDA `runtime` (12080: 12.8), or an empty string. The
// runtime is static; a driver supports its own and earlier major versions.
inline std::string driver_error(int driver, int runtime) {
  // First CUDA with more than 4 KB of parameters, which compact_kv needs for the addresses of 128 tensors.
  constexpr int kLargeParameters = 12010;
  const auto text = [](int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  const std::string is_for = "the NVIDIA driver is for CUDA " + text(driver);
  if (driver / 1000 < runtime / 1000) {
    return is_for + ", but pagedtree is built with CUDA " + text(runtime) + ": update the driver to one for CUDA " +
           std::to_string(runtime / 1000) + ", or build pagedtree with nvcc of CUDA " + std::to_string(driver / 1000);
  }
  if (driver < kLargeParameters) {
    return is_for + ", but pagedtree's kernels take more than 4 KB of parameters: update the driver to one for CUDA " +
           text(kLargeParameters) + " (R530) or later";
  }
  return "";
}

}  // namespace pagedtree::cuda
