// Default matrix instructions of attention: wgmma if its self-test, `python -m pagedtree check --engine wgmma`, has
// passed. The verdict is cached in a file that names GPU, driver, and build, and counts only for them.
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
