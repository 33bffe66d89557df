// kernel<<<grid, block, shared_bytes>>>(arguments...) on the machine.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "simt/device.h"

namespace pagedtree::simt {

template <typename... Params, typename... Arguments>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, Arguments&&... arguments) {
  struct Call {
    void (*kernel)(Params...);
    std::tuple<std::remove_cvref_t<Params>...> arguments;
  };
  const Call call{kernel, {std::forward<Arguments>(arguments)...}};
  const auto run = [](const void* params) {
    const auto& c = *static_cast<const Call*>(params);
    std::apply(c.kernel, c.arguments);
  };
  machine().launch(grid, block, shared_bytes, run, &call);
}

}  // namespace pagedtree::simt
