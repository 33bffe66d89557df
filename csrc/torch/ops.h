// The host functions behind torch.ops.pagedtree: validate, fill params, call the backend.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "torch/dispatch.h"

namespace pagedtree::ops {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> build_trees(const Tensor& parents, const Tensor& cu_nodes,
                                                               int64_t max_nodes, int64_t max_depth);

}  // namespace pagedtree::ops
