// The draft tree with the most expected tokens per second; see pagedtree.choose_tree.
#pragma once

#include <cstdint>
#include <vector>

#include "bindings/arrays.h"

namespace pagedtree {

// Returns the parents, level by level, -1 for the root.
// levels: [D, R] acceptance rate of each rank's child given its parent, the root's children first.
// costs: [M] seconds of a step with 1..M nodes, not descending. level_cost: extra seconds per level.
std::vector<int32_t> best_tree(const Array<double>& levels, const Array<double>& costs, double level_cost);

}  // namespace pagedtree
