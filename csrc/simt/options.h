// Launch settings, and statistics of the last launch.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>

namespace pagedtree::simt {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Order of CTAs, and of the runnable threads within a CTA.
struct Order {
  enum Kind { kForward, kReverse, kRandom } kind = kForward;
  uint64_t seed = 1;
};

// Reads PAGEDTREE_SIMT_ORDER (forward, reverse, random or random:SEED), at each launch.
Order order_from_environment();

// From PAGEDTREE_SIMT_DEVICE=SMS:KILOBYTES:CLUSTER, default 4:227:8; read at each call.
struct Device {
  int num_sms = 4;
  int max_shared_bytes = 227 << 10;  // per block
  int max_cluster = 8;
};
Device device_from_environment();

struct Options {
  std::optional<Order> order;  // none: order_from_environment()
  bool mma_truncates = false;  // tensor cores round sums towards zero
  bool refuses_maps = false;   // like a driver without tensor maps
};
Options& options();

struct Statistics {
  uint64_t mma, ldmatrix, ldmatrix_wavefronts, cp_async, barriers, switches;
};
Statistics& statistics();

}  // namespace pagedtree::simt
