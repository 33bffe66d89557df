// The parts of ops over rows of logits that are compiled for Hopper alone. Each returns false if other kernels must do
// all of the work.
#pragma once

#include "core/backend.h"
#include "core/drafting.h"
#include "core/sampling.h"
#include "core/verify/tree_walk.h"

namespace pagedtree::cuda {

// Walks trees. Those with a row of which more tokens may be kept than fit have the status kLeftToOthers then.
bool walk_on_chip(const VerifyParams& p, const ExecContext& ctx);

// Samples rows. Those of which more tokens may be kept than fit have a negative token then.
bool sample_on_chip(const SampleParams& p, const ExecContext& ctx);

// Writes the children of all frontier nodes, for law "topk".
bool expand_on_chip(const ExpandTreeParams& p, const ExecContext& ctx);

}  // namespace pagedtree::cuda
