// Replay of the CTAs of the CUDA attention kernel under a plan: their key reads, and how many reach memory.
#pragma once

#include <cstdint>

#include "core/schedule.h"

namespace pagedtree {

struct ReplayDevice {
  int32_t num_sms;
  int32_t ctas;      // per SM, concurrent
  int64_t l2_tiles;  // capacity of L2 in KV tiles of one KV head
};

// Tiles are KV tiles of one KV head with a key visible to the row tile; the kernel skips all others.
struct Replay {
  int32_t ctas = 0;
  int32_t idle = 0;         // CTAs without a tile
  int64_t tiles = 0;        // of all CTAs
  int64_t most_tiles = 0;   // of one CTA
  int64_t different = 0;    // distinct tiles
  int64_t from_memory = 0;  // L2 misses

  // Returns the maximum number of tiles per CTA over the mean.
  double balance() const {
    return tiles > 0 ? static_cast<double>(most_tiles) * ctas / static_cast<double>(tiles) : 1.0;
  }
  double kv_reads() const {
    return different > 0 ? static_cast<double>(from_memory) / static_cast<double>(different) : 1.0;
  }
};

// Replays a list's part of a plan with all CTAs in step, one KV tile each, and an LRU L2. Very large calls are
// coarsened and sampled, which bounds time and memory.
Replay replay(const WorkShape& work, const int32_t* ranges, const ReplayDevice& device);

}  // namespace pagedtree
