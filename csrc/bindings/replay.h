// What the CTAs of the CUDA attention kernel do when they follow a plan: which keys each reads, and which of these
// reads reach memory. Needs no GPU.
#pragma once

#include <cstdint>

#include "core/schedule.h"

namespace pagedtree {

// What the device offers to one launch.
struct ReplayDevice {
  int32_t num_sms;
  int32_t ctas;      // per SM at the same time
  int64_t l2_tiles;  // KV tiles of one KV head for which L2 has room
};

// Tiles are KV tiles of one KV head in which some row of the row tile sees a key. The kernel passes over all others.
struct Replay {
  int32_t ctas = 0;
  int32_t idle = 0;         // CTAs without a tile
  int64_t tiles = 0;        // of all CTAs
  int64_t most_tiles = 0;   // of one CTA
  int64_t different = 0;    // each counted once, however many row tiles read it
  int64_t from_memory = 0;  // reads that L2 did not hold

  // The largest over the mean number of tiles of a CTA.
  double balance() const {
    return tiles > 0 ? static_cast<double>(most_tiles) * ctas / static_cast<double>(tiles) : 1.0;
  }
  double kv_reads() const {
    return different > 0 ? static_cast<double>(from_memory) / static_cast<double>(different) : 1.0;
  }
};

// Replays a list's part of a plan. All CTAs are in step: each takes one KV tile, if it has one left. L2 keeps the tiles
// that were read last. Time and memory are bounded for every call: of very large ones neighbouring tiles are read
// together, and not all row tiles are walked through.
Replay replay(const WorkShape& work, const int32_t* ranges, const ReplayDevice& device);

}  // namespace pagedtree
