// The launchers of one pair of types, for the file that compiles them.
#pragma once

#include <utility>

#include "cuda/attention/instances.h"
#include "cuda/attention/kernel.cuh"

namespace pagedtree::cuda {

template <typename T, typename Kv, size_t... i>
AttentionLauncher find_launcher(const TileShape& shape, std::index_sequence<i...>) {
  AttentionLauncher found = nullptr;
  const auto match = [&]<int kHeadDim, int kMTile>() {
    if (shape.head_dim == kHeadDim && shape.m_tile == kMTile)
      found = launch_attention<Instance<T, Kv, kHeadDim, kMTile>>;
  };
  (match.template operator()<kTileShapes[i].head_dim, kTileShapes[i].m_tile>(), ...);
  return found;
}

template <typename T, typename Kv>
AttentionLauncher find_launcher(const TileShape& shape) {
  return find_launcher<T, Kv>(shape, std::make_index_sequence<std::size(kTileShapes)>());
}

}  // namespace pagedtree::cuda
