// Ragged trees whose sizes are known only on the device: offsets and padding.
#pragma once

#include "core/ops.h"

namespace pagedtree::cuda {

struct PackParams {
  int32_t* cu_nodes;      // [B + 1]; in: entry b + 1 is tree b's size; out: offsets
  int64_t* draft_tokens;  // [num_rows], padding written
  int32_t* parents;       // [num_rows], padding written
  int32_t* node_map;      // [num_rows] or null, padding written
  int64_t batch;
  int64_t num_rows;
};

void pack_trees(const PackParams& params, const ExecContext& ctx);

}  // namespace pagedtree::cuda
