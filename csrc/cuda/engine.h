// Which instructions attention multiplies with where nobody has chosen: wgmma where its self-test has passed.
//
// `python -m pagedtree check --engine wgmma` runs the test in a process of its own and keeps the verdict in a file of
// the user's cache folder. The file begins with the names of GPU, driver and build, and one for others does not count.
#pragma once

#include <string>

#include "core/attention.h"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {

// What the kernels for wgmma need and do not have here; empty if they can run.
std::string wgmma_needs(const DeviceLimits& limits);

// The engine itself, or the one that kAuto stands for on the current device. The verdict is read once for each device.
MatrixEngine resolved_engine(MatrixEngine asked, const DeviceLimits& limits);

}  // namespace pagedtree::cuda
