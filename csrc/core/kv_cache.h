// Where positions of a sequence lie in a paged cache, and which rows move: written once for every backend.
#pragma once

#include "core/tree.h"

namespace pagedtree {

// A place in a cache; a negative page means that there is none.
struct Slot {
  int32_t page;
  int32_t offset;
};

// The place of a position; none if it is outside the table or the table names no page. Whether the page is in the pool
// is checked by the caller, who knows the pool.
PT_HOST_DEVICE Slot locate(const PageTable& table, int64_t b, int64_t position) {
  const int64_t index = position / table.page_size;
  if (position < 0 || index >= table.max_pages) return {-1, 0};
  const int32_t page = table.pages[b * table.row_stride + index];
  return {page, static_cast<int32_t>(position - index * table.page_size)};
}

PT_HOST_DEVICE int64_t slot_id(Slot slot, int64_t page_size) {
  return slot.page < 0 ? -1 : slot.page * page_size + slot.offset;
}

PT_HOST_DEVICE int64_t query_slot(const SlotMappingParams& p, int64_t row) {
  const int64_t b = sequence_of_row(p.cu_seqlens_q, p.batch, row);
  if (b < 0) return -1;
  const int64_t position = p.seq_lens[b] - node_range(p.cu_seqlens_q, p.batch, b, INT32_MAX).end + row;
  return slot_id(locate(p.table, b, position), p.table.page_size);
}

// The number of accepted drafts of sequence b, bounded by the path's length; -1 if the sequence has no tree.
PT_HOST_DEVICE int32_t path_length(const CompactKvParams& p, int64_t b) {
  if (p.path_width < 1 || p.start[b] < 0 || p.accept_index[b * p.accept_stride] < 0) return -1;
  return clamp_to(p.num_accepted[b], 0, p.path_width - 1);
}

PT_HOST_DEVICE int32_t compacted_length(const CompactKvParams& p, int64_t b) {
  const int64_t length = int64_t{p.start[b]} + path_length(p, b) + 1;
  return static_cast<int32_t>(min_of<int64_t>(length, INT32_MAX));
}

struct Move {
  Slot from, to;
};

// The j-th move of sequence b; false if the row is in place already or one of the two places is outside the cache.
PT_HOST_DEVICE bool path_move(const CompactKvParams& p, int64_t b, int32_t j, Move& move) {
  const int32_t node = p.accept_index[b * p.accept_stride + j];
  if (node < 0 || node == j) return false;
  move.from = locate(p.table, b, int64_t{p.start[b]} + node);
  move.to = locate(p.table, b, int64_t{p.start[b]} + j);
  const auto inside = [&](Slot slot) { return slot.page >= 0 && slot.page < p.num_pages; };
  return inside(move.from) && inside(move.to);
}

// Byte offset of a row in a cache.
PT_HOST_DEVICE int64_t row_offset(const CacheView& cache, Slot slot) {
  return slot.page * cache.page_stride + slot.offset * cache.slot_stride;
}

}  // namespace pagedtree
