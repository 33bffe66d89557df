// Default matrix instructions of attention: wgmma where its self-test has passed.
//
// `python -m pagedtree check --engine wgmma` runs the test in a separate process and caches the verdict in a file,
// which names GPU, driver, and build. Verdicts for others do not count.
#pragma once

#include <string>

#include "core/attention.h"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {

// Returns the requirement of the wgmma kernels that this machine does not meet, or an empty string.
std::string wgmma_needs(const DeviceLimits& limits);

// Resolves kAuto for the current device. The verdict is read once per device.
MatrixEngine resolved_engine(MatrixEngine asked, const DeviceLimits& limits);

}  // namespace pagedtree::cuda
