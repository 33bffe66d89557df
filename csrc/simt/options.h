// How launches run, and what the last launch did.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>

namespace pagedtree::simt {

// A fault of the kernel that the machine found.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The order in which CTAs get their turn, and within a CTA the threads that can go on.
struct Order {
  enum Kind { kForward, kReverse, kRandom } kind = kForward;
  uint64_t seed = 1;
};

// The order that PAGEDTREE_SIMT_ORDER names (forward, reverse, random or random:SEED); read at each launch.
Order order_from_environment();

// The device that launchers see: PAGEDTREE_SIMT_DEVICE=SMS:KILOBYTES:CLUSTER, default 4:227:8; read each time.
struct Device {
  int num_sms = 4;
  int max_shared_bytes = 227 << 10;  // of a block
  int max_cluster = 8;
};
Device device_from_environment();

struct Options {
  std::optional<Order> order;  // none: order_from_environment()
  bool mma_truncates = false;  // tensor cores round sums towards zero
  bool refuses_maps = false;   // as a driver that cannot make a tensor map
};
Options& options();

// Statistics of the last launch.
struct Statistics {
  uint64_t mma, ldmatrix, ldmatrix_wavefronts, cp_async, barriers, switches;
};
Statistics& statistics();

}  // namespace pagedtree::simt
