// Slots of positions in a paged cache, and the moves that compact an accepted path. Last dimensions are contiguous.
// slot(b, position) = pages[b][position / page_size] * page_size + position % page_size
#pragma once

#include "core/tree.h"

namespace pagedtree {

struct SlotMappingParams {
  PageTable table;
  const int32_t* seq_lens;      // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  int64_t* slots;               // [T] out
  int64_t batch;
  int64_t total_q;  // T
};

struct AppendSide {
  const void* rows;    // [T, num_kv_heads, head_dim]
  void* cache;         // [num_pages, page_size, num_kv_heads, head_dim], written
  const float* scale;  // [1], or [num_kv_heads] with scale_stride 1; null = 1
  int64_t token_stride, head_stride;
  int64_t cache_page_stride, cache_slot_stride, cache_head_stride;
  int64_t scale_stride;
  int64_t head_dim;  // K and V may differ
};

struct AppendKvParams {
  AppendSide sides[2];   // K, V
  int32_t num_sides;     // 1: K alone (MLA's latent cache)
  const int64_t* slots;  // [T]
  int64_t num_tokens;    // T
  int64_t num_kv_heads;
  int64_t num_pages, page_size;
  DType dtype;
  DType cache_dtype;  // equals dtype: rows are copied; else kFloat8E4M3
};

// Rotates q and k by the angles of their positions, and appends k and v.
struct RopeAppendParams {
  AppendKvParams append;     // its first side is K, stored rotated
  const void* q;             // [T, num_q_heads, head_dim]
  void* q_out;               // like q, written; may be q
  const int64_t* positions;  // [T]
  const void* cos_sin;       // [num_angle_rows, rotary_dim]: cosines, then sines
  int64_t q_token_stride, q_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t cos_sin_stride;
  int64_t num_angle_rows;  // at least 1 if there is a token
  int64_t num_q_heads;
  int64_t head_dim;                  // of queries and keys
  int64_t rotary_start, rotary_dim;  // rotated columns; rotary_dim is even
  DType cos_sin_dtype;               // dtype of the rows, or fp32
  bool interleaved;                  // pairs are neighbours; else they span both halves
};

// A tensor [num_pages, page_size, ...] as bytes: a row is sizes[0] * sizes[1] * sizes[2] runs of run_bytes.
struct CacheView {
  void* data;
  int64_t page_stride, slot_stride;  // bytes
  int64_t run_bytes;
  int64_t sizes[3];
  int64_t strides[3];  // bytes
};

constexpr int kMaxCompactTensors = 128;

// Passed by value to one launch.
struct CompactKvParams {
  CacheView caches[kMaxCompactTensors];
  PageTable table;
  const int32_t* start;         // [B]
  const int32_t* accept_index;  // [B, path_width]
  const int32_t* num_accepted;  // [B]
  int32_t* seq_lens;            // [B] out
  int64_t batch;
  int64_t accept_stride;
  int64_t num_pages;
  int32_t num_caches;
  int32_t path_width;  // S, at most kMaxTreeNodes
};

// A negative page means none.
struct Slot {
  int32_t page;
  int32_t offset;
};

// Returns none outside the table. The caller checks that the page is in the pool. `page_of` divides by page_size.
template <typename PageOf>
PT_HOST_DEVICE Slot locate(const PageTable& table, int64_t b, int64_t position, const PageOf& page_of) {
  const int64_t index = position < 0 ? table.max_pages : page_of(position);
  if (index >= table.max_pages) return {-1, 0};
  const int32_t page = table.pages[b * table.row_stride + index];
  return {page, static_cast<int32_t>(position - index * table.page_size)};
}

PT_HOST_DEVICE Slot locate(const PageTable& table, int64_t b, int64_t position) {
  return locate(table, b, position, [&](int64_t at) { return at / table.page_size; });
}

PT_HOST_DEVICE int64_t slot_id(Slot slot, int64_t page_size) {
  return slot.page < 0 ? -1 : slot.page * page_size + slot.offset;
}

PT_HOST_DEVICE int64_t num_items(const SlotMappingParams& p) { return p.total_q; }

PT_HOST_DEVICE void map_query(const SlotMappingParams& p, int64_t row) {
  p.slots[row] = -1;
  const int64_t b = sequence_of_row(p.cu_seqlens_q, p.batch, row);
  if (b < 0) return;
  const int64_t position = p.seq_lens[b] - node_range(p.cu_seqlens_q, p.batch, b, INT32_MAX).end + row;
  p.slots[row] = slot_id(locate(p.table, b, position), p.table.page_size);
}

// Clamps positions to the table of angles.
PT_HOST_DEVICE int64_t angle_row(const RopeAppendParams& p, int64_t token) {
  return clamp_to<int64_t>(p.positions[token], 0, p.num_angle_rows - 1);
}

// Returns the accepted drafts, at most the path's length; -1 without a tree.
PT_HOST_DEVICE int32_t path_length(const CompactKvParams& p, int64_t b) {
  if (p.path_width < 1) return -1;
  const int32_t start = p.start[b], root = p.accept_index[b * p.accept_stride], accepted = p.num_accepted[b];
  // Bitwise or: no load waits for another.
  return min_of(clamp_to(accepted, 0, p.path_width - 1), (start | root) < 0 ? -1 : INT32_MAX);
}

PT_HOST_DEVICE int32_t compacted_length(const CompactKvParams& p, int64_t b) {
  const int64_t length = int64_t{p.start[b]} + path_length(p, b) + 1;
  return static_cast<int32_t>(min_of<int64_t>(length, INT32_MAX));
}

struct Move {
  Slot from, to;
};

// Returns false if the row is in place or a slot is outside the cache.
template <typename PageOf>
PT_HOST_DEVICE bool path_move(const CompactKvParams& p, int64_t b, int32_t j, int32_t node, Move& move,
                              const PageOf& page_of) {
  if (node < 0 || node == j) return false;
  move.from = locate(p.table, b, int64_t{p.start[b]} + node, page_of);
  move.to = locate(p.table, b, int64_t{p.start[b]} + j, page_of);
  const auto inside = [&](Slot slot) { return slot.page >= 0 && slot.page < p.num_pages; };
  return inside(move.from) && inside(move.to);
}

PT_HOST_DEVICE int64_t row_offset(const CacheView& cache, Slot slot) {
  return slot.page * cache.page_stride + slot.offset * cache.slot_stride;
}

}  // namespace pagedtree
