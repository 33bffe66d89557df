// The CPU backend's functions, one for each entry of Backend.
#pragma once

#include "core/backend.h"

namespace pagedtree::cpu {

void build_trees(const BuildTreesParams& params, const ExecContext& ctx);

}  // namespace pagedtree::cpu
