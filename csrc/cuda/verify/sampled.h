// The part of verify_sampled() that is compiled for Hopper alone.
#pragma once

#include "core/backend.h"
#include "core/verify/tree_walk.h"

namespace pagedtree::cuda {

// Walks trees over rows on chip where Hopper's kernels have passed their self-test (cuda/engine.h), all of them under
// greedy sampling; the status of those with filters becomes kLeftToOthers. Returns false if another kernel must walk
// them all.
bool walk_on_chip(const VerifyParams& p, const ExecContext& ctx);

}  // namespace pagedtree::cuda
