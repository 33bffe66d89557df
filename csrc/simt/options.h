// How launches run, and what the last one did.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>

namespace pagedtree::simt {

// A fault of the kernel that the machine found.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The order in which CTAs, and within one the threads that can go on, get their turn.
struct Order {
  enum Kind { kForward, kReverse, kRandom } kind = kForward;
  uint64_t seed = 1;
};

// Of PAGEDTREE_SIMT_ORDER (forward, reverse, random or random:SEED), read anew at each launch.
Order order_from_environment();

// The device that launchers are told they have: by PAGEDTREE_SIMT_DEVICE=SMS:KILOBYTES:CLUSTER, default 4:227:8, read
// anew each time.
struct Device {
  int num_sms = 4;
  int max_shared_bytes = 227 << 10;  // of a block
  int max_cluster = 8;
};
Device device_from_environment();

struct Options {
  std::optional<Order> order;  // none: order_from_environment()
  bool mma_truncates = false;  // tensor cores round sums towards zero
};
Options& options();

// Of the last launch.
struct Statistics {
  uint64_t mma, ldmatrix, ldmatrix_wavefronts, cp_async, barriers, switches;
};
Statistics& statistics();

}  // namespace pagedtree::simt
