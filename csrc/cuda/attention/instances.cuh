// Looks up an instance, for the files that compile them.
#pragma once

#include <iterator>
#include <utility>

#include "cuda/attention/instances.h"

namespace pagedtree::cuda {

// Returns a tile shape's launcher; `make<head_dim, m_tile, head_dim_v>()` is instantiated for all of the engine.
template <MatrixEngine kEngine, typename Make, size_t... i>
AttentionLauncher find_launcher(const TileShape& shape, const Make& make, std::index_sequence<i...>) {
  AttentionLauncher found = nullptr;
  const auto match = [&]<size_t kIndex>() {
    constexpr TileShape kShape = kTileShapes[kIndex];
    if constexpr (kShape.engine == kEngine) {
      if (shape.head_dim == kShape.head_dim && shape.head_dim_v == kShape.head_dim_v && shape.m_tile == kShape.m_tile)
        found = make.template operator()<kShape.head_dim, kShape.m_tile, kShape.head_dim_v>();
    }
  };
  (match.template operator()<i>(), ...);
  return found;
}

template <MatrixEngine kEngine, typename Make>
AttentionLauncher find_launcher(const TileShape& shape, const Make& make) {
  return find_launcher<kEngine>(shape, make, std::make_index_sequence<std::size(kTileShapes)>());
}

}  // namespace pagedtree::cuda
