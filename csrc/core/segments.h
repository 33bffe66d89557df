// Segments make a sequence's result bitwise equal in every batch: cuts are at multiples of `segment` keys from its
// first one, row tiles depend only on its rows, and the segments' separate partial results are merged last, in key
// order.
#pragma once

#include "core/schedule.h"

namespace pagedtree {

// The size of a plan encodes the segment for the host: one more number per KV tile of a segment.
constexpr int64_t plan_size(int64_t segment) { return kPlanSize + segment / kKvTile; }

inline int64_t segments_of(const TreeAttentionParams& p) {
  return p.segment > 0 ? ceil_div<int64_t>(max_seq_len_of(p), p.segment) : 1;
}
// Rows of all heads, and bytes of their partial results in one segment.
inline int64_t rows_of_heads(const TreeAttentionParams& p) { return p.num_tokens * p.num_kv_heads * p.group_size; }
inline int64_t segment_bytes(const TreeAttentionParams& p) {
  return rows_of_heads(p) * (p.head_dim_v + 2) * int64_t{sizeof(float)};
}
// Reserves a place for every row in each segment, so no plan leads outside.
inline int64_t segments_bytes(const TreeAttentionParams& p) {
  return segments_of(p) > 1 ? segments_of(p) * segment_bytes(p) : 0;
}
// Returns a KV head's first row in the segment with this KV tile.
PT_HOST_DEVICE int64_t row_in_segments(const TreeAttentionParams& p, const WorkShape& shape, int32_t kv_tile,
                                       int32_t kv_head, int64_t first_token) {
  const auto segment = int64_t{shape.by_segment.quotient(static_cast<uint32_t>(kv_tile))};
  return ((segment * p.num_kv_heads + kv_head) * p.num_tokens + first_token) * p.group_size;
}

// The segments in which a row sees keys; others may not have been stored.
struct VisibleSegments {
  int32_t begin, end;

  PT_HOST_DEVICE VisibleSegments(const WorkShape& shape, const Visibility& seen) {
    const int32_t keys = shape.segment * kKvTile, lowest = seen.lowest(), highest = seen.highest();
    begin = lowest / keys;
    end = lowest < highest ? (highest - 1) / keys + 1 : begin;
  }
};

}  // namespace pagedtree
