// The draft tree with the most expected tokens per second; see pagedtree.choose_tree.
#pragma once

#include <cstdint>
#include <vector>

#include "bindings/arrays.h"

namespace pagedtree {

// The parents of its nodes, level by level; the root's is -1.
// levels: [D, R], how often the child of each rank is accepted where its parent was, the root's children first.
// costs: [M], seconds of a step with a tree of 1..M nodes, which do not descend. level_cost: more seconds for each
// level.
std::vector<int32_t> best_tree(const Array<double>& levels, const Array<double>& costs, double level_cost);

}  // namespace pagedtree
