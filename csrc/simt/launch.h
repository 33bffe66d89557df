// Runs kernel<<<grid, block, shared_bytes>>>(arguments...) in clusters of CTAs.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "simt/device.h"

namespace pagedtree::simt {

// Test hook for compiled kernels: receives launches without clusters, with parameters in GPU layout. Returns 0 to leave
// the launch to the machine.
using Executor = int (*)(const void* kernel, const unsigned* grid, const unsigned* block, size_t shared_bytes,
                         const unsigned char* params, size_t param_bytes);
Executor& executor();

template <typename... Params>
std::vector<unsigned char> packed(const Params&... params) {
  std::vector<unsigned char> bytes;
  const auto append = [&]<typename T>(const T& param) {
    bytes.resize((bytes.size() + alignof(T) - 1) / alignof(T) * alignof(T) + sizeof(T));
    std::memcpy(bytes.data() + bytes.size() - sizeof(T), &param, sizeof(T));
  };
  (append(params), ...);
  return bytes;
}

template <typename... Params, typename... Arguments>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, unsigned cluster, size_t shared_bytes,
            Arguments&&... arguments) {
  struct Call {
    void (*kernel)(Params...);
    std::tuple<std::remove_cvref_t<Params>...> arguments;
  };
  const Call call{kernel, {std::forward<Arguments>(arguments)...}};
  if (executor() != nullptr && cluster == 1) {
    const auto params = std::apply(packed<std::remove_cvref_t<Params>...>, call.arguments);
    const unsigned grid_sizes[3] = {grid.x, grid.y, grid.z}, block_sizes[3] = {block.x, block.y, block.z};
    if (executor()(reinterpret_cast<const void*>(kernel), grid_sizes, block_sizes, shared_bytes, params.data(),
                   params.size()) != 0) {
      return;
    }
  }
  const auto run = [](const void* params) {
    const auto& c = *static_cast<const Call*>(params);
    std::apply(c.kernel, c.arguments);
  };
  machine().launch(grid, block, cluster, shared_bytes, run, &call);
}

}  // namespace pagedtree::simt
